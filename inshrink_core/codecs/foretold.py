"""What a delta takes, foretold: whether a matrix is better rounded plainly, or shaped, and how strongly.

Shaped rounding costs less at the same spacing, so that the spacing may be coarser. But a weight that moves
by a spacing changes what is fed to those after it, so that they move more often. No tensor is looked at:
two numbers of its factors, and how far weights move, tell both.
"""

from __future__ import annotations

import bisect
import functools
import math
from statistics import NormalDist
from typing import Final

_N_SIZES: Final = 16
_SIZES: Final = tuple(NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * _N_SIZES)) for i in range(_N_SIZES))
"""Of movements, in root mean squares: the middles of as many equal parts of a normal distribution."""

_SPREADS: Final[tuple[float, ...]] = (0.0, *(2.0 ** (j / 8) for j in range(-80, 41)))
"""Root mean squares, in spacings, that are tabled; in between lines are drawn."""

_DIGITS: Final = 9
"""Decimal digits of a table, so that no last bit of a logarithm decides."""

_ROUNDS: Final = 8
"""Steps of the iteration at most: each leaves at most about half of what is missing."""

_CLOSE: Final = 1e-6
"""Share of a spread that a step has to change for another one."""


def _rounded(spread: float) -> tuple[float, float]:
    """Return bits, and the mean squared change of an error over its variance, which is 2 for a new one.

    An average over where in its cell a value lies: one that moves by a of a spacing crosses with a chance a.
    """
    chances: dict[int, float] = {}
    change = 0.0
    for size in _SIZES:
        whole, rest = divmod(spread * size, 1.0)
        change += 12 * rest * (1 - rest) / _N_SIZES
        for number, chance in ((int(whole), 1 - rest), (int(whole) + 1, rest)):
            chances[number] = chances.get(number, 0.0) + chance / _N_SIZES
    # Both signs are as likely.
    bits = math.fsum(-p * math.log2(p / 2 if number else p) for number, p in chances.items() if p > 0)
    return round(bits, _DIGITS), round(change, _DIGITS)


_TABLE: Final = ((0.0, 0.0), *map(_rounded, _SPREADS[1:]))
_BITS: Final = tuple(bits for bits, _ in _TABLE)
_CHANGES: Final = tuple(change for _, change in _TABLE)


def _at(table: tuple[float, ...], spread: float) -> float:
    """Return what a table has for a spread; its last entry beyond."""
    i = bisect.bisect_right(_SPREADS, spread)
    if i == len(_SPREADS):
        return table[-1]
    below, last = _SPREADS[i - 1], table[i - 1]
    return last + (table[i] - last) * (spread - below) / (_SPREADS[i] - below)


@functools.lru_cache(maxsize=1 << 14)
def bits_of(movement: float, variance: float) -> float:
    """Return the bits a weight of a delta, without contexts.

    Parameters
    ----------
    movement
        Root mean square of how far weights move, in spacings.
    variance
        Of errors over that of plain rounding (`inshrink_core.ops.shaping.Factors`), at least 1.

    Notes
    -----
    What is fed to a weight is a sum of other weights' rounding errors, its variance (variance - 1)/12; from
    one frame to the next it changes by the same sum of their changes. So the variance of what a weight is
    seen to move by is that of its movement and ``(variance - 1)/12`` times the change of errors, which
    depends on it: the largest solution, by iteration from above. Single operations and square roots of
    float64 alone: the same everywhere.

    Examples
    --------
    >>> bits_of(0.1, 1.0) < bits_of(0.1, 1.2) < bits_of(0.3, 1.2)
    True
    """
    fed = (variance - 1.0) / 12.0
    spread = math.sqrt(movement * movement + 2.0 * fed)
    for _ in range(_ROUNDS if fed > 0 else 0):
        before, spread = spread, math.sqrt(movement * movement + fed * _at(_CHANGES, spread))
        if before - spread <= _CLOSE * before:
            break
    return _at(_BITS, spread)
