"""Tasks by name, or from a user's file."""

from __future__ import annotations

import hashlib
import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import InputError, MissingExtraError, NotFoundError
from inshrink_core.tasks.task import Task

__all__ = ["find_task", "task_names"]

_TASKS: Final = {
    "char-gpt": "inshrink_core.tasks.char_gpt:CharGPTTask",
    "char-conv": "inshrink_core.tasks.char_conv:CharConvTask",
    "char-conv-adamw": "inshrink_core.tasks.char_conv:CharConvWithAdamWTask",
    "digits-cnn": "inshrink_core.tasks.digits_cnn:DigitsCNNTask",
    "digits-cnn-sgd": "inshrink_core.tasks.digits_cnn:DigitsCNNWithSGDTask",
}
_ATTRIBUTES: Final = tuple(Task.__annotations__)
_METHODS: Final = ("build", "optimizer", "learning_rate_factor", "batch", "loss", "evaluate")


def task_names() -> tuple[str, ...]:
    """Return the names of the shipped tasks."""
    return tuple(_TASKS)


def find_task(name: str) -> tuple[Task, str]:
    """Return a task, and a text that changes when the task does.

    Parameters
    ----------
    name
        One of `task_names`, or ``FILE.py:CLASS``. The file is executed.

    Raises
    ------
    NotFoundError
        There is no such task, file or class.
    InputError
        The class is no `Task`, or cannot be made.

    Examples
    --------
    >>> task, identity = find_task("char-gpt")
    >>> task.metric, identity
    ('val_loss', 'char-gpt/1')
    """
    if name in _TASKS:
        module, _, attribute = _TASKS[name].partition(":")
        task: Task = getattr(importlib.import_module(module), attribute)()
        return task, f"{task.name}/{task.version}"
    path_text, colon, attribute = name.rpartition(":")
    path = Path(path_text)
    if not colon or path.suffix != ".py":
        raise NotFoundError(
            f"there is no task '{name}'", remedy=f"choose one of {', '.join(_TASKS)}, or give FILE.py:CLASS"
        )
    if not path.is_file():
        raise NotFoundError("there is no such file", where=str(path))
    made = _make(_load(path), attribute, str(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return made, f"{made.name}/{made.version}/{attribute}/{digest}"


def _load(path: Path) -> Any:
    """Execute a user's file as a module of its own."""
    name = f"inshrink_task_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("this cannot be loaded as a Python module", where=str(path))
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"the file cannot be executed ({type(error).__name__}: {error})", where=str(path)
        ) from error
    return module


def _make(module: Any, attribute: str, where: str) -> Task:
    """Make a user's task, and name everything it lacks at once."""
    kind = getattr(module, attribute, None)
    if not callable(kind):
        raise NotFoundError(f"there is no class '{attribute}' in it", where=where)
    try:
        task: Task = kind()
    except MissingExtraError:
        raise
    except Exception as error:
        raise InputError(f"{attribute}() fails ({type(error).__name__}: {error})", where=where) from error
    missing = [name for name in _ATTRIBUTES if not hasattr(task, name)]
    missing += [f"{name}()" for name in _METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise InputError(
            f"{attribute} is no task: it lacks {', '.join(missing)}",
            where=where,
            remedy="docs/rehearsal.md shows a whole one",
        )
    if task.direction not in ("lower", "higher"):
        raise InputError(
            "the task's direction", where=where, expected="lower or higher", found=repr(task.direction)
        )
    return task
