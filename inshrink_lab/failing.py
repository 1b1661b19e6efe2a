"""One training of a task: uninterrupted, or failing and restored by the saver again and again."""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.chain import Archive, archive_size
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.execution.files import write_durably
from inshrink_core.metrics import Direction
from inshrink_core.search.bounded import StepWriter
from inshrink_core.search.bounds import Bounds
from inshrink_core.training.check import CheckedWriter, ModelEvaluator
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import spool_folder
from inshrink_lab.results import TrainingResult
from inshrink_lab.tasks import Task

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig


_SEED_STRIDE: Final = 1_000_003
"""A prime above any number of steps here, so that no two steps of any two seeds share a batch; the
generator takes 32 bits of its seed, so seed and step cannot be side by side in 64."""

_WRONG_SEED: Final = 0x5EED
"""Of the model that a restore overwrites: had the restore not, its values would show."""

_KEPT_EVERY: Final = 300.0
"""Seconds of training that a start may lose."""

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

    Raises
    ------
    InputError
        The steps leave no room for the saves, or these for the failures.
    """

    n_steps: int
    n_saves: int
    n_restores: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_saves <= self.n_steps:
            raise InputError(
                "--saves does not fit", expected=f"1 to {self.n_steps}, the steps", found=str(self.n_saves)
            )
        if not 0 <= self.n_restores < self.n_saves:
            raise InputError(
                "--restores does not fit: each follows a save, none the last",
                expected=f"0 to {self.n_saves - 1}",
                found=str(self.n_restores),
            )

    @classmethod
    def of(
        cls, task: Task, n_steps: int | None = None, n_saves: int | None = None, n_restores: int | None = None
    ) -> Schedule:
        """Return a task's own schedule, but for what is given."""
        return cls(
            n_steps=task.n_steps if n_steps is None else n_steps,
            n_saves=task.n_saves if n_saves is None else n_saves,
            n_restores=task.n_restores if n_restores is None else n_restores,
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained, when it is saved and fails, and where it runs.

    Parameters
    ----------
    task, schedule, device
        The task, its saves and failures, and the device of its model.
    """

    task: Task
    schedule: Schedule
    device: str


class Training:
    """A model, its optimizer, and the losses since the last save."""

    def __init__(self, setup: Setup, seed: int, model_seed: int) -> None:
        self.task, self.seed, self.device = setup.task, seed, setup.device
        self.n_steps = setup.schedule.n_steps
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

    def state(self) -> dict[str, Any]:
        """Return all that the next step depends on; the tensors are the training's own."""
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return states | _generator_states(self.device)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        _set_generator_states(state, self.device)

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


def open_saver(
    archive: Path, training: Training, chain: ChainConfig, writer: StepWriter | None = None
) -> Saver:
    """Return a saver of a training, that writes as a chain says or as a writer decides."""
    # A writer sets the codec save by save: the archive's newest need not be the one it began with.
    known = writer is None or not is_archive(archive)
    return Saver(
        archive,
        training.model,
        training.optimizer,
        codec=chain.codec if known else None,
        config=chain.settings() if known else None,
        optimizer_state=chain.optimizer,
        keyframe_every=chain.keyframe_every,
        device="cpu",
        step_writer=writer,
    )


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


class Unfinished:
    """A training as it was just before one of its saves, for a later start to go on from.

    Parameters
    ----------
    path
        The file that holds it; None: nothing is kept, and each start begins at the first step.
    every
        Seconds of training between two keeps.
    """

    def __init__(self, path: Path | None = None, every: float = _KEPT_EVERY) -> None:
        self._path, self._every = path, every
        self._kept = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next save should be kept."""
        return self._path is not None and time.monotonic() - self._kept >= self._every

    def keep(self, state: Mapping[str, Any]) -> None:
        """Put a training in the place of the one that is kept."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_durably(self._path, buffer.getvalue())
        self._kept = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return what is kept; None where nothing is, or nothing that can be read."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            state = torch.load(self._path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def forget(self) -> None:
        """Remove it: the training has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def train_uninterrupted(
    setup: Setup, seed: int, *, unfinished: Unfinished | None = None, on_step: OnStep | None = None
) -> TrainingResult:
    """Train from the first step to the last, evaluating where the other training is saved."""
    unfinished = unfinished or Unfinished()
    return _train(setup, Training(setup, seed, seed), None, unfinished, unfinished.load(), on_step)


def train_perturbed(
    setup: Setup, seed: int, *, unfinished: Unfinished | None = None, on_step: OnStep | None = None
) -> TrainingResult:
    """Train without an archive, every weight moved by its last bit where the other training is restored.

    Where training is chaotic, no restore can end nearer to the uninterrupted training than this does, unless
    it is exact.
    """
    perturbed = _Perturbed(setup.schedule.restored_at)
    unfinished = unfinished or Unfinished()
    return _train(setup, Training(setup, seed, seed), perturbed, unfinished, unfinished.load(), on_step)


def train_restored(
    setup: Setup,
    seed: int,
    archive: Path,
    chain: ChainConfig,
    *,
    bounds: Bounds | None = None,
    writer: StepWriter | None = None,
    unfinished: Unfinished | None = None,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train with failures: after each, a new model and optimizer are restored from the archive.

    Parameters
    ----------
    setup, seed
        What is trained.
    archive
        Where the saver saves; what an earlier training left there is removed, but for what `unfinished` goes
        on with.
    chain
        How frames are written.
    bounds
        What is promised of every save as restored: each is then written with the smallest frame found that
        keeps them, with the task itself as the evaluator. By default all saves are written as `chain` says.
    writer
        Without bounds, what decides how each save is written.
    unfinished
        Where the training is kept while it goes on. With bounds or a writer it is not: what these have learnt
        of earlier saves is in memory alone.

    Notes
    -----
    Weights, buffers and the optimizer's state come out of the archive through `Saver.restore` alone;
    the state of torch's generator is saved beside them.
    """
    with contextlib.ExitStack() as stack:
        checked = None
        if bounds is not None:
            base = replace(chain, device="cpu", threads=1)
            evaluator = task_evaluator(setup.task, setup.device)
            follows = bounds.max_restore_cost is not None
            checked = stack.enter_context(CheckedWriter(base, evaluator, bounds, follows=follows))
        if unfinished is None or checked is not None or writer is not None:
            unfinished = Unfinished()
        # What was saved before is counted from the archive: without it the training begins anew.
        kept = unfinished.load() if is_archive(archive) else None
        if kept is None:
            _remove_archive(archive)
        archive.parent.mkdir(parents=True, exist_ok=True)
        training = Training(setup, seed, seed)
        failing = _Failing(setup, archive, chain, checked or writer, training)
        try:
            result = _train(setup, training, failing, unfinished, kept, on_step)
            failing.saver.close()
        except BaseException:
            with contextlib.suppress(InshrinkError):
                failing.saver.close()
            raise
        size = archive_size(Archive.open(archive))
        return replace(
            result,
            raw_weights=size.raw_weights,
            weights_nbytes=size.weights_nbytes,
            raw_total=size.raw_total,
            nbytes=size.nbytes,
            promise=None if checked is None else checked.promise(),
        )


def _train(
    setup: Setup,
    training: Training,
    failing: _Interruption | None,
    unfinished: Unfinished,
    kept: Mapping[str, Any] | None,
    on_step: OnStep | None,
) -> TrainingResult:
    """Train from the first step to the last, and evaluate at every save."""
    begun = time.perf_counter()
    metrics: list[float] = []
    losses: list[float] = []
    at = 0
    if kept is not None:
        at, metrics, losses = kept["step"], kept["metrics"], kept["losses"]
        begun -= kept["seconds"]
        training.set_state(kept["state"])
        if failing is not None:
            failing.waited = kept["waited"]
    for step in setup.schedule.saved_at:
        if step < at:
            continue
        if step > at:
            record = None if failing is None else failing.record
            training.advance(range(at + 1, step + 1), record, on_step)
            metrics.append(setup.task.evaluate(training.model))
            losses.append(training.take_loss())
            if unfinished.is_due:
                seconds, waited = time.perf_counter() - begun, 0.0 if failing is None else failing.waited
                so_far = {"step": step, "metrics": metrics, "losses": losses}
                unfinished.keep({**so_far, "seconds": seconds, "waited": waited, "state": training.state()})
        if failing is not None:
            training = failing.save(training, step)
        at = step
    return TrainingResult(
        seed=training.seed,
        steps=setup.schedule.saved_at,
        metrics=tuple(metrics),
        train_losses=tuple(losses),
        seconds=time.perf_counter() - begun,
        save_seconds=0.0 if failing is None else failing.waited,
    )


class _Interruption(Protocol):
    """What happens to a training at its saves."""

    waited: float

    def record(self) -> None:
        """Look at the gradients of a step."""

    def save(self, training: Training, step: int) -> Training:
        """Return what training goes on with."""


class _Perturbed:
    """Moves every weight to one of its two neighbours in its own format where a training would fail."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self._at = at
        self.waited = 0.0

    def record(self) -> None:
        pass

    def save(self, training: Training, step: int) -> Training:
        if step in self._at:
            perturb(training.model, torch.Generator().manual_seed(training.seed * _SEED_STRIDE + step))
        return training


@torch.no_grad()
def perturb(model: nn.Module, generator: torch.Generator) -> None:
    """Move every weight of a model to one of its two neighbours in its own format."""
    for weight in model.parameters():
        upwards = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
        limit = torch.where(upwards, torch.inf, -torch.inf).to(weight.dtype)
        weight.copy_(torch.nextafter(weight, limit))


class _Failing:
    """Saves a training, and lets it fail where the schedule says so."""

    def __init__(
        self,
        setup: Setup,
        archive: Path,
        chain: ChainConfig,
        writer: StepWriter | None,
        training: Training,
    ) -> None:
        self._setup, self._archive, self._writer = setup, archive, writer
        self._chain = chain
        self.waited = 0.0
        self.saver = open_saver(archive, training, chain, writer)
        self.saver.flush()
        self._last_saved = self.saver.last_step or 0
        """What an earlier start saved after it was kept, and this one trains again, is not saved again."""

    def record(self) -> None:
        """Let the saver look at the gradients of a step."""
        self.saver.record()

    def save(self, training: Training, step: int) -> Training:
        """Save, and return what training goes on with: after a failure, what came out of the archive."""
        device = self._setup.device
        if step > self._last_saved:
            asked = time.perf_counter()
            self.saver.save(step, _generator_states(device))
            self.waited += time.perf_counter() - asked
        if step not in self._setup.schedule.restored_at:
            return training
        self.saver.close()
        restored = Training(self._setup, training.seed, _WRONG_SEED)
        self.saver = open_saver(self._archive, restored, self._chain, self._writer)
        self.saver.restore(step)
        _set_generator_states(self.saver.extra, device)
        if step < self._last_saved:
            # Its next save follows those that are there, not the step restored.
            self.saver.close()
            self.saver = open_saver(self._archive, restored, self._chain, self._writer)
        return restored


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


def require_judgeable(task: Task, bounds: Bounds, device: str) -> None:
    """Refuse bounds that the task cannot be judged by, before anything is trained.

    Raises
    ------
    InputError
        A divergence bound, and the task's metric is no cross-entropy; or a metric of 0.
    EvaluatorError
        The task cannot be evaluated.
    """
    evaluator = task_evaluator(task, device)
    bounds.completed(evaluator.evaluate(task.build().state_dict()))


def task_evaluator(task: Task, device: str = "cpu") -> ModelEvaluator:
    """Return what judges states of a task's model, as the task itself does.

    Where the task has a method ``log_probs(model)``, that returns its predictions, (n, classes), nats. The
    model is made here, once, because making one draws from torch's global generator; `Task.evaluate` must
    not, for the saver's thread calls it while training goes on.
    """
    own: Callable[[nn.Module], Tensor] | None = getattr(task, "log_probs", None)

    def check(model: nn.Module) -> Any:
        value = float(task.evaluate(model))
        return value if own is None else {task.metric: value, "log_probs": own(model)}

    return ModelEvaluator(
        task.build().to(device),
        check,
        spec=f"the task '{task.name}'",
        metric=task.metric,
        direction=Direction(task.direction),
    )
