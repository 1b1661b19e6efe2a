"""Small trainings that anyone can run: what the failure rehearsal trains."""

from __future__ import annotations

from inshrink_lab.tasks.task import Task, find_task, task_names

__all__ = ["Task", "find_task", "task_names"]
