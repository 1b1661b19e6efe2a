"""One training of a task: uninterrupted, or failing and restored by the saver again and again."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.chain import Archive, archive_size
from inshrink_core.errors import InshrinkError
from inshrink_core.rehearse.bounded import open_rehearsed
from inshrink_core.rehearse.report import TrainingResult
from inshrink_core.search.bounds import Bounds
from inshrink_core.session import Saver
from inshrink_core.session.config import make_chain_config
from inshrink_core.session.spool import spool_folder
from inshrink_core.session.step_writer import StepWriter
from inshrink_core.tasks import Task

__all__ = ["Schedule", "isolated", "train_restored", "train_uninterrupted"]

_SEED_STRIDE: Final = 1_000_003
"""A prime above any number of steps here, so that no two steps of any two seeds share a batch; the
generator takes 32 bits of its seed, so seed and step cannot stand side by side in 64."""

_WRONG_SEED: Final = 0x5EED
"""Of the model that a restore overwrites: had the restore not, its values would show."""

OnStep = Callable[[int], None]
"""Called with the step, after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which steps of a training are saved, and after which saves it fails.

    Parameters
    ----------
    n_steps
        Steps in all.
    n_saves
        Evenly spaced saves, the last at the end.
    n_restores
        Evenly spaced failures, each right after a save, none after the last.
    """

    n_steps: int
    n_saves: int
    n_restores: int

    @property
    def saved_at(self) -> tuple[int, ...]:
        """Steps of the saves."""
        return tuple(_rounded(i * self.n_steps, self.n_saves) for i in range(1, self.n_saves + 1))

    @property
    def restored_at(self) -> tuple[int, ...]:
        """Steps of the failures.

        Examples
        --------
        >>> Schedule(n_steps=2000, n_saves=20, n_restores=9).restored_at[:3]
        (200, 400, 600)
        """
        saved = self.saved_at
        return tuple(
            saved[_rounded(j * self.n_saves, self.n_restores + 1) - 1] for j in range(1, self.n_restores + 1)
        )


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


class _Training:
    """A model, its optimizer, and the losses since the last save."""

    def __init__(self, task: Task, seed: int, model_seed: int, n_steps: int, device: str) -> None:
        self.task, self.seed, self.n_steps, self.device = task, seed, n_steps, device
        torch.manual_seed(model_seed)
        self.model = task.build().to(device)
        self.optimizer = task.optimizer(self.model)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._losses: list[Tensor] = []

    def advance(self, steps: range, record: Callable[[], None] | None, on_step: OnStep | None) -> None:
        """Train some steps."""
        for step in steps:
            factor = self.task.learning_rate_factor(step, self.n_steps)
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * factor
            generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + step)
            batch = _moved(self.task.batch(step, generator), self.device)
            loss = self.task.loss(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if record is not None:
                record()
            if self.task.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_gradient_norm)
            self.optimizer.step()
            self._losses.append(loss.detach())
            if on_step is not None:
                on_step(step)

    def take_loss(self) -> float:
        """Return the mean training loss since it was last asked for."""
        losses, self._losses = self._losses, []
        return float(torch.stack(losses).double().mean())


def _moved(batch: Any, device: str) -> Any:
    """Return a batch on the device of the model."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(item, device) for item in batch)
    return batch


@contextlib.contextmanager
def isolated(threads: int) -> Iterator[None]:
    """Leave the caller's random numbers and thread count as they were."""
    before = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train_uninterrupted(
    task: Task, seed: int, schedule: Schedule, *, device: str, on_step: OnStep | None = None
) -> TrainingResult:
    """Train from the first step to the last, evaluating where the other training is saved."""
    begun = time.perf_counter()
    training = _Training(task, seed, seed, schedule.n_steps, device)
    metrics, losses, at = [], [], 0
    for step in schedule.saved_at:
        training.advance(range(at + 1, step + 1), None, on_step)
        metrics.append(task.evaluate(training.model))
        losses.append(training.take_loss())
        at = step
    return TrainingResult(
        seed=seed,
        steps=schedule.saved_at,
        metrics=tuple(metrics),
        train_losses=tuple(losses),
        seconds=time.perf_counter() - begun,
    )


def train_restored(
    task: Task,
    seed: int,
    schedule: Schedule,
    archive: Path,
    *,
    saver_options: Mapping[str, Any],
    device: str,
    bounds: Bounds | None = None,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train with failures: after each, a new model and optimizer are restored from the archive.

    Parameters
    ----------
    archive
        Where the saver saves; what an unfinished training left there is removed.
    saver_options
        Keywords of `Saver`.
    bounds
        What is promised of every save as restored: each is then written with the smallest frame found that
        keeps them, judged by the task itself. None: all saves are written as `saver_options` say.

    Notes
    -----
    Weights, buffers and the optimizer's state come out of the archive through `Saver.restore` alone;
    the state of torch's generator is saved beside them.
    """
    if bounds is None:
        return _train_restored(task, seed, schedule, archive, saver_options, device, None, on_step)
    base = make_chain_config(
        "",
        saver_options["codec"],
        saver_options["config"],
        saver_options["optimizer_state"],
        saver_options["keyframe_every"],
        "cpu",
        1,
    )
    with open_rehearsed(task, base, bounds, device) as writer:
        result = _train_restored(task, seed, schedule, archive, saver_options, device, writer, on_step)
        return dataclasses.replace(result, promise=writer.promise())


def _train_restored(
    task: Task,
    seed: int,
    schedule: Schedule,
    archive: Path,
    saver_options: Mapping[str, Any],
    device: str,
    writer: StepWriter | None,
    on_step: OnStep | None,
) -> TrainingResult:
    """Train with failures, each save written by `writer`."""
    begun, waited = time.perf_counter(), 0.0
    _remove_archive(archive)
    archive.parent.mkdir(parents=True, exist_ok=True)
    training = _Training(task, seed, seed, schedule.n_steps, device)
    saver = Saver(archive, training.model, training.optimizer, **saver_options, step_writer=writer)
    # A writer sets the codec save by save: the archive's newest need not be the one it began with.
    own = () if writer is None else ("codec", "config")
    again = {name: value for name, value in saver_options.items() if name not in own}
    metrics, losses, at = [], [], 0
    try:
        for step in schedule.saved_at:
            training.advance(range(at + 1, step + 1), saver.record, on_step)
            metrics.append(task.evaluate(training.model))
            losses.append(training.take_loss())
            asked = time.perf_counter()
            saver.save(step, _generator_states(device))
            waited += time.perf_counter() - asked
            at = step
            if step in schedule.restored_at:
                saver.close()
                training = _Training(task, seed, _WRONG_SEED, schedule.n_steps, device)
                saver = Saver(archive, training.model, training.optimizer, **again, step_writer=writer)
                saver.restore(step)
                _set_generator_states(saver.extra, device)
        saver.close()
    except BaseException:
        with contextlib.suppress(InshrinkError):
            saver.close()
        raise
    size = archive_size(Archive.open(archive))
    return TrainingResult(
        seed=seed,
        steps=schedule.saved_at,
        metrics=tuple(metrics),
        train_losses=tuple(losses),
        seconds=time.perf_counter() - begun,
        save_seconds=waited,
        raw_weights=size.raw_weights,
        weights_nbytes=size.weights_nbytes,
        raw_total=size.raw_total,
        nbytes=size.nbytes,
    )


def _generator_states(device: str) -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {"rng_states": states}


def _set_generator_states(extra: Mapping[str, Any], device: str) -> None:
    torch.set_rng_state(extra["rng_states"]["cpu"])
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(extra["rng_states"]["cuda"], device)


def _remove_archive(archive: Path) -> None:
    """Remove what an unfinished training left, unless a rehearsal is still writing there."""
    if is_archive(archive):
        ArchiveWriter(archive).close()
        shutil.rmtree(archive)
    shutil.rmtree(spool_folder(archive), ignore_errors=True)
