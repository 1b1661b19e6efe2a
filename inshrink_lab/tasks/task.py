"""What a task is: a model, its data and its metric, each step the same whenever it is asked for."""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

from inshrink_core.errors import InputError, MissingExtraError, NotFoundError
from inshrink_core.plugins import plugin, plugins
from inshrink_core.text import described

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["LARGE", "Task", "at_scale", "find_task", "on_cpu", "task_names", "warmup_cosine"]

P = ParamSpec("P")
T = TypeVar("T")

LARGE: Final = "large"
"""The scale for a GPU, and the attribute of a task that has one."""

_SCALES: Final = ("medium", LARGE)


@runtime_checkable
class Task(Protocol):
    """A training that can be interrupted and taken up again at any step.

    Attributes
    ----------
    name
        One word, used in file names.
    version
        Raised whenever the training changes, so that results of an earlier one are not reused.
    metric
        Name of what `evaluate` returns.
    direction
        ``lower`` or ``higher``: which way the metric is better.
    n_steps, n_saves, n_restores
        Defaults of a rehearsal.
    max_gradient_norm
        Gradients are clipped to this norm; None for no clipping.

    Notes
    -----
    `build` and `loss` may draw from torch's global generator: it is seeded before `build`, and saved
    and restored with the training. Data must come from the generator that `batch` is given, so that a
    step sees the same batch however training came there.

    A task may have the attributes ``medium`` and ``large``: the attributes, by name, that are others where it
    is trained at that scale, on a processor for half an hour or on a GPU. The data are the same.
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
        """Return the metric on held-out data; the same ones always. Leaves the model as it was."""
        ...


_GROUP: Final = "inshrink.tasks"
_ATTRIBUTES: Final = tuple(Task.__annotations__)
_METHODS: Final = ("build", "optimizer", "learning_rate_factor", "batch", "loss", "evaluate")


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks: shipped ones, then those of entry points ``inshrink.tasks``."""
    return tuple(plugins(_GROUP))


def find_task(name: str, scale: str | None = None) -> tuple[Task, str]:
    """Return a task, and a text that changes when the task does.

    Parameters
    ----------
    name
        One of `task_names`, or ``FILE.py:CLASS``. The file is executed.
    scale
        ``medium``, ``large``: the task with a larger model, under the name ``NAME@medium`` or ``NAME@large``.

    Raises
    ------
    NotFoundError
        There is no such task, file or class.
    InputError
        The class is no `Task`, cannot be made, or has no such scale.

    Examples
    --------
    >>> task, identity = find_task("char-gpt")
    >>> task.metric, identity
    ('val_loss', 'char-gpt/1')
    >>> task, identity = find_task("char-gpt", "large")
    >>> task.width, identity
    (768, 'char-gpt@large/1')
    """
    point = plugin(_GROUP, name)
    if point is not None:
        task = at_scale(_make(point.load(), name, f"the task '{name}'"), scale)
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
    made = at_scale(_make(kind, attribute, str(path)), scale)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return made, f"{made.name}/{made.version}/{attribute}/{digest}"


def at_scale(task: Any, scale: str | None) -> Any:
    """Give a task the attributes and the name that it has at a scale; None: leave it as it is.

    Raises
    ------
    InputError
        The task has no such scale, or what it states is none.
    """
    if scale is None:
        return task
    changes = getattr(task, scale, None) if scale in _SCALES else None
    if not isinstance(changes, Mapping):
        raise InputError(
            f"the task '{task.name}' has no scale '{scale}'",
            expected=f"one of {', '.join(_SCALES)}, of a task that states it (docs/rehearsal.md)",
        )
    unknown = [name for name in changes if not hasattr(task, name)]
    if unknown:
        raise InputError(f"the task '{task.name}' is to have other {', '.join(unknown)}, and has none")
    for name, value in changes.items():
        setattr(task, name, value)
    task.name = f"{task.name}@{scale}"
    return task


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
        raise InputError(f"the file cannot be executed ({described(error)})", where=str(path)) from error
    return module


def _make(kind: Callable[[], Task], attribute: str, where: str) -> Task:
    """Make a task, and name everything it lacks at once."""
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
            f"{attribute} is no task: it lacks {', '.join(missing)}",
            where=where,
            remedy="docs/rehearsal.md shows a whole one",
        )
    if task.direction not in ("lower", "higher"):
        raise InputError(
            "the task's direction", where=where, expected="lower or higher", found=repr(task.direction)
        )
    return task


def on_cpu(make: Callable[P, T]) -> Callable[P, T]:
    """Make what outlives its call on the CPU, whichever device is the default in that call."""

    @functools.wraps(make)
    def made(*args: P.args, **named: P.kwargs) -> T:
        import torch

        with torch.device("cpu"):
            return make(*args, **named)

    return made


def warmup_cosine(step: int, n_steps: int, *, warmup: int, floor: float) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine down to `floor`.

    Parameters
    ----------
    step
        From 1 to `n_steps`.
    n_steps
        Length of the training.
    warmup
        Steps of the warm-up; a training shorter than ten times that warms up for a tenth.
    floor
        Share at the end.

    Examples
    --------
    >>> [round(warmup_cosine(step, 1000, warmup=100, floor=0.1), 3) for step in (1, 100, 550, 1000)]
    [0.01, 1.0, 0.55, 0.1]
    """
    warmup = max(1, min(warmup, n_steps // 10))
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, n_steps - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
