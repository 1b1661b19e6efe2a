"""Partial failures: lost training steps when only some tensors are restored.

A training saves, continues, and loses some of its tensors. A full restore loses all steps since the save. A
partial restore loads only the lost tensors, next to tensors that are some steps ahead of them (SCAR). Its
cost is the number of additional steps until the model is as good as without the failure. A training without a
loss also needs additional steps, because it has to reach the best value of another one. A copy with weights
that are changed in their last bits measures this effect of chance.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from inshrink_core.chain import Archive
from inshrink_core.errors import InputError
from inshrink_core.execution.files import working_folder
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.metrics import Direction
from inshrink_core.report import Report
from inshrink_core.training.state import TrainingState
from inshrink_lab.budget import BudgetWriter
from inshrink_lab.failing import OnStep, Setup, Training, isolated, open_saver, perturb

if TYPE_CHECKING:
    from inshrink_core.chain import ChainConfig


_CHOICE_STRIDE: Final = 1_000_003
"""Stride between the seeds that choose the lost tensors and the time of the failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFailure:
    """One failure of one training.

    Parameters
    ----------
    seed
        Seed.
    saved_at
        Step of the last complete save, or of the save in its place under a budget.
    failed_at
        Step after which tensors were lost.
    lost
        Names of the lost tensors.
    share
        Their share of the model's parameters.
    whole
        Lost steps with a full restore: those since the save.
    partial
        Lost steps with a partial restore; negative if the training was faster by chance.
    chance
        Counted steps without a loss, with every weight moved by its last bit.
    reached
        Whether the training became as good in the remaining steps. If not, `partial` is a lower bound.
        `chance` is cut off in the same way.
    """

    seed: int
    saved_at: int
    failed_at: int
    lost: tuple[str, ...]
    share: float
    whole: int
    partial: int
    chance: int
    reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRehearsal(Report):
    """Failures of several trainings.

    Parameters
    ----------
    task
        Name of the task.
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    codec
        Codec of the weights.
    config
        All settings of the codec.
    optimizer
        How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
    device
        Device of the trainings: ``cpu`` or ``cuda``.
    lose
        Share of the tensors that a failure loses.
    budget
        Share of a complete save's bytes per save; None for complete saves.
    archive_bytes
        Bytes of all saves, including keyframes.
    failures
        The failures, by seed and step.
    """

    task: str
    metric: str
    direction: str
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    lose: float
    budget: float | None
    device: str
    archive_bytes: int
    failures: tuple[PartialFailure, ...]

    KEYS: ClassVar = (
        "task metric direction codec config optimizer lose budget device archive_bytes failures whole "
        "partial chance fewer fewer_beyond_chance"
    )

    @property
    def whole(self) -> float:
        """Mean number of lost steps with a full restore."""
        return statistics.fmean(failure.whole for failure in self.failures)

    @property
    def partial(self) -> float:
        """Mean number of lost steps with a partial restore."""
        return statistics.fmean(failure.partial for failure in self.failures)

    @property
    def chance(self) -> float:
        """Mean number of counted steps without a loss."""
        return statistics.fmean(failure.chance for failure in self.failures)

    @property
    def fewer(self) -> float:
        """Share of the lost steps that a partial restore saves, as counted."""
        return 1 - self.partial / self.whole

    @property
    def fewer_beyond_chance(self) -> float:
        """The same share after subtracting the steps that are counted without a loss."""
        return 1 - (self.partial - self.chance) / self.whole


def rehearse_partial(
    setup: Setup,
    chain: ChainConfig,
    folder: Path,
    *,
    lose: float,
    budget: float | None,
    seeds: int,
    progress: OnProgress | None = None,
) -> PartialRehearsal:
    """Let trainings lose some tensors between two saves, and count the lost steps.

    Parameters
    ----------
    setup, chain
        Training, and configuration of its saves. A failure happens at a random step after a save, at the
        latest at the next save.
    folder
        Folder of the temporary archives.
    lose
        Share of the model's parameter tensors that a failure loses; at least one tensor.
    budget
        Share of a complete save's bytes that a save may take. Saves are more frequent by its inverse,
        rounded, so that they take the same bytes in total; the first two are complete.
    seeds
        Number of trainings, with the seeds from 0.
    progress
        Callback after each step of a training, without its copies, on which failures are tried.

    Raises
    ------
    InputError
        No failure, too few steps for the saves, or no step between them.

    Notes
    -----
    After a failure the task is evaluated at every step of both trainings. The training without a failure runs
    for as many steps as between two saves; its best value is the target (SCAR, section 3, iteration cost).
    The other one runs until it reaches the target or has lost twice the steps of a full restore. Both see the
    same batches. The best of many noisy values is hard to reach even without a loss;
    `PartialRehearsal.chance` measures this effect.
    """
    if not setup.n_restores:
        raise InputError("a training without a failure loses nothing", expected="--restores 1 or more")
    n_saves = setup.n_saves * (1 if budget is None else round(1 / budget))
    if n_saves > setup.n_steps:
        raise InputError(
            "--budget asks for more saves than there are steps",
            expected=f"at most {setup.n_steps} saves",
            found=str(n_saves),
        )
    saved_at = replace(setup, n_saves=n_saves).saved_at
    folder.mkdir(parents=True, exist_ok=True)
    failures: list[PartialFailure] = []
    archive_bytes = 0
    with isolated(chain.threads), working_folder(folder) as scratch:
        for seed in range(seeds):

            def on_step(step: int, seed: int = seed) -> None:
                if progress is not None:
                    done = seed * setup.n_steps + step
                    progress(Progress("rehearse", done, seeds * setup.n_steps, step, f"seed {seed}"))

            archive = scratch / f"{seed}.inshrink"
            failures += _failures(setup, seed, lose, saved_at, budget, chain, archive, on_step)
            archive_bytes += Archive.open(archive).reader.nbytes
    if not failures:
        raise InputError("no step is left between saves, or after a failure", remedy="train more steps")
    return PartialRehearsal(
        task=setup.task.name,
        metric=setup.task.metric,
        direction=setup.task.direction,
        codec=chain.codec,
        config=chain.settings(),
        optimizer=chain.optimizer,
        lose=lose,
        budget=budget,
        device=setup.device,
        archive_bytes=archive_bytes,
        failures=tuple(failures),
    )


def _failures(
    setup: Setup,
    seed: int,
    lose: float,
    saves: Sequence[int],
    budget: float | None,
    chain: ChainConfig,
    archive: Path,
    on_step: OnStep,
) -> list[PartialFailure]:
    """Train once, and try a failure on copies after some of the saves."""
    chance, found = torch.Generator().manual_seed(seed * _CHOICE_STRIDE + 1), []
    failing = _failing_at(setup, chance)
    training, at, saved = Training(setup, seed, seed), 0, 0
    step_writer = None if budget is None else BudgetWriter(budget)
    with open_saver(archive, training, chain, step_writer) as saver:
        for step in sorted({*saves, *failing}):
            training.advance(range(at + 1, step + 1), saver.record, on_step)
            at = step
            if step in failing:
                names = _chosen([name for name, _ in training.model.named_parameters()], lose, chance)
                content = saver.read(saved)
                with torch.random.fork_rng():
                    found.append(_failure(training, *failing[step], step, names, content))
            if step in saves:
                saver.save(step)
                saved = step
    return found


def _failing_at(setup: Setup, chance: torch.Generator) -> dict[int, tuple[int, int]]:
    """Return the steps of failures, each with its previous save and the number of steps to the next one.

    A failure at the step of a save happens before the save.
    """
    failing = {}
    for step, following in pairwise(setup.saved_at):
        if step in setup.restored_at:
            between = following - step
            failed_at = step + int(torch.randint(1, between + 1, (), generator=chance))
            failing[min(failed_at, setup.n_steps - 1)] = (step, between)
    return {failed_at: place for failed_at, place in failing.items() if failed_at > place[0]}


def _chosen(names: Sequence[str], lose: float, chance: torch.Generator) -> frozenset[str]:
    """Choose tensors at random."""
    order = torch.randperm(len(names), generator=chance).tolist()
    return frozenset(names[i] for i in order[: max(1, round(lose * len(names)))])


def _failure(
    training: Training,
    saved_at: int,
    horizon: int,
    failed_at: int,
    names: frozenset[str],
    content: Mapping[str, Any],
) -> PartialFailure:
    """Let a copy of a training lose tensors; count its steps until it is as good as one without a loss."""
    live, hurt, moved = (copy.deepcopy(training) for _ in range(3))
    random = torch.random.get_rng_state()
    end = min(failed_at + horizon, training.n_steps)
    values = [_cost_after(live, step) for step in range(failed_at + 1, end + 1)]
    best = min(values)
    needed, whole = values.index(best) + 1, failed_at - saved_at

    def lost_by(other: Training) -> tuple[int, bool]:
        """Return the number of additional steps of a training, and whether it became as good."""
        torch.random.set_rng_state(random)
        last = min(failed_at + needed + 2 * whole, training.n_steps)
        for step in range(failed_at + 1, last + 1):
            if _cost_after(other, step) <= best:
                return step - failed_at - needed, True
        return last - failed_at - needed + 1, False

    with torch.no_grad():
        for name, parameter in hurt.model.named_parameters():
            if name in names:
                parameter.fill_(torch.nan)
    TrainingState(hurt.model, hurt.optimizer).load_lost(content, names)
    perturb(moved.model, torch.Generator().manual_seed(training.seed * _CHOICE_STRIDE + failed_at))
    partial, reached = lost_by(hurt)
    sizes = {name: parameter.numel() for name, parameter in training.model.named_parameters()}
    return PartialFailure(
        seed=training.seed,
        saved_at=saved_at,
        failed_at=failed_at,
        lost=tuple(sorted(names)),
        share=sum(sizes[name] for name in names) / sum(sizes.values()),
        whole=whole,
        partial=partial,
        chance=lost_by(moved)[0],
        reached=reached,
    )


def _cost_after(training: Training, step: int) -> float:
    """Train one step; return the metric, negated if higher is better."""
    training.advance(range(step, step + 1), None, None)
    return Direction(training.task.direction).cost(float(training.task.evaluate(training.model)))
