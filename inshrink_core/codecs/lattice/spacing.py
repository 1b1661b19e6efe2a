"""Uniform lattices: how coarse a tensor's may be, and the powers of two it is made of.

Everything here chooses; what was chosen is in the bitstream. Means are sums of integers, so that a spacing
does not depend on the device or on the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from inshrink_core.ops.lattice import Lattice

if TYPE_CHECKING:
    from numpy.typing import NDArray


MIN_EXPONENT, MAX_EXPONENT = -126, 103
"""Of the unit: the unit is no subnormal, and 2**24 of them are a finite float32."""

MAX_UNITS = 1 << 24
"""Units in a spacing; 64 spacings of them fit 32 bits."""

_MAX_INTEGER = (1 << 24) - 1
"""Largest abs(N): integers to here times a power of two are float32 numbers."""

_FLOAT16_MAX = 65504

_UNITS_LOG2 = 8
"""A spacing has at least 2**8 units when a chain begins, so that it can be halved eight times."""

_ROOM_LOG2 = 6
"""The unit is also below 2**-14 of the root mean square: spacings may become finer than the first one."""

_SIGNIFICANT_BITS = 8
"""Significant bits of a spacing: within .2 % of what was asked, and it can be halved."""

_HOLD_OCTAVES = 0.75
"""A held spacing changes where the rule is further from it than this: half an octave and some hysteresis."""

_FACTOR_BOUND = 1e4
"""Sensitivities further apart than this are as good as dead or exploding tensors."""


_OF_EXPONENTS = np.ldexp(1.0, np.maximum(np.arange(257), 1) - 150)
"""What the last bit of a float32 number is worth, by its exponent's bits."""


class Spacing(NamedTuple):
    """A spacing of ``units * 2**exponent``."""

    exponent: int
    units: int

    @property
    def width(self) -> float:
        """The spacing as a number."""
        return math.ldexp(self.units, self.exponent)


def exact_mean(sums: NDArray[np.int64], n: int) -> float:
    """Return the mean of `n` numbers, exact but for one rounding; NaN if one of them is not finite.

    Parameters
    ----------
    sums : (257,)
        Their mantissas by exponent (`inshrink_core.ops.sample.sample_sums`).

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.ops.sample import sample_sums
    >>> seen = sample_sums(torch.tensor([1.0, 2.0, 4.0]), None, None, 1.0, np.zeros(0, np.int64))
    >>> exact_mean(seen.sums[0], 3)
    7.0
    """
    if sums[256] > 0:
        return math.nan
    there = sums.nonzero()[0]
    # Sums of 2**14 mantissas are float64 numbers, and so are these times powers of two.
    return math.fsum((sums[there] * _OF_EXPONENTS[there]).tolist()) / max(n, 1)


def geometric_mean(means: Sequence[float]) -> float:
    """Return the geometric mean of the positive numbers; 0 where there is none."""
    positive = [m for m in means if m > 0]
    return math.exp(math.fsum(map(math.log, positive)) / len(positive)) if positive else 0.0


def sensitivity_factor(mean: float, middle: float, power: float) -> float:
    """Return by how much a tensor's spacing differs from the common one for its mean squared gradient.

    Parameters
    ----------
    mean
        Mean second moment of the tensor (or any proxy of its squared gradients).
    middle
        The geometric mean of those of all tensors, which has factor 1.
    power
        A quarter damps the half that curvature in proportion to squared gradients would give.

    Examples
    --------
    >>> sensitivity_factor(16.0, geometric_mean([1.0, 1.0, 16.0, 0.0625]), 0.25)
    0.5
    """
    if not middle > 0 or not mean > 0:
        return 1.0
    ratio = min(max(middle / mean, 1 / _FACTOR_BOUND), _FACTOR_BOUND)
    return float(ratio**power)


def spacing_of(width: float, exponent: int) -> Spacing:
    """Return the spacing next to `width` in units of a given exponent: of eight significant bits."""
    units = math.ldexp(width, -exponent)
    spare = max(0, math.frexp(units)[1] - _SIGNIFICANT_BITS)
    return Spacing(exponent, min(max(round(math.ldexp(units, -spare)) << spare, 1), MAX_UNITS))


def new_spacing(width: float, rms: float) -> Spacing | None:
    """Return the spacing and the unit that a chain begins with; None where no unit suits both numbers."""
    if not (math.isfinite(width) and math.isfinite(rms) and width > 0):
        return None
    finest = min(width, math.ldexp(rms, -_ROOM_LOG2)) if rms > 0 else width
    if finest < math.ldexp(1.0, MIN_EXPONENT + _UNITS_LOG2) or width > math.ldexp(1.0, MAX_EXPONENT):
        return None
    return spacing_of(width, max(math.frexp(finest)[1] - 1 - _UNITS_LOG2, MIN_EXPONENT))


def steady_width(width: float, before: Spacing, most: float = math.inf) -> float:
    """Return `before` times the power of two that the rule's `width` calls for, mostly 1; at most `most`.

    A spacing that shrinks little by little leaves residuals at the edges of cells, which flip every frame.

    Examples
    --------
    >>> [steady_width(width, Spacing(0, 1)) for width in (1.5, 1.8, 9.0)]
    [1.0, 2.0, 8.0]
    >>> steady_width(1.5, Spacing(0, 2), most=1.5)
    1.0
    """
    octaves = math.log2(width / before.width)
    shift = round(octaves) if abs(octaves) > _HOLD_OCTAVES else 0
    return math.ldexp(before.width, math.floor(min(shift, math.log2(most / before.width))))


def lattice_of(spacing: Spacing, dtype: str) -> Lattice:
    """Return what the kernels take: unit, spacing, reciprocal in float32, and the bound of the integers.

    The bound keeps values finite in the stored dtype; bfloat16 reaches as far as float32.
    """
    bound = _MAX_INTEGER
    if dtype == "float16":
        bound = min(bound, int(math.ldexp(_FLOAT16_MAX, -spacing.exponent)))
    reciprocal = float(np.float32(1.0 / spacing.width))
    return Lattice(math.ldexp(1.0, spacing.exponent), spacing.units, reciprocal, bound)


_CODES_PER_OCTAVE: Final = 256
"""From one code to the next a spacing changes by about a thousandth."""


def codes_of(squares: Mapping[str, float], middle: float) -> dict[str, int]:
    """Return what is remembered of tensors: log2 of positive numbers over a middle one, in 256ths.

    Examples
    --------
    >>> codes_of({"fc.weight": 2.0, "conv.weight": 0.5}, 1.0)
    {'fc.weight': 256, 'conv.weight': -256}
    """
    return {key: round(_CODES_PER_OCTAVE * math.log2(square / middle)) for key, square in squares.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the frames of a chain so far leave for the next one.

    Parameters
    ----------
    movement
        How far weights move from one frame to the next, root mean square: 0 while it is not known.
    rate
        The learning rate with which they do; 0 where it is not known.
    coarseness
        What was chosen by the restore cost that is predicted; 0 where nothing was.
    settled
        By tensor key, what was settled for the whole chain (`codes_of` mean squared gradients; 0 for a
        running statistic that is known to move).
    apart
        By tensor key, `codes_of` the mean squared movements of tensors that move far less than the others.
    probes
        Original values by tensor key, where a movement is still to be seen.

    Examples
    --------
    >>> Memory.parse({"movement": "damaged"}).movement
    0.0
    >>> Memory.parse(None).settled
    {}
    """

    movement: float = 0.0
    rate: float = 0.0
    coarseness: float = 0.0
    settled: Mapping[str, int] = field(default_factory=dict)
    apart: Mapping[str, int] = field(default_factory=dict)
    probes: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Read msgpack values, whatever a damaged archive holds; what is no map is a new chain."""
        if not isinstance(values, dict):
            return cls()
        return cls(
            movement=positive(values.get("movement")),
            rate=positive(values.get("rate")),
            coarseness=positive(values.get("coarseness")),
            settled=_entries(values.get("held"), int),
            apart=_entries(values.get("apart"), int),
            probes=_entries(values.get("probes"), bytes),
        )

    def to_values(self) -> dict[str, Any]:
        """Return msgpack values."""
        values: dict[str, Any] = {"held": dict(self.settled)}
        if self.movement:
            values |= {"movement": self.movement, "rate": self.rate}
        if self.coarseness:
            values["coarseness"] = self.coarseness
        maps = {"apart": self.apart, "probes": self.probes}
        return values | {name: dict(entries) for name, entries in maps.items() if entries}

    def ratio(self, key: str) -> float | None:
        """Return the mean squared gradient held of a tensor, over that of all; None for nothing."""
        return _ratio_of(self.settled.get(key))

    def movement_ratio(self, key: str) -> float | None:
        """Return the mean squared movement of a tensor over that of all, where it is far less."""
        return _ratio_of(self.apart.get(key))


def _ratio_of(code: int | None) -> float | None:
    if code is None:
        return None
    return float(2.0 ** min(max(code / _CODES_PER_OCTAVE, -_MAX_OCTAVES), _MAX_OCTAVES))


_MAX_OCTAVES: Final = 128
"""Beyond it lies no mean of float32 numbers, but perhaps what a damaged archive holds."""


def _entries(values: Any, kind: type) -> dict[str, Any]:
    """Return the entries of a map that are of a kind; none where it is no map."""
    if not isinstance(values, dict):
        return {}
    return {key: entry for key, entry in values.items() if isinstance(key, str) and type(entry) is kind}


def positive(value: Any) -> float:
    """Return a positive finite number, or 0 for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return 0.0
