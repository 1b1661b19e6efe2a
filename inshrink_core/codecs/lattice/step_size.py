"""Step sizes of uniform lattices: their choice, and their representation by powers of two.

The encoder chooses step sizes and writes them into the bitstream. Means are computed from sums of integers,
so that a step size does not depend on the device or the order of summation.
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
"""Range of the unit's exponent: the unit is not subnormal, and 2**24 units are a finite float32."""

MAX_UNITS = 1 << 24
"""Most units in a step size; 64 step sizes of them fit 32 bits."""

_MAX_INTEGER = (1 << 24) - 1
"""Largest abs(N): up to it, an integer N times a power of two is a float32 number."""

_FLOAT16_MAX = 65504

_UNITS_LOG2 = 8
"""A chain starts with a step size of at least 2**8 units, so that it can be halved eight times."""

_ROOM_LOG2 = 6
"""The unit is also below 2**-14 of the root mean square, so that step sizes may become finer."""

_SIGNIFICANT_BITS = 8
"""Significant bits of a step size: the rounding error is at most 0.2 %, and it can be halved."""

_HOLD_OCTAVES = 0.75
"""Distance in octaves at which a held step size changes: half an octave plus hysteresis."""

_FACTOR_BOUND = 1e4
"""Largest ratio of sensitivities; tensors beyond it are practically dead or exploding."""


_OF_EXPONENTS = np.ldexp(1.0, np.maximum(np.arange(257), 1) - 150)
"""Value of the last bit of a float32 number, by its exponent bits."""


class StepSize(NamedTuple):
    """A step size of ``units * 2**exponent``."""

    exponent: int
    units: int

    @property
    def width(self) -> float:
        """The step size as a number."""
        return math.ldexp(self.units, self.exponent)


def exact_mean(sums: NDArray[np.int64], n: int) -> float:
    """Return the mean of `n` numbers, exact up to one rounding; NaN if a number is not finite.

    Parameters
    ----------
    sums : (257,)
        Sums of mantissas by exponent (`inshrink_core.ops.sample.sample_sums`).

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.ops.sample import sample_sums
    >>> exact_mean(sample_sums(torch.tensor([1.0, 2.0, 4.0]))[0], 3)
    7.0
    """
    if sums[256] > 0:
        return math.nan
    there = sums.nonzero()[0]
    # Sums of 2**14 mantissas are exact in float64, also after scaling by powers of two.
    return math.fsum((sums[there] * _OF_EXPONENTS[there]).tolist()) / max(n, 1)


def geometric_mean(means: Sequence[float]) -> float:
    """Return the geometric mean of the positive numbers; 0 if there are none."""
    positive = [m for m in means if m > 0]
    return math.exp(math.fsum(map(math.log, positive)) / len(positive)) if positive else 0.0


def sensitivity_factor(mean: float, middle: float, power: float) -> float:
    """Return the factor of a tensor's step size for its mean squared gradient: (middle / mean)**power.

    Parameters
    ----------
    mean
        Mean second moment of the tensor (or another proxy of its squared gradients).
    middle
        Geometric mean over all tensors, which has factor 1.
    power
        Exponent. Curvature proportional to squared gradients would give 1/2; a quarter damps this.

    Examples
    --------
    >>> sensitivity_factor(16.0, geometric_mean([1.0, 1.0, 16.0, 0.0625]), 0.25)
    0.5
    """
    if not middle > 0 or not mean > 0:
        return 1.0
    ratio = min(max(middle / mean, 1 / _FACTOR_BOUND), _FACTOR_BOUND)
    return float(ratio**power)


def step_size_of(width: float, exponent: int) -> StepSize:
    """Return the nearest step size to `width` with eight significant bits, in units of 2**exponent."""
    units = math.ldexp(width, -exponent)
    spare = max(0, math.frexp(units)[1] - _SIGNIFICANT_BITS)
    return StepSize(exponent, min(max(round(math.ldexp(units, -spare)) << spare, 1), MAX_UNITS))


def new_step_size(width: float, rms: float) -> StepSize | None:
    """Return the step size that a chain starts with; None if no unit suits both numbers."""
    if not (math.isfinite(width) and math.isfinite(rms) and width > 0):
        return None
    finest = min(width, math.ldexp(rms, -_ROOM_LOG2)) if rms > 0 else width
    if finest < math.ldexp(1.0, MIN_EXPONENT + _UNITS_LOG2) or width > math.ldexp(1.0, MAX_EXPONENT):
        return None
    return step_size_of(width, max(math.frexp(finest)[1] - 1 - _UNITS_LOG2, MIN_EXPONENT))


def steady_width(width: float, before: StepSize, most: float = math.inf) -> float:
    """Return ``before * 2**s`` with ``s = round(log2(width / before))``, or 0 nearby; at most `most`.

    A slowly shrinking step size would leave residuals at the edges of cells, which flip in every frame.

    Examples
    --------
    >>> [steady_width(width, StepSize(0, 1)) for width in (1.5, 1.8, 9.0)]
    [1.0, 2.0, 8.0]
    >>> steady_width(1.5, StepSize(0, 2), most=1.5)
    1.0
    """
    octaves = math.log2(width / before.width)
    shift = round(octaves) if abs(octaves) > _HOLD_OCTAVES else 0
    return math.ldexp(before.width, math.floor(min(shift, math.log2(most / before.width))))


def lattice_of(step_size: StepSize, dtype: str) -> Lattice:
    """Return the kernels' parameters: unit, step size, float32 reciprocal, and bound of the integers.

    The bound makes values finite in the stored dtype; bfloat16 has the range of float32.
    """
    bound = _MAX_INTEGER
    if dtype == "float16":
        bound = min(bound, int(math.ldexp(_FLOAT16_MAX, -step_size.exponent)))
    reciprocal = float(np.float32(1.0 / step_size.width))
    return Lattice(math.ldexp(1.0, step_size.exponent), step_size.units, reciprocal, bound)


_CODES_PER_OCTAVE: Final = 256
"""Codes for each octave; neighbouring codes change a step size by about a thousandth."""


def codes_of(squares: Mapping[str, float], middle: float) -> dict[str, int]:
    """Return log2 of positive numbers over a middle one in 256ths, as remembered for each tensor.

    Examples
    --------
    >>> codes_of({"fc.weight": 2.0, "conv.weight": 0.5}, 1.0)
    {'fc.weight': 256, 'conv.weight': -256}
    """
    return {key: round(_CODES_PER_OCTAVE * math.log2(square / middle)) for key, square in squares.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The part of the encoder state that a frame stores for the next frame of its chain.

    Parameters
    ----------
    movement
        Root mean square of the weights' movement between frames; 0 if not known yet.
    rate
        Learning rate during that movement; 0 if not known.
    settled
        Values settled for the whole chain, by tensor key: `codes_of` mean squared gradients, or 0 for a
        running statistic that is known to move.
    apart
        `codes_of` the mean squared movements of tensors that move far less than others, by tensor key.
    probes
        Original values by tensor key, from which a movement is still to be measured.

    Examples
    --------
    >>> Memory.parse({"movement": "damaged"}).movement
    0.0
    >>> Memory.parse(None).settled
    {}
    """

    movement: float = 0.0
    rate: float = 0.0
    settled: Mapping[str, int] = field(default_factory=dict)
    apart: Mapping[str, int] = field(default_factory=dict)
    probes: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Parse msgpack values, ignoring malformed ones; a value that is not a map is a new chain's."""
        if not isinstance(values, dict):
            return cls()
        return cls(
            movement=positive(values.get("movement")),
            rate=positive(values.get("rate")),
            settled=_entries(values.get("held"), int),
            apart=_entries(values.get("apart"), int),
            probes=_entries(values.get("probes"), bytes),
        )

    def to_values(self) -> dict[str, Any]:
        """Return msgpack values."""
        values: dict[str, Any] = {"held": dict(self.settled)}
        if self.movement:
            values |= {"movement": self.movement, "rate": self.rate}
        maps = {"apart": self.apart, "probes": self.probes}
        return values | {name: dict(entries) for name, entries in maps.items() if entries}

    def ratio(self, key: str) -> float | None:
        """Return a tensor's settled mean squared gradient over the middle one; None if not settled."""
        return _ratio_of(self.settled.get(key))

    def movement_ratio(self, key: str) -> float | None:
        """Return a tensor's mean squared movement over the common one; None if it is not far less."""
        return _ratio_of(self.apart.get(key))


def _ratio_of(code: int | None) -> float | None:
    if code is None:
        return None
    return float(2.0 ** min(max(code / _CODES_PER_OCTAVE, -_MAX_OCTAVES), _MAX_OCTAVES))


_MAX_OCTAVES: Final = 128
"""Largest log2 of a ratio; means of float32 numbers never exceed it, but damaged archives may."""


def _entries(values: Any, kind: type) -> dict[str, Any]:
    """Return the map's entries of a given type; empty if the value is not a map."""
    if not isinstance(values, dict):
        return {}
    return {key: entry for key, entry in values.items() if isinstance(key, str) and type(entry) is kind}


def positive(value: Any) -> float:
    """Return a positive finite number; 0 for any other value."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return 0.0
