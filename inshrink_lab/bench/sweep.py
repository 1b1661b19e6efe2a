"""The order in which a bench measures the values of a codec's knob."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from inshrink_core.codec import Knob
from inshrink_core.search.strategies import Outcome, Proposals

# Values in a row that keep no bound, after which a sweep ends. One is not enough, because the drop of a
# metric does not rise evenly.
_PATIENCE: Final = 2


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every value of a knob from fine to coarse, then closer to each of several bounds.

    Parameters
    ----------
    knob
        What is turned; None where there is one point alone.
    holds
        A function for each bound, which says whether an outcome keeps it.
    refine
        For each bound, how often the gap between the best value that keeps it and the next coarser one
        is halved.
    """

    knob: Knob | None
    holds: Sequence[Callable[[Outcome[float | None]], bool]]
    refine: int

    def proposals(self) -> Proposals[float | None]:
        """Ask for one value at a time; coarser ones than two in a row that keep no bound are left out."""
        if self.knob is None:
            yield [None]
            return
        found: dict[float, Outcome[float | None]] = {}
        misses = 0
        for value in self.knob.values:
            (found[value],) = yield [value]
            misses = 0 if found[value].kept else misses + 1
            if misses == _PATIENCE:
                break
        for holds in self.holds:
            for _ in range(self.refine):
                keeping = {value: one.ratio for value, one in found.items() if holds(one)}
                best = max(keeping, key=keeping.__getitem__, default=None)
                coarser = [value for value in found if best is not None and self.knob.is_coarser(value, best)]
                if best is None or not coarser:
                    break
                middle = self.knob.between(best, min(coarser, key=partial(_distance, best)))
                if middle in found:
                    break
                (found[middle],) = yield [middle]


def _distance(one: float, other: float) -> float:
    return abs(one - other)
