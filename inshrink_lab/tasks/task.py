"""Protocol of a task: a model, its data and its metric, with reproducible steps."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from inshrink_core.errors import InputError, MissingExtraError, NotFoundError
from inshrink_core.plugins import plugin, plugins
from inshrink_core.text import described

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Task", "find_task", "task_names"]


@runtime_checkable
class Task(Protocol):
    """A training that can be interrupted and continued at any step.

    Attributes
    ----------
    name
        A single word, used in file names.
    version
        Version of the training; a new one invalidates stored results.
    metric
        Name of the result of `evaluate`.
    direction
        ``lower`` or ``higher``: which direction of the metric is better.
    n_steps, n_saves, n_restores
        Defaults of a rehearsal.
    max_gradient_norm
        Gradients are clipped to this norm; None for no clipping.

    Notes
    -----
    `build` and `loss` may draw from torch's global generator: it is seeded before `build`, and saved and
    restored with the training. Data must come from the generator passed to `batch`, so that the batch of a
    step does not depend on earlier steps.
    """

    name: str
    version: int
    metric: str
    direction: str
    n_steps: int
    n_saves: int
    n_restores: int
    max_gradient_norm: float | None

    def build(self) -> nn.Module:
        """Return a freshly initialised model, in training mode, on the CPU."""
        ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; its parameter groups hold the peak learning rate."""
        ...

    def learning_rate_factor(self, step: int, n_steps: int) -> float:
        """Return the share of the peak learning rate at a step from 1 to `n_steps`."""
        ...

    def batch(self, step: int, generator: torch.Generator) -> Any:
        """Return the batch of a step: a tensor, or a tuple of them, on the CPU.

        `generator` is seeded by the run's seed and the step.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the training loss of a batch, a scalar."""
        ...

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric on fixed validation data; leave the model unchanged."""
        ...


_GROUP: Final = "inshrink.tasks"
_ATTRIBUTES: Final = tuple(Task.__annotations__)
_METHODS: Final = ("build", "optimizer", "learning_rate_factor", "batch", "loss", "evaluate")


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks: shipped ones, then those of entry points ``inshrink.tasks``."""
    return tuple(plugins(_GROUP))


def find_task(name: str) -> tuple[Task, str]:
    """Return a task, and an identification that changes with the task.

    Parameters
    ----------
    name
        One of `task_names`, or ``FILE.py:CLASS``. The file is executed.

    Raises
    ------
    NotFoundError
        The task, file or class does not exist.
    InputError
        The class is no `Task`, or cannot be instantiated.

    Examples
    --------
    >>> task, identity = find_task("char-gpt")
    >>> task.metric, identity
    ('val_loss', 'char-gpt/1')
    """
    point = plugin(_GROUP, name)
    if point is not None:
        task = _make(point.load(), name, f"the task '{name}'")
        return task, f"{task.name}/{task.version}"
    path_text, colon, attribute = name.rpartition(":")
    path = Path(path_text)
    if not colon or path.suffix != ".py":
        raise NotFoundError(
            f"there is no task '{name}'",
            remedy=f"choose one of {', '.join(task_names())}, or give FILE.py:CLASS",
        )
    if not path.is_file():
        raise NotFoundError("there is no such file", where=str(path))
    kind = getattr(_load(path), attribute, None)
    if not callable(kind):
        raise NotFoundError(f"there is no class '{attribute}' in it", where=str(path))
    made = _make(kind, attribute, str(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return made, f"{made.name}/{made.version}/{attribute}/{digest}"


def _load(path: Path) -> Any:
    """Execute a user's file as a separate module."""
    module = ModuleType(f"inshrink_task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except Exception as error:
        raise InputError(f"the file cannot be executed ({described(error)})", where=str(path)) from error
    return module


def _make(kind: Callable[[], Task], attribute: str, where: str) -> Task:
    """Instantiate a task; report all missing attributes at once."""
    try:
        task = kind()
    except MissingExtraError:
        raise
    except Exception as error:
        raise InputError(f"{attribute}() fails ({described(error)})", where=where) from error
    missing = [name for name in _ATTRIBUTES if not hasattr(task, name)]
    missing += [f"{name}()" for name in _METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise InputError(
            f"{attribute} is not a task: it lacks {', '.join(missing)}",
            where=where,
            remedy="docs/rehearsal.md shows a whole one",
        )
    if task.direction not in ("lower", "higher"):
        raise InputError(
            "the task's direction", where=where, expected="lower or higher", found=repr(task.direction)
        )
    return task
