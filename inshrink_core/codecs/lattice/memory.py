"""What a chain remembers for the spacings of later frames; a frame's header has it where it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

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
    held
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
    >>> Memory.parse(None).held
    {}
    """

    movement: float = 0.0
    rate: float = 0.0
    coarseness: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict)
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
            held=_entries(values.get("held"), int),
            apart=_entries(values.get("apart"), int),
            probes=_entries(values.get("probes"), bytes),
        )

    def to_values(self) -> dict[str, Any]:
        """Return msgpack values."""
        values: dict[str, Any] = {"held": dict(self.held)}
        if self.movement:
            values |= {"movement": self.movement, "rate": self.rate}
        if self.coarseness:
            values["coarseness"] = self.coarseness
        maps = {"apart": self.apart, "probes": self.probes}
        return values | {name: dict(entries) for name, entries in maps.items() if entries}

    def ratio(self, key: str) -> float | None:
        """Return the mean squared gradient held of a tensor, over that of all; None for nothing."""
        return _ratio_of(self.held.get(key))

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
    return {key: one for key, one in values.items() if isinstance(key, str) and type(one) is kind}


def positive(value: Any) -> float:
    """Return a positive finite number, or 0 for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return 0.0
