"""One training of a task: uninterrupted, or with repeated failures that the saver restores."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.chain import Archive
from inshrink_core.chain.sizes import archive_size
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.metrics import Direction
from inshrink_core.training.check import CheckedWriter, ModelEvaluator
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import spool_folder
from inshrink_lab.results import TrainingResult

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig
    from inshrink_core.search.bounded import StepWriter
    from inshrink_core.search.bounds import Bounds
    from inshrink_lab.tasks.task import Task

_SEED_STRIDE: Final = 1_000_003
"""A prime above any number of steps, so that no two steps of any two seeds share a batch. The generator uses
32 bits of its seed, so seed and step cannot share 64 bits."""

_WRONG_SEED: Final = 0x5EED
"""Seed of the model that a restore overwrites; without the restore, its values would show."""

OnStep = Callable[[int], None]
"""Callback after each step, with the step."""

AtSave = Callable[["Training", int], "Training"]
"""Function that is called at each save with the step; returns the training to continue with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Training to rehearse: task, steps, saves, failures and device.

    Parameters
    ----------
    task
        The task.
    n_steps
        Total number of steps.
    n_saves
        Number of evenly spaced saves, the last at the end.
    n_restores
        Number of evenly spaced failures, each right after a save, none after the last.
    device
        Device of the model.

    Raises
    ------
    InputError
        Too few steps for the saves, or too few saves for the failures.
    """

    task: Task
    n_steps: int
    n_saves: int
    n_restores: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.n_saves <= self.n_steps:
            raise InputError(
                "--saves does not fit", expected=f"1 to {self.n_steps}, the steps", found=str(self.n_saves)
            )
        if not 0 <= self.n_restores < self.n_saves:
            raise InputError(
                "--restores does not fit: each must follow a save other than the last",
                expected=f"0 to {self.n_saves - 1}",
                found=str(self.n_restores),
            )

    @classmethod
    def of(cls, task: Task, device: str = "cpu", **numbers: int | None) -> Self:
        """Return a task's defaults, replaced by the given numbers."""
        defaults = {name: getattr(task, name) for name in ("n_steps", "n_saves", "n_restores")}
        given = {name: number for name, number in numbers.items() if number is not None}
        return cls(task=task, device=device, **(defaults | given))

    @property
    def saved_at(self) -> tuple[int, ...]:
        """Steps of the saves."""
        return tuple(_rounded(i * self.n_steps, self.n_saves) for i in range(1, self.n_saves + 1))

    @property
    def restored_at(self) -> tuple[int, ...]:
        """Steps of the failures."""
        saved, between = self.saved_at, self.n_restores + 1
        return tuple(saved[_rounded(j * self.n_saves, between) - 1] for j in range(1, between))


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


class Training:
    """A model, its optimizer, and the losses since the last save."""

    def __init__(self, setup: Setup, seed: int, model_seed: int) -> None:
        self.task, self.seed, self.device = setup.task, seed, setup.device
        self.n_steps = setup.n_steps
        torch.manual_seed(model_seed)
        self.model = self.task.build().to(self.device)
        self.optimizer = self.task.optimizer(self.model)
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
        """Return the mean training loss since the last call."""
        losses, self._losses = self._losses, []
        return float(torch.stack(losses).double().mean())


def _moved(batch: Any, device: str) -> Any:
    """Return a batch on the model's device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(item, device) for item in batch)
    return batch


def open_saver(
    archive: Path, training: Training, chain: ChainConfig, step_writer: StepWriter | None = None
) -> Saver:
    """Return a saver of a training that uses a chain config or a step writer."""
    # A check chooses the codec per save, so the archive's last codec may differ from its first one.
    known = step_writer is None or not is_archive(archive)
    return Saver(
        archive,
        training.model,
        training.optimizer,
        codec=chain.codec if known else None,
        config=chain.settings() if known else None,
        optimizer_state=chain.optimizer,
        keyframe_every=chain.keyframe_every,
        device="cpu",
        step_writer=step_writer,
    )


@contextlib.contextmanager
def isolated(threads: int) -> Iterator[None]:
    """Restore the caller's random state and thread count at the end."""
    before = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train_uninterrupted(setup: Setup, seed: int, on_step: OnStep | None = None) -> TrainingResult:
    """Train from the first step to the last; evaluate at the steps of the saves."""
    return _train(setup, Training(setup, seed, seed), lambda training, _: training, on_step)


def train_perturbed(setup: Setup, seed: int, on_step: OnStep | None = None) -> TrainingResult:
    """Train without an archive; move every weight by one last bit at the steps of the restores.

    In a chaotic training no restore can end nearer to the uninterrupted training than this control, unless
    the restore is exact.
    """

    def at_save(training: Training, step: int) -> Training:
        if step in setup.restored_at:
            perturb(training.model, torch.Generator().manual_seed(seed * _SEED_STRIDE + step))
        return training

    return _train(setup, Training(setup, seed, seed), at_save, on_step)


def train_restored(
    setup: Setup,
    seed: int,
    archive: Path,
    chain: ChainConfig,
    bounds: Bounds | None = None,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train with failures: after each failure, restore a new model and optimizer from the archive.

    Parameters
    ----------
    setup, seed
        Setup and seed of the training.
    archive
        Archive of the saver; the rest of an earlier training is removed.
    chain
        Configuration of the frames.
    bounds
        Bounds on every restored save. Each save is the smallest frame found that keeps them, with the task as
        the evaluator. By default all saves use `chain`.
    on_step
        Callback after each step.

    Notes
    -----
    Only `Saver.restore` provides weights, buffers and optimizer state; the state of torch's generator is
    saved with them.
    """
    with contextlib.ExitStack() as stack:
        checked = None
        if bounds is not None:
            base = replace(chain, device="cpu", threads=1)
            evaluator = task_evaluator(setup.task, setup.device)
            follows = bounds.max_restore_cost is not None
            checked = stack.enter_context(CheckedWriter(base, evaluator, bounds, follows=follows))
        _remove_archive(archive)
        archive.parent.mkdir(parents=True, exist_ok=True)
        training = Training(setup, seed, seed)
        saver, waited = open_saver(archive, training, chain, checked), 0.0

        def at_save(training: Training, step: int) -> Training:
            """Save; return the training to continue with, which after a failure comes from the archive."""
            nonlocal saver, waited
            asked = time.perf_counter()
            saver.save(step, _generator_states(setup.device))
            waited += time.perf_counter() - asked
            if step not in setup.restored_at:
                return training
            saver.close()
            restored = Training(setup, seed, _WRONG_SEED)
            saver = open_saver(archive, restored, chain, checked)
            saver.restore(step)
            _set_generator_states(saver.extra, setup.device)
            return restored

        try:
            result = _train(setup, training, at_save, on_step, lambda: saver.record())
            saver.close()
        except BaseException:
            with contextlib.suppress(InshrinkError):
                saver.close()
            raise
        size = archive_size(Archive.open(archive))
        return replace(
            result,
            save_seconds=waited,
            raw_weights=size.raw_weights,
            weights_nbytes=size.weights_nbytes,
            raw_total=size.raw_total,
            nbytes=size.nbytes,
            bound_record=None if checked is None else checked.bound_record(),
        )


def _train(
    setup: Setup,
    training: Training,
    at_save: AtSave,
    on_step: OnStep | None,
    record: Callable[[], None] | None = None,
) -> TrainingResult:
    """Train from the first step to the last, and evaluate at every save."""
    begun, at = time.perf_counter(), 0
    metrics: list[float] = []
    losses: list[float] = []
    for step in setup.saved_at:
        training.advance(range(at + 1, step + 1), record, on_step)
        metrics.append(setup.task.evaluate(training.model))
        losses.append(training.take_loss())
        training, at = at_save(training, step), step
    return TrainingResult(
        seed=training.seed,
        steps=setup.saved_at,
        metrics=tuple(metrics),
        train_losses=tuple(losses),
        seconds=time.perf_counter() - begun,
    )


@torch.no_grad()
def perturb(model: nn.Module, generator: torch.Generator) -> None:
    """Move every weight of a model to one of its two neighbours in its floating-point format."""
    for weight in model.parameters():
        upwards = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
        limit = torch.where(upwards, torch.inf, -torch.inf).to(weight.dtype)
        weight.copy_(torch.nextafter(weight, limit))


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
    """Remove the rest of an unfinished training, unless a rehearsal is still writing it."""
    if is_archive(archive):
        ArchiveWriter(archive).close()
        shutil.rmtree(archive)
    shutil.rmtree(spool_folder(archive), ignore_errors=True)


def require_evaluable(task: Task, bounds: Bounds, device: str) -> None:
    """Refuse bounds that the task cannot be evaluated by, before any training.

    Raises
    ------
    InputError
        A divergence bound with a metric that is no cross-entropy, or a metric of 0.
    EvaluatorError
        The task cannot be evaluated.
    """
    evaluator = task_evaluator(task, device)
    bounds.completed(evaluator.evaluate(task.build().state_dict()))


def task_evaluator(task: Task, device: str = "cpu") -> ModelEvaluator:
    """Return the evaluator of states of a task's model.

    If the task has a method ``judged(model)``, it returns a dict of the metric by its name, and of
    ``log_probs`` (n, classes) in nats or ``predictions``. A metric alone bounds the rise of the metric. The
    model is built here, once, because building one draws from torch's global generator. `Task.evaluate` must
    not draw from it, because the saver's thread calls it during the training.
    """
    return ModelEvaluator(
        task.build().to(device),
        getattr(task, "judged", task.evaluate),
        spec=f"the task '{task.name}'",
        metric=task.metric,
        direction=Direction(task.direction),
    )
