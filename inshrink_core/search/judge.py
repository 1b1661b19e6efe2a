"""Asking the evaluator: the originals once each, candidates as often as the search wants."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Self

from inshrink_core.checkpoint import Checkpoint
from inshrink_core.errors import EvaluatorError, InputError, NotFiniteError, StorageError
from inshrink_core.evaluate import Evaluation, Evaluator
from inshrink_core.search.bounds import Bounds, Figures, figures_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Judge", "evaluator_digest"]

_STEADY: Final = 0.01
"""Share of the tightest bound by which two evaluations of one state may differ."""

_TIGHTEST: Final = 1e-3
"""Bound in whose place a search without a bound on the drop is judged steady."""


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
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], originals: Callable[[int], Checkpoint], bounds: Bounds
    ) -> None:
        self._all, self._originals, self._bounds = tuple(evaluators), originals, bounds
        self._free: SimpleQueue[Evaluator] = SimpleQueue()
        for one in evaluators:
            self._free.put(one)
        self._known: dict[int, Evaluation] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="inshrink-search-")
        self._lock = Lock()
        self.metric = ""
        self.direction = ""
        self.seconds = 0.0

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
            if step not in self._known:
                found = self._ask(self._originals(step))
                if not self._known:
                    self._require_steady(found, self._ask(self._originals(step)))
                self.metric, self.direction = found.metric, found.direction.value
                self._known[step] = replace(
                    found,
                    log_probs=self._mapped(f"{step}-log_probs.npy", found.log_probs),
                    predictions=self._mapped(f"{step}-predictions.npy", found.predictions),
                )
            return self._known[step]

    def _mapped(self, name: str, values: NDArray[Any] | None) -> NDArray[Any] | None:
        """Move an array to a file: of a language model's predictions, a run's worth fills a memory."""
        if values is None:
            return None
        import numpy as np

        path = Path(self._folder.name) / name
        try:
            np.save(path, values)
            mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        except OSError as error:
            raise StorageError(
                f"predictions cannot be kept: {error}", where=str(path.parent), remedy="free space there"
            ) from error
        return mapped

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

    def figures(self, step: int, state: Mapping[str, Tensor] | Checkpoint) -> Figures:
        """Return the figures of a state that stands in for a step's original.

        A metric or prediction that is not finite is a failure of the state, for the original has one.

        Raises
        ------
        EvaluatorError
            The evaluator raised, hung or died.
        """
        first = self.original(step)
        try:
            second = self._ask(state)
        except NotFiniteError as error:
            return Figures(failure=error.what)
        try:
            return figures_of(first, second)
        except InputError as error:
            return Figures(failure=str(error))

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

    def _ask(self, state: Mapping[str, Tensor] | Checkpoint) -> Evaluation:
        with self._borrowed() as evaluator:
            found = evaluator.evaluate(state)
            self.seconds += found.seconds
            return found

    @contextmanager
    def _borrowed(self) -> Iterator[Evaluator]:
        """Take an evaluator that is free: each is for one thread at a time."""
        evaluator = self._free.get()
        try:
            yield evaluator
        finally:
            self._free.put(evaluator)


def evaluator_digest(evaluator: Evaluator) -> str:
    """Return 16 hexadecimal digits over an evaluator's source, function, metric and direction.

    Data that it reads is not part of it: who changes those wants a new trial log.
    """
    file, _, function = evaluator.spec.rpartition(":")
    total = hashlib.sha256(Path(file).read_bytes())
    total.update(f"\0{function}\0{evaluator.metric}\0{evaluator.direction}".encode())
    return total.hexdigest()[:16]
