"""Asking the evaluator: the originals once each, candidates as often as the search wants."""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError
from inshrink_core.evaluate import (
    Evaluation,
    OriginalEvaluations,
    PartialEvaluation,
    StateEvaluator,
    StreamingEvaluator,
)
from inshrink_core.metrics import Direction, divergence, drop
from inshrink_core.search.bounds import Bounds, Figures, Partial, figures_of

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.evaluate import EvaluatedStep

# Share of the tightest bound by which two evaluations of one state may differ.
_STEADY: Final = 0.01

# Bound in whose place a search without a bound on the drop is judged steady.
_TIGHTEST: Final = 1e-3

_Answer = TypeVar("_Answer", Evaluation, "Evaluation | PartialEvaluation")


class Judged(NamedTuple):
    """Steps of a chain as an evaluator has judged them, and who it was; as a comparison has them.

    `name` and `digest` tell the evaluator from others (`Judge.spec`, `Judge.digest`).
    """

    name: str
    digest: str
    metric: str
    direction: str
    steps: tuple[EvaluatedStep, ...]
    n_samples: int | None
    standard_errors: Mapping[int, float | None]


class Judge:
    """What the evaluator says of candidates, against the originals of a run.

    Parameters
    ----------
    evaluators
        One, or several that are asked side by side (the published replicas).
    originals
        Returns the original checkpoint of a step.
    bounds
        What is promised; completed at the first evaluation (`Bounds.completed`).

    Attributes
    ----------
    metric, direction
        Of the evaluator, once it was asked.
    seconds
        Time within the evaluators, originals included.
    evaluations
        States that were judged, originals not counted.
    """

    def __init__(
        self, evaluators: Sequence[StateEvaluator], originals: Callable[[int], Checkpoint], bounds: Bounds
    ) -> None:
        self._all, self._originals, self._bounds = tuple(evaluators), originals, bounds
        self._free: SimpleQueue[StateEvaluator] = SimpleQueue()
        for one in evaluators:
            self._free.put(one)
        self._folder = tempfile.TemporaryDirectory(prefix="inshrink-search-")
        self._known = OriginalEvaluations(self._first_word, Path(self._folder.name))
        self._lock = Lock()
        self.metric = ""
        self.direction = ""
        self.seconds = 0.0
        self.evaluations = 0

    @property
    def spec(self) -> str:
        """Name of the evaluator, for messages."""
        return self._all[0].spec

    @property
    def digest(self) -> str:
        """What tells this evaluator from others: its source, function, metric and direction."""
        return evaluator_digest(self._all[0])

    @property
    def replicas(self) -> int:
        """How many states are evaluated side by side."""
        return len(self._all)

    @property
    def asked(self) -> Bounds:
        """What was asked for, before the evaluator completed it."""
        return self._bounds

    def bounds(self, step: int) -> Bounds:
        """Return what is promised; asks the evaluator about a step's original the first time.

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
        """Return what the evaluator says of an original, asked once; predictions are kept in files.

        Raises
        ------
        EvaluatorError
            The evaluator failed, or said two things of one state: that is tried at the first step.
        """
        with self._lock:
            return self._known(step)

    def _first_word(self, step: int) -> Evaluation:
        """Ask about an original; twice about the first of all."""
        found = self._ask(lambda evaluator: evaluator.evaluate(self._originals(step)))
        if not self.metric:
            again = self._ask(lambda evaluator: evaluator.evaluate(self._originals(step)))
            self._require_steady(found, again)
            self.metric, self.direction = found.metric, found.direction.value
        return found

    def knows(self, step: int) -> bool:
        """Whether the evaluator has been asked about a step's original."""
        return step in self._known

    def forget(self, which: Callable[[int], bool]) -> None:
        """Forget what was said of the originals of some steps, and remove their predictions."""
        with self._lock:
            self._known.forget(which)

    def close(self) -> None:
        """End the evaluators and remove the files."""
        for one in self._all:
            one.close()
        self._known.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def figures(
        self, step: int, state: Mapping[str, Tensor] | Checkpoint, *, until_broken: bool = False
    ) -> Figures:
        """Return the figures of a state in the place of a step's original.

        A metric or prediction that is not finite is a failure of the state, for the original has one.

        Parameters
        ----------
        step, state
            What is judged, and in whose place.
        until_broken
            End the evaluation once it is clear that a bound is broken, where the evaluator says what it
            knows so far (`inshrink_core.search.judge`).

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung or died.
        """
        first = self.original(step)
        ended = EarlyExit(first, self._bounds.completed(first), self.spec)

        def ask(evaluator: StateEvaluator) -> Evaluation | PartialEvaluation:
            if until_broken and isinstance(evaluator, StreamingEvaluator):
                return evaluator.evaluate_until(state, ended)
            return evaluator.evaluate(state)

        try:
            found = self._ask(ask)
        except NotFiniteError as error:
            self._count()
            return Figures(failure=error.what)
        self._count()
        if not isinstance(found, Evaluation):
            if ended.figures is None:
                raise RuntimeError("an evaluation was ended without a bound being broken")
            return ended.figures
        try:
            return figures_of(first, found)
        except InputError as error:
            return Figures(failure=str(error))

    def _count(self) -> None:
        with self._lock:
            self.evaluations += 1

    def stale(self, step: int, before: int | None) -> Figures | None:
        """Return the figures of the original before, in this one's place; None for the first step."""
        if before is None:
            return None
        previous = self.original(before)
        first = self.original(step)
        try:
            return figures_of(first, previous)
        except InputError as error:
            raise EvaluatorError(f"step {step} cannot be compared: {error}", where=self.spec) from error

    def _require_steady(self, first: Evaluation, second: Evaluation) -> None:
        """Refuse an evaluator whose word changes by more than a bound can bear."""
        bound = self._bounds.max_drop
        tightest = bound if bound is not None and 0 < bound < math.inf else _TIGHTEST
        difference = abs(first.value - second.value)
        if difference > _STEADY * tightest * abs(first.value):
            raise EvaluatorError(
                "the evaluator changes its mind: it was asked twice about the same state",
                where=self.spec,
                expected=f"{first.metric} {first.value:.6g} again",
                found=f"{second.value:.6g}",
                remedy="fix its seed, and evaluate the same samples every time",
            )

    def _ask(self, ask: Callable[[StateEvaluator], _Answer]) -> _Answer:
        """Ask an evaluator that is free, for each is for one thread at a time; count the time it takes."""
        evaluator = self._free.get()
        begun = time.perf_counter()
        try:
            answer = ask(evaluator)
        finally:
            self._free.put(evaluator)
        elapsed = time.perf_counter() - begun
        self.seconds += answer.seconds if isinstance(answer, Evaluation) else elapsed
        return answer


def evaluator_digest(evaluator: StateEvaluator) -> str:
    """Return 16 hexadecimal digits over an evaluator's source, function, metric and direction.

    Data that it reads is not part of it: who changes those wants a new trial log.
    """
    file, _, function = evaluator.spec.rpartition(":")
    total = hashlib.sha256(Path(file).read_bytes() if Path(file).is_file() else b"")
    total.update(f"\0{function}\0{evaluator.metric}\0{evaluator.direction}".encode())
    total.update(getattr(evaluator, "setting", "").encode())
    return total.hexdigest()[:16]


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
        whole = self._original.log_probs
        # A divergence is never negative: what all rows have so far is the least that they have in the end.
        least_divergence = None if whole is None or not self._n_rows else self._total_divergence / len(whole)
        mean = so_far.value if so_far.metric == self._original.metric else None
        if mean is not None and not math.isfinite(mean):
            mean = None
        for rule, best in (("certain", _best_in_range), ("confident", _best_believed)):
            least_drop = None if mean is None else self._drop_of(best(so_far, mean))
            if self._bounds.is_broken_by(least_drop, least_divergence):
                self.figures = Figures(
                    drop=self._drop_of(mean),
                    divergence=self._total_divergence / self._n_rows if self._n_rows else None,
                    partial=Partial(
                        rule=rule,
                        n=so_far.n,
                        of=so_far.of,
                        least_drop=least_drop,
                        least_divergence=least_divergence,
                    ),
                )
                return True
        return False

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
