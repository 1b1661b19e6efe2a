"""Ending an evaluation as soon as it is clear that a bound is broken.

Nothing is promised by it: a state that is given up keeps no bound, and one that is kept was measured on every
sample. Three things make it clear, the first two whatever the other samples would say:

- *divergence*: no sample's KL is negative, so the mean over all N rows is at least the sum over the rows so
  far, divided by N;
- *range*: a metric that is a mean of scores between a and b ends, from the mean m of n samples of N, between
  (n·m + (N - n)·a)/N and (n·m + (N - n)·b)/N: the better end is what the drop is judged by;
- *standard error*: where samples come in random order, the mean of n of N is off by its standard error times
  √(1 - n/N) (the finite population correction; Cochran, "Sampling Techniques", 1977, 2.6), and
  `CONFIDENT_ERRORS` of these are allowed for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from inshrink_core.errors import EvaluatorError, InputError
from inshrink_core.metrics import Direction, divergence, drop
from inshrink_core.search.bounds import Bounds, Figures, Partial

if TYPE_CHECKING:
    from inshrink_core.evaluate import Evaluation, PartialEvaluation

__all__ = ["CONFIDENT_ERRORS", "EarlyExit"]

CONFIDENT_ERRORS: Final = 4.0
"""Standard errors between a mean so far and what is believed of the mean in the end: of a normal, one side is
beyond 4 once in 32,000 looks, so that a hundred looks at a state are wrong less than once in 300."""


class EarlyExit:
    """Says after each partial result whether a bound is broken; to be asked about one state.

    Parameters
    ----------
    original
        What the evaluator said of the original, in full.
    bounds
        What is promised.
    where
        Name of the evaluator, for messages.

    Attributes
    ----------
    figures
        Of the samples so far, once a bound is broken.
    """

    def __init__(self, original: Evaluation, bounds: Bounds, where: str = "") -> None:
        self._original, self._bounds, self._where = original, bounds, where
        self._n_rows, self._total_divergence, self._is_comparable = 0, 0.0, True
        self.figures: Figures | None = None

    def __call__(self, so_far: PartialEvaluation) -> bool:
        """Return whether the evaluation may end: a bound is broken.

        Raises
        ------
        EvaluatorError
            More rows of predictions than the original has.
        """
        self._add_rows(so_far)
        known = self._comparable(so_far)
        certain = None if known is None else self._drop_of(_best_in_range(so_far, known))
        confident = None if known is None else self._drop_of(_best_believed(so_far, known))
        divergence_so_far = self._least_divergence()
        for rule, least_drop in (("certain", certain), ("confident", confident)):
            if self._bounds.is_broken_by(least_drop, divergence_so_far):
                self.figures = Figures(
                    drop=None if known is None else self._drop_of(known),
                    divergence=self._total_divergence / self._n_rows if self._n_rows else None,
                    partial=Partial(
                        rule=rule,
                        n=so_far.n,
                        of=so_far.of,
                        least_drop=least_drop,
                        least_divergence=divergence_so_far,
                    ),
                )
                return True
        return False

    def _comparable(self, so_far: PartialEvaluation) -> float | None:
        """Return the mean so far; None for another metric than the one that counts, or no number."""
        if so_far.metric != self._original.metric or so_far.value is None:
            return None
        return so_far.value if math.isfinite(so_far.value) else None

    def _drop_of(self, value: float | None) -> float | None:
        return None if value is None else drop(self._original.value, value, self._original.direction)

    def _add_rows(self, so_far: PartialEvaluation) -> None:
        """Add the divergence of rows that are new; they are in the order of the original's."""
        rows, whole = so_far.log_probs, self._original.log_probs
        if rows is None or whole is None or not self._is_comparable:
            return
        end = self._n_rows + len(rows)
        if end > len(whole):
            raise EvaluatorError(
                "its partial results have more rows of 'log_probs' than the full one",
                where=self._where,
                expected=f"at most {len(whole)}",
                found=str(end),
            )
        try:
            self._total_divergence += len(rows) * divergence(whole[self._n_rows : end], rows)
        except InputError:
            # Not finite, say: the full result, which will not be comparable either, is what fails.
            self._is_comparable = False
            return
        self._n_rows = end

    def _least_divergence(self) -> float | None:
        """Return what the mean over all rows is at least."""
        whole = self._original.log_probs
        return None if whole is None or not self._n_rows else self._total_divergence / len(whole)


def _best_in_range(so_far: PartialEvaluation, mean: float) -> float | None:
    """Return the best mean that is possible yet; None where a sample's score has no best."""
    best = so_far.limits[0 if so_far.direction is Direction.LOWER else 1]
    if best is None:
        return None
    return (so_far.n * mean + (so_far.of - so_far.n) * best) / so_far.of


def _best_believed(so_far: PartialEvaluation, mean: float) -> float | None:
    """Return the best mean that is believed possible; None without a standard error."""
    if so_far.standard_error is None or not so_far.standard_error >= 0:
        return None
    room = CONFIDENT_ERRORS * so_far.standard_error * math.sqrt(1 - so_far.n / so_far.of)
    return mean - room if so_far.direction is Direction.LOWER else mean + room
