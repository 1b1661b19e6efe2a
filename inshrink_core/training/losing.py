"""Partial failures: how many steps a training loses where some tensors are restored, and not all.

A training is saved, goes on, and loses some of its tensors. One way back is to restore the save whole: all
steps since are lost. The other restores what was lost alone, beside tensors that are some steps ahead of it
(SCAR). What that costs is counted in steps too: how many more it takes until the model is as good as without
the failure.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.errors import InputError
from inshrink_core.execution import resolve_device, working_folder
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.metrics import Direction
from inshrink_core.report import Report
from inshrink_core.training.failing import OnStep, Schedule, Setup, Training, isolated, open_saver
from inshrink_core.training.partial import load_lost
from inshrink_core.training.rehearsal import checked_schedule
from inshrink_core.training.tasks import find_task

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig
    from inshrink_core.codec import AnyCodec

__all__ = ["PartialFailure", "PartialRehearsal", "rehearse_partial"]

_CHOICE_STRIDE: Final = 1_000_003
"""Between the seeds that choose what is lost, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFailure:
    """One failure of one training.

    Parameters
    ----------
    seed
        Of the training.
    saved_at, failed_at
        The step of the save, and the step after which tensors were lost.
    lost
        Their names.
    share
        Of the model's parameters.
    whole
        Steps lost where everything is restored: those since the save.
    partial
        Steps lost where the lost tensors alone are: below zero where the training was faster by chance.
    reached
        Whether it became as good in the steps that were left; if not, `partial` is a lower bound.
    """

    seed: int
    saved_at: int
    failed_at: int
    lost: tuple[str, ...]
    share: float
    whole: int
    partial: int
    reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRehearsal(Report):
    """The failures of several trainings.

    Parameters
    ----------
    task, metric, direction, codec, config, optimizer, device
        As in a `Rehearsal`.
    lose
        Share of the tensors that a failure takes.
    failures
        By seed and step.
    """

    task: str
    metric: str
    direction: str
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    lose: float
    device: str
    failures: tuple[PartialFailure, ...]

    DOCUMENT: ClassVar = (
        "task metric direction codec config optimizer lose device failures whole partial fewer fewer_by_seed"
    )

    @property
    def whole(self) -> float:
        """Mean steps lost where everything is restored."""
        return statistics.fmean(failure.whole for failure in self.failures)

    @property
    def partial(self) -> float:
        """Mean steps lost where the lost tensors alone are restored."""
        return statistics.fmean(failure.partial for failure in self.failures)

    @property
    def fewer(self) -> float:
        """Share of the steps that a partial restore saves."""
        return 1 - self.partial / self.whole

    @property
    def fewer_by_seed(self) -> tuple[float, ...]:
        """The same of each training alone."""
        seeds = dict.fromkeys(failure.seed for failure in self.failures)
        own = ([one for one in self.failures if one.seed == seed] for seed in seeds)
        return tuple(1 - sum(one.partial for one in some) / sum(one.whole for one in some) for some in own)


def rehearse_partial(
    task: str,
    directory: str | os.PathLike[str],
    *,
    lose: float = 0.25,
    scale: str | None = None,
    codec: str | None = None,
    config: Mapping[str, Any] | AnyCodec | None = None,
    optimizer: str | None = None,
    restores: int | None = None,
    seeds: int = 3,
    saves: int | None = None,
    steps: int | None = None,
    keyframe_every: int = 32,
    device: str = "auto",
    threads: int = 1,
    progress: OnProgress | None = None,
) -> PartialRehearsal:
    """Let trainings lose some tensors between two saves, and count the steps that costs.

    Parameters
    ----------
    task
        Name of a shipped task, or ``FILE.py:CLASS`` (executed).
    directory
        Where archives lie meanwhile.
    lose
        Share of the model's parameter tensors that a failure takes, above 0 and below 1; at least one.
    scale
        ``large``: the task's model for a GPU.
    codec, config, optimizer, keyframe_every
        How frames are written, as `Saver` has it.
    restores, saves, steps
        Failures, saves and steps of each training; by default the task's. A failure strikes at a random
        step after a save, at the latest with the next one.
    seeds
        Trainings, with the seeds 0 to ``seeds - 1``.
    device, threads
        Where training happens, and on how many threads.
    progress
        Called after each step of a training that fails and is not: failures are tried on copies of it.

    Raises
    ------
    NotFoundError
        There is no such task.
    InputError
        A setting is out of range.

    Notes
    -----
    After a failure the task is evaluated at every step of both trainings: of the one that did not fail over
    as many steps as lie between two saves, the best of which is the target (SCAR, section 3, iteration cost),
    and of the one that did until it is as good, or has lost twice the steps of a full restore. Both see the
    same batches.

    Examples
    --------
    >>> import inshrink_core, tempfile
    >>> found = inshrink_core.training.rehearse_partial(
    ...     "regression", tempfile.mkdtemp(), steps=9, saves=3, restores=1, seeds=1
    ... )
    >>> len(found.failures), len(found.failures[0].lost)
    (1, 2)
    """
    if not 0 < lose < 1:
        raise InputError("--lose is a share of the tensors", expected="above 0, below 1", found=f"{lose:g}")
    found, _ = find_task(task, scale)
    schedule = checked_schedule(Schedule.of(found, steps, saves, restores), seeds, threads)
    if not schedule.n_restores:
        raise InputError("a training without a failure loses nothing", expected="--restores 1 or more")
    chain = make_chain_config("", codec, config, optimizer, keyframe_every, "cpu", threads)
    setup = Setup(task=found, schedule=schedule, device=resolve_device(device))
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    failures: list[PartialFailure] = []
    with isolated(threads), working_folder(folder) as scratch:
        for seed in range(seeds):

            def on_step(step: int, seed: int = seed) -> None:
                if progress is not None:
                    done = seed * schedule.n_steps + step
                    progress(Progress("rehearse", done, seeds * schedule.n_steps, step, f"seed {seed}"))

            failures += _failures(setup, seed, lose, chain, scratch / f"{seed}.inshrink", on_step)
    return PartialRehearsal(
        task=found.name,
        metric=found.metric,
        direction=found.direction,
        codec=chain.codec,
        config=chain.settings(),
        optimizer=chain.optimizer,
        lose=lose,
        device=setup.device,
        failures=tuple(failures),
    )


def _failures(
    setup: Setup, seed: int, lose: float, chain: ChainConfig, archive: Path, on_step: OnStep
) -> list[PartialFailure]:
    """Train once, and try a failure after some of the saves, on copies."""
    saved_at, found = setup.schedule.saved_at, []
    chance = torch.Generator().manual_seed(seed * _CHOICE_STRIDE + 1)
    training, at = Training(setup, seed, seed), 0
    with open_saver(archive, training, chain) as saver:
        for number, step in enumerate(saved_at):
            training.advance(range(at + 1, step + 1), saver.record, on_step)
            saver.save(step)
            at = step
            if step in setup.schedule.restored_at:
                between = saved_at[number + 1] - step
                after = int(torch.randint(1, between + 1, (), generator=chance))
                names = _chosen([name for name, _ in training.model.named_parameters()], lose, chance)
                content = saver.read(step)
                with torch.random.fork_rng():
                    found.append(_failure(training, step, step + after, between, names, content))
    return found


def _chosen(names: Sequence[str], lose: float, chance: torch.Generator) -> frozenset[str]:
    """Choose tensors at random."""
    order = torch.randperm(len(names), generator=chance).tolist()
    return frozenset(names[i] for i in order[: max(1, round(lose * len(names)))])


def _failure(
    training: Training,
    saved_at: int,
    failed_at: int,
    horizon: int,
    names: frozenset[str],
    content: Mapping[str, Any],
) -> PartialFailure:
    """Let a copy of a training go on, lose tensors, and see when it is as good as if it had not."""
    live = copy.deepcopy(training)
    live.advance(range(saved_at + 1, failed_at + 1), None, None)
    hurt, random = copy.deepcopy(live), torch.random.get_rng_state()
    task, n_steps = training.task, training.n_steps
    direction, values = Direction(task.direction), []

    def cost(of: Training) -> float:
        return direction.cost(float(task.evaluate(of.model)))

    for step in range(failed_at + 1, min(failed_at + horizon, n_steps) + 1):
        live.advance(range(step, step + 1), None, None)
        values.append(cost(live))
    best = min(values)
    needed = values.index(best) + 1
    with torch.no_grad():
        for name, parameter in hurt.model.named_parameters():
            if name in names:
                parameter.fill_(torch.nan)
    load_lost(hurt.model, hurt.optimizer, content, names)
    torch.random.set_rng_state(random)
    whole = failed_at - saved_at
    last = min(failed_at + needed + 2 * whole, n_steps)
    step, reached = failed_at, False
    while step < last and not reached:
        step += 1
        hurt.advance(range(step, step + 1), None, None)
        reached = cost(hurt) <= best
    sizes = {name: parameter.numel() for name, parameter in training.model.named_parameters()}
    return PartialFailure(
        seed=training.seed,
        saved_at=saved_at,
        failed_at=failed_at,
        lost=tuple(sorted(names)),
        share=sum(sizes[name] for name in names) / sum(sizes.values()),
        whole=whole,
        partial=step - failed_at - needed + (not reached),
        reached=reached,
    )
