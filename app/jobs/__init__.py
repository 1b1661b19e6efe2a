"""Long work in processes of its own, which the pages only look at."""

from inshrink_app.jobs.job import Job, Load
from inshrink_app.jobs.printed import python_text, shell_text
from inshrink_app.jobs.work import Own, Requests, Work, subject_of, subjects_of

__all__ = ["Job", "Load", "Own", "Requests", "Work", "python_text", "shell_text", "subject_of", "subjects_of"]
