"""The order in which configurations of one codec are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inshrink_core.bench.points import Point
from inshrink_core.bench.rows import Bound, choose_row
from inshrink_core.bench.variants import Variant
from inshrink_core.codec import Knob

__all__ = ["sweep"]

_PATIENCE = 2
"""Values in a row that keep no bound, after which coarser ones are not tried. One is not enough, because
the drop of a metric does not rise evenly."""


def sweep(
    variant: Variant, bounds: Sequence[Bound], measure: Callable[[float | None], Point], refine: int
) -> list[Point]:
    """Measure a codec over its knob, then closer to each bound.

    Parameters
    ----------
    variant
        The codec and what of it is held.
    bounds
        What is asked for.
    measure
        Returns the point at a value of the knob; None where nothing is swept.
    refine
        For each bound, how often the gap between the best value that keeps it and the next coarser one
        is halved.

    Returns
    -------
    list of Point
        Every point measured, from the most faithful to the smallest.
    """
    knob = variant.knob
    if knob is None:
        return [measure(None)]
    points: dict[float, Point] = {}
    misses = 0
    for value in knob.values:
        points[value] = measure(value)
        misses = 0 if any(bound.holds(points[value]) for bound in bounds) else misses + 1
        if misses == _PATIENCE:
            break
    for bound in bounds:
        for _ in range(refine):
            value_between = _halfway(knob, points, bound)
            if value_between is None:
                break
            points[value_between] = measure(value_between)
    ordered = sorted(points, reverse=knob.values[0] > knob.values[-1])
    return [points[value] for value in ordered]


def _halfway(knob: Knob, points: dict[float, Point], bound: Bound) -> float | None:
    """Return the value to try next for a bound; None where none lies between."""
    row = choose_row("", list(points.values()), bound)
    if not row.kept:
        return None
    best = next(value for value, point in points.items() if point is row.point)
    coarser = [value for value in points if knob.is_coarser(value, best)]
    if not coarser:
        return None
    middle = knob.between(best, min(coarser, key=lambda value: abs(value - best)))
    return None if middle in points else middle
