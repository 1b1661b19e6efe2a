"""Asking the evaluator: each original once, candidates as often as the search wants."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError
from inshrink_core.evaluate import Evaluation, OriginalEvaluations, StateEvaluator, figures_of
from inshrink_core.search.bounds import Bounds, Figures

if TYPE_CHECKING:
    from torch import Tensor

# Share of the tightest bound by which two evaluations of one state may differ.
_STEADY: Final = 0.01

# Bound in whose place a search without a bound on the drop is judged steady.
_TIGHTEST: Final = 1e-3


class Judge:
    """Evaluates candidates against the originals of a run.

    Parameters
    ----------
    evaluator
        Closed with the judge.
    originals
        Returns the original checkpoint of a step.
    bounds
        The limits that were asked for; completed at the first evaluation (`Bounds.completed`).

    Attributes
    ----------
    spec, digest
        Name of the evaluator for messages, and what distinguishes it from others.
    metric, direction
        Of the evaluator, after the first evaluation.
    seconds
        Time within the evaluator, originals included.
    evaluations
        Evaluated states, without originals.
    """

    def __init__(
        self, evaluator: StateEvaluator, originals: Callable[[int], Checkpoint], bounds: Bounds
    ) -> None:
        self._evaluator, self._originals, self._bounds = evaluator, originals, bounds
        self._folder = tempfile.TemporaryDirectory(prefix="inshrink-search-")
        self._known = OriginalEvaluations(self._first_look, Path(self._folder.name))
        self.spec = evaluator.spec
        self.metric = ""
        self.direction = ""
        self.seconds = 0.0
        self.evaluations = 0

    @property
    def digest(self) -> str:
        """What distinguishes this evaluator: its source, function, metric and direction."""
        return evaluator_digest(self._evaluator)

    def bounds(self, step: int) -> Bounds:
        """Return the bounds, completed by what the evaluator returns for a step's original.

        Raises
        ------
        InputError
            A bound cannot be checked with what the evaluator returns.
        """
        original = self.original(step)
        bounds = self._bounds.completed(original)
        bounds.judge(figures_of(original, original))
        return bounds

    def original(self, step: int) -> Evaluation:
        """Return the evaluation of an original, made once; predictions are stored in files.

        Raises
        ------
        EvaluatorError
            The evaluator failed, or returned two values for one state, which the first step tries.
        """
        return self._known(step)

    def _first_look(self, step: int) -> Evaluation:
        found = self._ask(self._originals(step))
        if not self.metric:
            self._require_steady(found, self._ask(self._originals(step)))
            self.metric, self.direction = found.metric, found.direction.value
        return found

    def knows(self, step: int) -> bool:
        """Whether a step's original has been evaluated."""
        return step in self._known

    def forget(self, which: Callable[[int], bool]) -> None:
        """Forget the originals of some steps, and remove their predictions."""
        self._known.forget(which)

    def close(self) -> None:
        """End the evaluator and remove the files."""
        self._evaluator.close()
        self._known.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def figures(self, step: int, state: Mapping[str, Tensor] | Checkpoint) -> Figures:
        """Return the figures of a state in the place of a step's original.

        A metric or prediction that is not finite is a failure of the state, for the original has one.

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung or died.
        """
        first = self.original(step)
        try:
            found = self._ask(state)
        except NotFiniteError as error:
            self.evaluations += 1
            return Figures(failure=error.what)
        self.evaluations += 1
        try:
            return figures_of(first, found)
        except InputError as error:
            return Figures(failure=str(error))

    def stale(self, step: int, before: int | None) -> Figures | None:
        """Return the figures of an earlier original in this one's place; None without one."""
        if before is None:
            return None
        previous, original = self.original(before), self.original(step)
        try:
            return figures_of(original, previous)
        except InputError as error:
            raise EvaluatorError(f"step {step} cannot be compared: {error}", where=self.spec) from error

    def _require_steady(self, first: Evaluation, second: Evaluation) -> None:
        """Refuse an evaluator whose values differ by more than a bound can bear."""
        tightest = self._bounds.limits.get("drop") or _TIGHTEST
        if abs(first.value - second.value) > _STEADY * tightest * abs(first.value):
            raise EvaluatorError(
                "the evaluator changes its mind: it was asked twice about the same state",
                where=self.spec,
                expected=f"{first.metric} {first.value:.6g} again",
                found=f"{second.value:.6g}",
                remedy="fix its seed, and evaluate the same samples every time",
            )

    def _ask(self, state: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        found = self._evaluator.evaluate(state)
        self.seconds += found.seconds
        return found


def evaluator_digest(evaluator: StateEvaluator) -> str:
    """Return 16 hexadecimal digits over an evaluator's source, function, metric and direction.

    Data that it reads is not part of it: who changes those wants a new trial log.
    """
    file, _, function = evaluator.spec.rpartition(":")
    total = hashlib.sha256(Path(file).read_bytes() if Path(file).is_file() else b"")
    total.update(f"\0{function}\0{evaluator.metric}\0{evaluator.direction}".encode())
    total.update(getattr(evaluator, "setting", "").encode())
    return total.hexdigest()[:16]
