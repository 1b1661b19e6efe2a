"""The rehearsal as a whole: which trainings are done already, which are run, and what came of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.codec import get_codec
from inshrink_core.errors import InputError
from inshrink_core.rehearse.report import Rehearsal, TrainingResult
from inshrink_core.rehearse.results import ResultStore
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, Bounds
from inshrink_core.search.space import space_of
from inshrink_core.session import OnProgress, Progress
from inshrink_core.session.config import make_chain_config, resolve_device
from inshrink_core.tasks import find_task

if TYPE_CHECKING:
    import os

    from inshrink_core.codec import CodecConfig
    from inshrink_core.rehearse.training import Schedule
    from inshrink_core.tasks import Task

__all__ = ["rehearse"]


def rehearse(
    task: str,
    directory: str | os.PathLike[str],
    *,
    codec: str | None = None,
    config: Mapping[str, Any] | CodecConfig | None = None,
    optimizer: str | None = None,
    restores: int | None = None,
    seeds: int = 3,
    saves: int | None = None,
    steps: int | None = None,
    keyframe_every: int = 32,
    max_drop: float | None = None,
    max_divergence: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    keep_archives: bool = False,
    progress: OnProgress | None = None,
) -> Rehearsal:
    """Train with failures restored from the archive, against uninterrupted training of the same seeds.

    Parameters
    ----------
    task
        Name of a shipped task, or ``FILE.py:CLASS`` (executed).
    directory
        Where finished trainings are kept. The same call goes on where it stopped; the uninterrupted
        trainings are shared by all codecs.
    codec, config, optimizer, keyframe_every
        How frames are written, as `Saver` has it.
    restores, saves, steps
        Failures, saves and steps of each training; by default the task's.
    seeds
        Trainings of each kind, with the seeds 0 to ``seeds - 1``.
    max_drop, max_divergence
        Bounds on every save as restored, as `inshrink_core.compress` takes them: each save is written with
        the smallest frame found that keeps them, judged by the task itself, and exactly where there is none.
    device
        Where training happens. The control (codec ``lossless``) is at exactly zero on the CPU, where
        the same operations give the same bits.
    threads
        Threads of PyTorch. One is best for models as small as these; results depend on the number in
        their last bits, and then altogether.
    keep_archives
        Keep the archives of the restored trainings, below `directory`.
    progress
        Called after each step of a training.

    Returns
    -------
    Rehearsal
        The final metrics in pairs, the excess with its uncertainty, and the ratios.

    Raises
    ------
    NotFoundError
        There is no such task.
    InputError
        More restores than saves leave room for, or another setting out of range; bounds on what the task
        does not tell, or a codec without anything to search.

    Examples
    --------
    >>> import inshrink_core, pathlib, tempfile
    >>> source = '''
    ... import torch
    ... class Line:
    ...     name, version, metric, direction = "line", 1, "loss", "lower"
    ...     n_steps, n_saves, n_restores, max_gradient_norm = 12, 4, 2, None
    ...     def build(self): return torch.nn.Linear(4, 1)
    ...     def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...     def learning_rate_factor(self, step, n_steps): return 1.0
    ...     def batch(self, step, generator): return torch.randn(8, 4, generator=generator)
    ...     def loss(self, model, batch): return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    ...     def evaluate(self, model): return float(self.loss(model, torch.eye(4)).detach())
    ... '''
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "line.py").write_text(source)
    >>> result = inshrink_core.rehearse(
    ...     f"{folder}/line.py:Line", folder / "out", codec="lossless", restores=3, seeds=2
    ... )
    >>> result.restored_at, result.excess
    ((3, 6, 9), 0.0)
    """
    from inshrink_core.rehearse.bounded import require_judgeable
    from inshrink_core.rehearse.training import Schedule, isolated

    bounds = Bounds.promised(max_drop, max_divergence)
    found, identity = find_task(task)
    schedule = _checked(
        Schedule(
            n_steps=found.n_steps if steps is None else steps,
            n_saves=found.n_saves if saves is None else saves,
            n_restores=found.n_restores if restores is None else restores,
        ),
        seeds,
        threads,
    )
    chain = make_chain_config("", codec, config, optimizer, keyframe_every, "cpu", threads)
    codec = chain.codec
    if bounds is not None:
        space_of(codec, frozenset())  # refuses a codec without anything to search
    record = chain.record()
    entries = {"overrides": record["overrides"]} if chain.overrides else {}
    written: dict[str, Any] = {
        "codec": codec,
        "config": record["config"] | entries,
        "optimizer_state": chain.optimizer,
        "keyframe_every": keyframe_every,
    }
    runner = _Runner(
        found,
        identity,
        schedule,
        Path(directory),
        written,
        resolve_device(device),
        threads,
        keep_archives,
        progress,
        bounds=bounds,
        total=2 * seeds * schedule.n_steps,
    )
    with isolated(threads):
        if bounds is not None:
            require_judgeable(found, bounds, resolve_device(device))
        pairs = [(runner.uninterrupted(seed), runner.restored(seed)) for seed in range(seeds)]
    return Rehearsal(
        task=found.name,
        metric=found.metric,
        direction=found.direction,
        codec=codec,
        config=written["config"],
        optimizer=chain.optimizer,
        n_steps=schedule.n_steps,
        n_saves=schedule.n_saves,
        restored_at=schedule.restored_at,
        uninterrupted=tuple(before for before, _ in pairs),
        restored=tuple(after for _, after in pairs),
    )


def _checked(schedule: Schedule, seeds: int, threads: int) -> Schedule:
    """Refuse what cannot be rehearsed."""
    for name, value in {"steps": schedule.n_steps, "seeds": seeds, "threads": threads}.items():
        if value < 1:
            raise InputError(f"--{name} must be at least 1", expected="≥ 1", found=str(value))
    if not 1 <= schedule.n_saves <= schedule.n_steps:
        raise InputError(
            "--saves does not fit",
            expected=f"1 to {schedule.n_steps}, the steps",
            found=str(schedule.n_saves),
        )
    if not 0 <= schedule.n_restores < schedule.n_saves:
        raise InputError(
            "--restores does not fit: each follows a save, none the last",
            expected=f"0 to {schedule.n_saves - 1}",
            found=str(schedule.n_restores),
        )
    return schedule


class _Runner:
    """Runs the trainings that are not there yet, and counts the steps of all."""

    def __init__(
        self,
        task: Task,
        identity: str,
        schedule: Schedule,
        directory: Path,
        written: Mapping[str, Any],
        device: str,
        threads: int,
        keep_archives: bool,
        progress: OnProgress | None,
        *,
        bounds: Bounds | None,
        total: int,
    ) -> None:
        import torch

        self._task, self._schedule, self._written = task, schedule, written
        self._device, self._keep_archives, self._bounds = device, keep_archives, bounds
        self._progress, self._total, self._done = progress, total, 0
        self._store = ResultStore(directory / "results")
        self._archives = directory / "archives"
        self._key = {
            "task": identity,
            "n_steps": schedule.n_steps,
            "saved_at": list(schedule.saved_at),
            "device": device,
            "threads": threads,
            "torch": torch.__version__,
        }

    def uninterrupted(self, seed: int) -> TrainingResult:
        """Return the training without failures."""
        from inshrink_core.rehearse.training import train_uninterrupted

        key = self._key | {"seed": seed}
        result = self._store.load("uninterrupted", key)
        if result is None:
            result = train_uninterrupted(
                self._task,
                seed,
                self._schedule,
                device=self._device,
                on_step=self._reporter(f"seed {seed}, uninterrupted"),
            )
            self._store.keep("uninterrupted", key, result)
        self._done += self._schedule.n_steps
        return result

    def restored(self, seed: int) -> TrainingResult:
        """Return the training with failures."""
        from inshrink_core import __version__
        from inshrink_core.rehearse.training import train_restored

        bitstream = get_codec(self._written["codec"]).bitstream
        key = {**self._key, **self._written, "seed": seed, "bitstream": bitstream, "inshrink": __version__}
        key["restored_at"] = list(self._schedule.restored_at)
        if self._bounds is not None:
            key["bounds"] = _bounds_key(self._bounds)
        result = self._store.load("restored", key)
        if result is None:
            archive = self._archives / f"{self._store.name_of('restored', key)}.inshrink"
            result = train_restored(
                self._task,
                seed,
                self._schedule,
                archive,
                saver_options=self._written,
                device=self._device,
                bounds=self._bounds,
                on_step=self._reporter(f"seed {seed}, restored"),
            )
            self._store.keep("restored", key, result)
            if not self._keep_archives:
                shutil.rmtree(archive)
        self._done += self._schedule.n_steps
        return result

    def _reporter(self, detail: str) -> Any:
        """Return what a training calls after each step."""
        progress = self._progress
        if progress is None:
            return None

        def report(step: int) -> None:
            progress(Progress("rehearse", self._done + step, self._total, step, detail))

        return report


def _bounds_key(bounds: Bounds) -> dict[str, Any]:
    """Return bounds as JSON values that tell one that was waived from one that is filled in by default."""
    divergence = DEFAULT_MAX_DIVERGENCE if bounds.max_divergence is None else bounds.max_divergence
    return {
        "drop": None if bounds.max_drop is None else str(bounds.max_drop),
        "divergence": str(divergence),
        "default": bounds.max_divergence is None,
    }
