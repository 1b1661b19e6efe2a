"""What the worker can do: a module a task, each with ``run(request, report)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from inshrink_app.jobs.report import Report

__all__ = ["ACTIONS", "action"]

ACTIONS = ("compare", "export", "prune", "rehearse", "restore", "search", "sensitivity", "verify")
"""The tasks a request may name; each is a module here."""

Action = Callable[[Mapping[str, Any], Report], None]


def action(task: str) -> Action:
    """Return what does a task.

    Raises
    ------
    KeyError
        There is no such task.
    """
    if task not in ACTIONS:
        raise KeyError(task)
    found: Action = import_module(f"inshrink_app.actions.{task}").run
    return found
