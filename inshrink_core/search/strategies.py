"""How configurations are proposed: one small protocol, and the loop that measures what is proposed.

A strategy is a generator: it yields a batch of points and is sent their outcomes, in order, until it
has no more to ask. It neither measures nor keeps anything, so it is deterministic, can be given up at
any time, and goes on after an interruption by being told again what was measured already.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["Explored", "Outcome", "Proposals", "Strategy", "explore"]

Point = TypeVar("Point", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Point]):
    """What measuring a point gave.

    Parameters
    ----------
    point
        What was measured.
    kept
        Whether it keeps the bounds.
    ratio
        Its compression ratio: what is to be large.
    usage
        Largest figure as a share of its limit (`inshrink_core.search.bounds.Verdict`).
    """

    point: Point
    kept: bool
    ratio: float
    usage: float


Proposals = Generator[Sequence[Point], Sequence[Outcome[Point]], None]
"""Yields points to measure, all independent of each other; is sent an outcome for each."""


class Strategy(Protocol[Point]):
    """An order in which points are measured."""

    def proposals(self) -> Proposals[Point]:
        """Return a fresh generator; the same answers lead to the same questions."""
        ...


@dataclass(frozen=True, slots=True)
class Explored(Generic[Point]):
    """Everything measured, in order, and the best of it."""

    outcomes: tuple[Outcome[Point], ...]

    @property
    def best(self) -> Outcome[Point] | None:
        """The largest ratio that keeps the bounds; None where none does."""
        return max((one for one in self.outcomes if one.kept), key=lambda one: one.ratio, default=None)


def explore(
    strategy: Strategy[Point],
    measure: Callable[[Sequence[Point]], Sequence[Outcome[Point]]],
    *,
    budget: int | None = None,
    known: Sequence[Outcome[Point]] = (),
) -> Explored[Point]:
    """Measure what a strategy asks for, each point once.

    Parameters
    ----------
    strategy
        What to ask.
    measure
        Returns the outcome of every point of a batch; may measure them side by side.
    budget
        Most points measured; None: as many as the strategy wants.
    known
        Outcomes there are already; they cost nothing.

    Returns
    -------
    Explored
        `known` is part of it.
    """
    outcomes: dict[Point, Outcome[Point]] = {one.point: one for one in known}
    n_measured = 0
    proposals = strategy.proposals()
    try:
        batch = next(proposals)
        while True:
            fresh = [point for point in dict.fromkeys(batch) if point not in outcomes]
            allowed = fresh if budget is None else fresh[: max(0, budget - n_measured)]
            outcomes |= {one.point: one for one in (measure(allowed) if allowed else ())}
            n_measured += len(allowed)
            if len(allowed) < len(fresh):
                break
            batch = proposals.send([outcomes[point] for point in batch])
    except StopIteration:
        pass
    finally:
        proposals.close()
    return Explored(tuple(outcomes.values()))
