"""The ratio of a codec at a divergence that none of its settings hits exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (divergence, ratio) points that no other beats in both, by rising divergence.

    Examples
    --------
    >>> frontier([(0.02, 30.0), (0.01, 20.0), (0.03, 25.0)])
    [(0.01, 20.0), (0.02, 30.0)]
    """
    best: list[tuple[float, float]] = []
    for divergence, ratio in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or ratio > best[-1][1]:
            best.append((divergence, ratio))
    return best


def ratio_at(points: Iterable[tuple[float, float]], divergence: float) -> float | None:
    """Return the ratio at a divergence, from measured (divergence, ratio) points.

    Interpolates on the frontier, linearly in the logarithms: a rate against a distortion is close to a
    straight line there. Nothing is extrapolated: None outside of what was measured, and where a point
    has no divergence.

    Examples
    --------
    >>> ratio_at([(0.01, 20.0), (0.04, 40.0)], 0.02)
    28.28
    >>> ratio_at([(0.01, 20.0), (0.04, 40.0)], 0.05) is None
    True
    """
    known = frontier((d, r) for d, r in points if d > 0 and r > 0)
    for (d0, r0), (d1, r1) in pairwise(known):
        if d0 <= divergence <= d1:
            share = math.log(divergence / d0) / math.log(d1 / d0)
            return round(r0 * (r1 / r0) ** share, 2)
    return known[0][1] if known and known[0][0] == divergence else None


def ratio_at_excess(points: Iterable[tuple[float, float]], excess: float) -> float | None:
    """Return the ratio at a mean excess, which may be negative: linear in it, logarithmic in the ratio.

    Examples
    --------
    >>> ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001)
    20.0
    """
    for (e0, r0), (e1, r1) in pairwise(frontier(points)):
        if e0 <= excess <= e1:
            return round(float(r0 * (r1 / r0) ** ((excess - e0) / (e1 - e0))), 2)
    return None
