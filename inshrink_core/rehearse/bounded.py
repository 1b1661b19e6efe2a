"""Saves of a rehearsal written under a promise, as `inshrink_core.compress` would write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint
from inshrink_core.rehearse.judging import TaskEvaluator
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.session.bounded import BoundedWriter

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.chain import Appended, ChainConfig, ChainWriter
    from inshrink_core.chain.append import TensorDone
    from inshrink_core.checkpoint import FileLayout, TensorSpec
    from inshrink_core.tasks import Task

__all__ = ["RehearsedWriter", "open_rehearsed", "require_judgeable"]


class RehearsedWriter:
    """Writes the saves of one training; goes on through its failures, as one `compress` of its saves would.

    Parameters
    ----------
    base
        How frames are made, but for what is searched.
    task
        What judges.
    bounds
        What is promised of every restored step.
    device
        Where the task's model is evaluated.
    """

    def __init__(self, base: ChainConfig, task: Task, bounds: Bounds, device: str) -> None:
        self._originals: dict[int, Checkpoint] = {}
        self.judge = Judge([TaskEvaluator(task, device)], self._originals.__getitem__, bounds)
        self._bounded = BoundedWriter(base, self.judge, self._originals.get)

    def append(self, chain: ChainWriter, checkpoint: Checkpoint, done: TensorDone | None = None) -> Appended:
        """Write a save with the smallest frame found that keeps the bounds, exactly where there is none."""
        self._originals[checkpoint.step] = checkpoint
        appended = self._bounded.append(chain, checkpoint, done)
        # The files of a save are gone after a failure; the next one may want to know what moved since.
        self._originals.clear()
        self._originals[checkpoint.step] = _held(checkpoint)
        return appended

    def promise(self) -> dict[str, Any]:
        """Return how every save keeps the bounds, as JSON values."""
        promise = self._bounded.promise
        steps = sorted(promise.steps)
        return promise.to_json() | {"frames": [{"step": step, **promise.step_json(step)} for step in steps]}


@contextmanager
def open_rehearsed(task: Task, base: ChainConfig, bounds: Bounds, device: str) -> Iterator[RehearsedWriter]:
    """Yield a writer; what its judge keeps in files goes with it."""
    writer = RehearsedWriter(base, task, bounds, device)
    with writer.judge:
        yield writer


def require_judgeable(task: Task, bounds: Bounds, device: str) -> None:
    """Refuse bounds that the task cannot be judged by, before anything is trained.

    Raises
    ------
    InputError
        A divergence bound, and the task's metric is no cross-entropy; or a metric of 0.
    EvaluatorError
        The task cannot be evaluated.
    """
    evaluator = TaskEvaluator(task, device)
    bounds.completed(evaluator.evaluate(task.build().state_dict()))


@dataclass(frozen=True)
class _Held:
    """A `TensorSource` over tensors in memory."""

    tensors: Mapping[str, Tensor]

    def read(self, spec: TensorSpec) -> Tensor:
        return self.tensors[spec.key].clone()

    def skeleton(self, layout: FileLayout) -> bytes:
        return b""


def _held(checkpoint: Checkpoint) -> Checkpoint:
    """Return weights and buffers of a checkpoint whose files will be gone."""
    specs = tuple(spec for spec in checkpoint.specs if spec.role in MODEL_ROLES)
    tensors = {spec.key: checkpoint[spec.key].clone() for spec in specs}
    return replace(checkpoint, specs=specs, files=(), source=_Held(tensors))
