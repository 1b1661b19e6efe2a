"""Jobs: long work in child processes, which the pages observe."""

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.printed import python_text, shell_text
from inshrink_app.jobs.work import Requests, Work, subject_of, subjects_of

__all__ = ["Job", "Requests", "Work", "python_text", "shell_text", "subject_of", "subjects_of"]
