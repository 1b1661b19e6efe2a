"""Step-by-step comparison of original and restored checkpoints, with the previous-checkpoint baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from inshrink_core.errors import EvaluatorError, InputError, StorageError
from inshrink_core.evaluate.evaluator import Evaluation
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
        Relative change of the metric for the worse, signed; None if the original's metric is 0.
    divergence
        Divergence of the predictions (docs/evaluators.md#the-function); None if the evaluator returns none.
    restore_cost
        Expected rise of the loss, as a share of it; None if unknown.
    drop_error
        Standard error of `drop`; None if the evaluator does not return it. It is an upper bound, because both
        states are evaluated on the same samples, so that most of their errors cancel.
    failure
        Why the state could not be evaluated; empty on success.
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
    original
        Metric as trained.
    restored
        Metric as restored.
    drop
        Relative change of the metric for the worse, signed; None if the original's metric is 0.
    divergence
        Divergence of the predictions (docs/evaluators.md#the-function); None if the evaluator returns none.
    restore_cost
        Expected rise of the loss, as a share of it; None if unknown.
    previous_drop, previous_divergence, previous_restore_cost
        The same for the previous original checkpoint in place of this one; None for the first step.
    """

    step: int
    original: float
    restored: float
    drop: float | None
    divergence: float | None
    restore_cost: float | None = None
    previous_drop: float | None
    previous_divergence: float | None
    previous_restore_cost: float | None = None

    @classmethod
    def of(
        cls, step: int, original: float, restored: float, found: Figures, baseline: Figures | None
    ) -> Self:
        """Return a step from its figures, and from those of the previous original in its place."""
        before = {f"previous_{name}": getattr(baseline, name, None) for name in FIGURES}
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
    """Compared steps of a chain, with the worst and the mean of each figure (null if no step has it).

    Parameters
    ----------
    metric
        Metric that is compared.
    direction
        Better direction of the metric: ``higher`` or ``lower``.
    max_drop
        Largest value of any step.
    max_divergence
        Largest value of any step.
    mean_divergence
        Mean divergence over the steps, in nats.
    max_restore_cost
        Largest value of any step.
    steps
        Steps compared.
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    unreadable
        Checkpoints of the run that cannot be read.
    measured_at
        Unix time of the oldest reused result (docs/design.md#what-was-measured); None if all are new.
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

    SHOWS: ClassVar = (
        "unreadable steps metric direction max_drop max_divergence mean_divergence max_restore_cost device "
        "measured_at"
    )

    @classmethod
    def over(cls, steps: Sequence[EvaluatedStep], metric: str, direction: Direction, **more: Any) -> Self:
        """Return the comparison of these steps, with the worst and the mean of each figure."""
        divergences = [step.divergence for step in steps if step.divergence is not None]
        worst: dict[str, Any] = {f"max_{name}": largest(steps, name) for name in FIGURES}
        return cls(
            metric=metric,
            direction=direction,
            **worst,
            mean_divergence=math.fsum(divergences) / len(divergences) if divergences else None,
            steps=tuple(steps),
            **more,
        )


def compared_steps(
    original: Callable[[int], Evaluation],
    restored: Callable[[int], Evaluation],
    steps: Mapping[int, int | None],
    where: str,
) -> Iterator[tuple[EvaluatedStep, Evaluation]]:
    """Yield the figures of each step, and the evaluation of its original.

    Parameters
    ----------
    original, restored
        Evaluate the original and the restored state of a step. The evaluation of an original is needed again
        as the baseline of the next step.
    steps
        The steps, each with the step before it; None for the first one.
    where
        Name of the evaluator.

    Raises
    ------
    EvaluatorError
        As in `Evaluator.evaluate`, or predictions cannot be compared.
    """
    for step, before in steps.items():
        previous = None if before is None else original(before)
        first, second = original(step), restored(step)
        try:
            baseline = None if previous is None else figures_of(first, previous)
            found = EvaluatedStep.of(step, first.value, second.value, figures_of(first, second), baseline)
        except InputError as error:
            raise EvaluatorError(f"step {step} cannot be compared: {error}", where=where) from error
        yield found, first


def largest(rows: Iterable[Any], figure: str) -> float | None:
    """Return the largest value of a figure; None if no row has one."""
    return max((value for row in rows if (value := getattr(row, figure)) is not None), default=None)


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
