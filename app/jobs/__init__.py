"""Jobs: long work in child processes, which the pages observe."""

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Requests, Work, subject_of, subjects_of

__all__ = ["Job", "Requests", "Work", "subject_of", "subjects_of"]
