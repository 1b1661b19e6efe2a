"""Step-by-step comparison of original and restored checkpoints, with the previous-checkpoint baseline."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, StorageError
from inshrink_core.evaluate.evaluator import Evaluation, Evaluator
from inshrink_core.metrics import Direction, drop
from inshrink_core.report import Report

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inshrink_core.formats import Skipped


FIGURES: Final = ("drop", "divergence", "restore_cost")
"""Names of the figures of a restored state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a state in place of a step's original.

    Parameters
    ----------
    drop
        Relative change of the metric for the worse; None if the original's metric is 0.
    divergence
        Divergence of the predictions; None if the evaluator returns none.
    restore_cost
        Expected relative rise of the loss (`inshrink_core.evaluate.Evaluation.restore_cost`); None if it
        cannot be determined.
    drop_error
        Standard error of `drop`; None if the evaluator does not return it. It is an upper bound, because both
        states are evaluated on the same samples, so that most of their errors cancel.
    failure
        Reason why the state could not be evaluated; empty on success. A failure breaks every bound.
    """

    drop: float | None = None
    divergence: float | None = None
    restore_cost: float | None = None
    drop_error: float | None = None
    failure: str = ""


def figures_of(original: Evaluation, restored: Evaluation) -> Figures:
    """Return the figures of a state against the original of its step.

    Raises
    ------
    InputError
        The predictions cannot be compared.
    """
    errors = [state.standard_errors.get(original.metric) for state in (original, restored)]
    known = [error for error in errors if error is not None]
    nats = original.divergence(restored)
    return Figures(
        drop=drop(original.value, restored.value, original.direction),
        divergence=nats,
        restore_cost=original.restore_cost(restored, nats),
        drop_error=math.hypot(*known) / abs(original.value) if original.value and len(known) == 2 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """One step: the original, the restored state, and the previous-checkpoint baseline.

    Parameters
    ----------
    step
        Training step.
    original, restored
        Metric of each.
    drop
        Relative change for the worse; None if the original's metric is 0.
    divergence
        Divergence of the predictions; None if the evaluator returns none.
    restore_cost
        Expected relative rise of the loss (`Evaluation.restore_cost`); None if unknown.
    stale_drop, stale_divergence, stale_restore_cost
        The same figures for the previous original checkpoint in place of this one; None for the first step.
    restore_gain, restore_noise
        Restore gain and noise at the previous step (`inshrink_core.chain.gain`); None if not measured.
    """

    step: int
    original: float
    restored: float
    drop: float | None
    divergence: float | None
    stale_drop: float | None
    stale_divergence: float | None
    restore_gain: float | None = None
    restore_noise: float | None = None
    restore_cost: float | None = None
    stale_restore_cost: float | None = None

    @classmethod
    def of(cls, step: int, original: float, restored: float, found: Figures, stale: Figures | None) -> Self:
        """Return a step from its figures, and from those of the previous original in its place."""
        before = {f"stale_{name}": None if stale is None else getattr(stale, name) for name in FIGURES}
        worse = {name: getattr(found, name) for name in FIGURES}
        return cls(step=step, original=original, restored=restored, **worse, **before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Stored part of a comparison: the evaluator, and the metric's standard error by step."""

    metric: str
    direction: Direction
    device: str
    steps: tuple[EvaluatedStep, ...]
    n_samples: int | None = None
    standard_errors: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Report):
    """Compared steps of a chain, with the worst and the mean of each figure (None if no step has it).

    `device` is the device that decoded the steps, and `unreadable` the originals that could not be read.
    `measured_at` is the Unix time of the oldest reused result; None if all results are new.
    """

    metric: str
    direction: Direction
    max_drop: float | None
    max_divergence: float | None
    mean_divergence: float | None
    max_restore_cost: float | None
    steps: tuple[EvaluatedStep, ...]
    device: str = "cpu"
    unreadable: tuple[Skipped, ...] = ()
    measured_at: float | None = None

    @classmethod
    def over(cls, steps: Sequence[EvaluatedStep], metric: str, direction: Direction, **more: Any) -> Self:
        """Return the comparison of these steps, with the worst and the mean of each figure."""
        divergences = [step.divergence for step in steps if step.divergence is not None]
        return cls(
            metric=metric,
            direction=direction,
            max_drop=_largest([step.drop for step in steps]),
            max_divergence=_largest(divergences),
            mean_divergence=math.fsum(divergences) / len(divergences) if divergences else None,
            max_restore_cost=_largest([step.restore_cost for step in steps]),
            steps=tuple(steps),
            **more,
        )


class Steps(Protocol):
    """Protocol of a run or an archive: checkpoints by step."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, ascending."""

    def __getitem__(self, step: int, /) -> Checkpoint:
        """Return the checkpoint of a step."""


def compare_steps(
    original: Steps,
    restored: Steps,
    evaluator: Evaluator,
    *,
    steps: Iterable[int] | None = None,
    known: Callable[[int], Evaluation] | None = None,
    on_step: Callable[[EvaluatedStep, Evaluation], None] | None = None,
) -> Comparison:
    """Evaluate original and restored checkpoints step by step.

    Parameters
    ----------
    original, restored
        Checkpoints by step; the steps in both are compared.
    evaluator
        The evaluator.
    steps
        Compare only these steps. The baseline of the first one is still its predecessor in the chain.
    known
        Function that returns the evaluation of an original step; by default the evaluator is called.
    on_step
        Callback after each step with its figures, and the evaluation of the original.

    Raises
    ------
    InputError
        No step is in both, or one of `steps` is not.
    EvaluatorError
        As in `Evaluator.evaluate`, or predictions cannot be compared.

    Notes
    -----
    Each step takes two evaluations; that of the original is also the baseline of the next step.
    """
    common = sorted(set(original.steps) & set(restored.steps))
    chosen = common if steps is None else sorted(set(steps))
    if not chosen or not set(chosen) <= set(common):
        missing = sorted(set(chosen) - set(common))
        raise InputError(
            f"step {missing[0]} is not in both"
            if missing
            else "original and restored have no step in common",
            remedy="`inshrink inspect` lists the steps of each",
        )
    previous_of = dict(zip(common[1:], common, strict=False))
    results: list[EvaluatedStep] = []
    if known is None:
        known = functools.lru_cache(2)(lambda step: evaluator.evaluate(original[step]))
    for step in chosen:
        before = previous_of.get(step)
        previous = None if before is None else known(before)
        first, second = known(step), evaluator.evaluate(restored[step])
        try:
            stale = None if previous is None else figures_of(first, previous)
            found = EvaluatedStep.of(step, first.value, second.value, figures_of(first, second), stale)
        except InputError as error:
            raise EvaluatorError(f"step {step} cannot be compared: {error}", where=evaluator.spec) from error
        results.append(found)
        if on_step is not None:
            on_step(found, first)
    return Comparison.over(results, first.metric, first.direction)


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value of the steps that have one."""
    return max((value for value in values if value is not None), default=None)


_ARRAYS: Final = ("log_probs", "predictions")


class OriginalEvaluations:
    """Evaluations of original steps; each is made once, and its predictions go to files.

    Parameters
    ----------
    ask
        Function that evaluates the original of a step.
    folder
        Folder for the predictions; the caller removes it.
    """

    def __init__(self, ask: Callable[[int], Evaluation], folder: Path) -> None:
        self._ask, self._folder = ask, folder
        self._known: dict[int, Evaluation] = {}

    def __contains__(self, step: object) -> bool:
        return step in self._known

    def __call__(self, step: int) -> Evaluation:
        """Return the evaluation of a step.

        Raises
        ------
        StorageError
            No space is left for its predictions.
        EvaluatorError, InputError
            As in `Evaluator.evaluate`.
        """
        if step not in self._known:
            found = self._ask(step)
            log_probs, predictions = (
                self._mapped(f"{step}-{name}.npy", getattr(found, name)) for name in _ARRAYS
            )
            self._known[step] = replace(found, log_probs=log_probs, predictions=predictions)
        return self._known[step]

    def clear(self) -> None:
        """Discard all evaluations, so that the files can be removed."""
        self._known.clear()

    def forget(self, which: Callable[[int], bool]) -> None:
        """Discard the evaluations of some steps, and remove their files."""
        for step in [step for step in self._known if which(step)]:
            del self._known[step]
            for name in _ARRAYS:
                (self._folder / f"{step}-{name}.npy").unlink(missing_ok=True)

    def _mapped(self, name: str, values: NDArray[Any] | None) -> NDArray[Any] | None:
        """Move an array to a file: a run's predictions of a language model would not fit into memory."""
        if values is None:
            return None
        import numpy as np

        path = self._folder / name
        try:
            np.save(path, values)
            mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        except OSError as error:
            raise StorageError(
                f"predictions cannot be kept: {error}", where=str(path.parent), remedy="free space there"
            ) from error
        return mapped
