"""Small trainings that anyone can run: what the failure rehearsal trains."""

from inshrink_core.tasks.find import find_task, task_names
from inshrink_core.tasks.task import Task

__all__ = ["Task", "find_task", "task_names"]
