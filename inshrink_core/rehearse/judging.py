"""A task as its own evaluator: its metric on held-out data, and the predictions that this is taken of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, NotFiniteError
from inshrink_core.evaluate import Evaluation
from inshrink_core.formats.state_tree import strip_wrappers
from inshrink_core.metrics import Direction

if TYPE_CHECKING:
    from inshrink_core.tasks import Task

__all__ = ["TaskEvaluator"]

_IGNORED: Final = -100
"""Class of targets that PyTorch's losses leave out, unless told another."""


class TaskEvaluator:
    """Judges states of a task's model by `Task.evaluate`, in this process.

    Parameters
    ----------
    task
        The task. Where it has a method ``log_probs(model)``, that returns its predictions, (n, classes),
        nats; else they are what `evaluate` takes the cross-entropy of.
    device
        Where its model runs.

    Notes
    -----
    The model is made here, once, because making one draws from torch's global generator; `Task.evaluate`
    must not, for the saver's thread calls it while training goes on. For use from one thread at a time.
    """

    def __init__(self, task: Task, device: str = "cpu") -> None:
        self._task = task
        self._model = task.build().to(device)
        own = [name for name, value in self._model.state_dict().items() if isinstance(value, Tensor)]
        # A checkpoint names tensors without what wrappers put before them.
        self._names = dict(zip(own, strip_wrappers(own), strict=True))
        self.spec = f"the task '{task.name}'"
        self.metric: str | None = task.metric
        self.direction: Direction | None = Direction(task.direction)

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        """Return metric and predictions of a state.

        Raises
        ------
        EvaluatorError
            The state is of another model, or the task fails on it.
        NotFiniteError
            The metric is NaN or infinite.
        """
        begun = time.perf_counter()
        self._load(state_dict.state_dict() if isinstance(state_dict, Checkpoint) else state_dict)
        try:
            with torch.no_grad():
                value, log_probs = _judge(self._task, self._model)
        except Exception as error:
            raise EvaluatorError(
                f"the task cannot be evaluated ({type(error).__name__}: {error})", where=self.spec
            ) from error
        if not math.isfinite(value):
            raise NotFiniteError(f"its '{self._task.metric}' is {value}", where=self.spec)
        return Evaluation(
            metric=self._task.metric,
            direction=Direction(self._task.direction),
            value=value,
            metrics={self._task.metric: value},
            log_probs=None if log_probs is None else log_probs.float().cpu().numpy(),
            seconds=time.perf_counter() - begun,
        )

    def close(self) -> None:
        """Nothing is held that would have to be released."""

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Put a state into the model."""
        missing = [name for name in self._names.values() if name not in state]
        if missing:
            raise EvaluatorError(f"the state has no tensor '{missing[0]}'", where=self.spec)
        try:
            self._model.load_state_dict({own: state[name] for own, name in self._names.items()}, strict=False)
        except RuntimeError as error:
            raise EvaluatorError(f"the state is of another model ({error})", where=self.spec) from error


def _judge(task: Task, model: torch.nn.Module) -> tuple[float, Tensor | None]:
    """Return a model's metric and predictions; the latter as the task says, or as its metric is taken of."""
    own: Callable[[torch.nn.Module], Tensor] | None = getattr(task, "log_probs", None)
    if own is not None:
        return float(task.evaluate(model)), own(model)
    with _Predictions() as seen:
        value = float(task.evaluate(model))
    return value, seen.log_probs()


class _Predictions(TorchFunctionMode):
    """Notes what cross-entropies are taken of, in this thread, as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the arguments of the two losses; within this, the mode is off."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            self._rows.append(_rows(True, *args, **kwargs))
        elif func is functional.nll_loss:
            self._rows.append(_rows(False, *args, **kwargs))
        return func(*args, **kwargs)

    def log_probs(self) -> Tensor | None:
        """Return the predictions, (n, classes); None where there were none, or of several kinds."""
        if not self._rows or len({row.shape[1] for row in self._rows}) > 1:
            return None
        return torch.cat(self._rows)


def _rows(
    is_logits: bool,
    input: Tensor,
    target: Tensor,
    weight: object = None,
    size_average: object = None,
    ignore_index: int = _IGNORED,
    *_: object,
    **__: object,
) -> Tensor:
    """Return log-probabilities, (n, classes), of what a loss was given: (classes), or (n, classes, …)."""
    rows = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1).flatten(0, -2)
    rows = functional.log_softmax(rows.float(), dim=1) if is_logits else rows
    return rows if target.is_floating_point() else rows[target.reshape(-1) != ignore_index]
