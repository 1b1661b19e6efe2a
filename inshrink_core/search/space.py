"""Configurations as points: cubes of settings ordered from fine to coarse, and lines of one number."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from inshrink_core.chain import ChainConfig, parse_overrides
from inshrink_core.chain.config import apply_settings
from inshrink_core.checkpoint import LayerType
from inshrink_core.codec import DEFAULT_CODEC, Knob, Switch, Tuning, codec_names, get_codec
from inshrink_core.errors import ConfigError

__all__ = ["Candidate", "Cube", "CubePoint", "LatticeLine", "space_of"]

# Of the error, between the finest and the coarsest point of a cube: seven bits, as the bits of codecs have
# them.
_LOG_SPAN: Final = 7 * math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration to try: what it sets beside what all candidates have in common.

    Parameters
    ----------
    codec
        Name of the codec.
    settings
        Settings of the codec.
    overrides
        Settings for some of the tensors, as tables (`inshrink_core.chain.Override`).
    """

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Mapping[str, Any], ...] = ()

    def document(self) -> dict[str, Any]:
        """Return what a config file would say: ``codec``, ``settings`` and, where there are, ``override``."""
        document: dict[str, Any] = {"codec": self.codec, "settings": dict(self.settings)}
        return document | ({"override": [dict(one) for one in self.overrides]} if self.overrides else {})

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell configurations apart."""
        text = json.dumps(self.document(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def chain_config(self, base: ChainConfig) -> ChainConfig:
        """Return how the chain is written with these settings on top of its own.

        Overrides that the base has for other settings stay; those of the candidate come after them.
        """
        config = apply_settings(base.config, self.settings)
        own = parse_overrides(list(self.overrides), config)
        return replace(base, config=config, overrides=(*base.overrides, *own))


class CubePoint(NamedTuple):
    """A place on every axis of a cube, 0 the finest, and the word of its switch (empty without one)."""

    place: tuple[int, ...]
    word: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """A grid of configurations; along every axis, coarser is smaller and, as a rule, worse.

    Parameters
    ----------
    codec
        Name of the codec.
    axes
        What is turned.
    switch
        A setting without order; None for none.
    held
        Settings of every point.
    """

    codec: str
    axes: tuple[Knob, ...]
    switch: Switch | None = None
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def idle_at(self) -> int:
        """The axis whose finest value makes the switch irrelevant."""
        return self.switch.idle_at if self.switch else 0

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the switch; one empty word without a switch."""
        return self.switch.words if self.switch else ("",)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each axis."""
        return tuple(len(axis.values) for axis in self.axes)

    def point(self, place: Sequence[int], word: str = "") -> CubePoint:
        """Return a point, one and the same for places whose switch changes nothing."""
        idle = self.switch is not None and place[self.idle_at] == 0
        return CubePoint(tuple(place), self.words[0] if idle or not word else word)

    def places(self) -> Iterator[tuple[int, ...]]:
        """Yield every place, the finest first."""
        return itertools.product(*(range(n) for n in self.shape))

    def points(self) -> tuple[CubePoint, ...]:
        """Return every point that differs from all others."""
        return tuple(dict.fromkeys(self.point(p, word) for word in self.words for p in self.places()))

    def candidate(self, point: CubePoint) -> Candidate:
        """Return the configuration of a point."""
        settings = dict(self.held)
        for axis, at in zip(self.axes, point.place, strict=True):
            settings |= dict.fromkeys(axis.settings, axis.values[at])
        if self.switch is not None:
            settings[self.switch.setting] = point.word or self.words[0]
        return Candidate(codec=self.codec, settings=settings)

    def log_coarseness(self, point: CubePoint) -> float:
        """Return about the logarithm of the error of a place, but for a constant."""
        ends = [max(1, size - 1) for size in self.shape]
        return _LOG_SPAN * math.fsum(map(operator.truediv, point.place, ends)) / len(ends)

    def levels(self, most: int) -> list[Candidate]:
        """Return at most so many configurations, from fine to coarse: all axes are turned at once."""
        n = min(most, max(self.shape))
        ends = [size - 1 for size in self.shape]
        places = [tuple(round(i * end / max(1, n - 1)) for end in ends) for i in range(n)]
        return [self.candidate(self.point(place)) for place in dict.fromkeys(places)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatticeLine:
    """One number that says how coarse all tensors are, times a factor for each layer type.

    Parameters
    ----------
    codec, knob
        Name of the codec, and the number.
    held
        Settings of every point.
    factors
        Factor of the number by layer type; 1 where a type is absent.
    """

    codec: str = DEFAULT_CODEC
    knob: Knob = field(default_factory=lambda: _tuning(DEFAULT_CODEC).knob)
    held: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def points(self) -> tuple[float, ...]:
        """Return half octaves from very fine to very coarse, for searches that take all or any."""
        low, high = (round(2 * math.log2(end)) for end in self.knob.within or (1.0, 1.0))
        return tuple(three_digits(2.0 ** (half / 2)) for half in range(low, high + 1))

    def candidate(self, coarseness: float) -> Candidate:
        """Return the configuration at a value of the number."""
        overrides = tuple(
            {"layer_type": str(layer), **self._at(coarseness * factor)}
            for layer, factor in sorted(self.factors.items())
            if factor != 1
        )
        return Candidate(
            codec=self.codec, settings={**self.held, **self._at(coarseness)}, overrides=overrides
        )

    def log_coarseness(self, point: float) -> float:
        """Return about the logarithm of the error at a value of the number, but for a constant."""
        return math.log(point)

    def levels(self, most: int) -> list[Candidate]:
        """Return at most so many configurations, from fine to coarse.

        They lie in the middle of the line: its ends are there for searches alone.
        """
        points = self.points()
        first, last = len(points) // 4, len(points) - 1 - len(points) // 6
        n = min(most, last - first + 1)
        return [self.candidate(points[round(first + i * (last - first) / max(1, n - 1))]) for i in range(n)]

    def _at(self, value: float) -> dict[str, float]:
        return dict.fromkeys(self.knob.settings, three_digits(value))


def three_digits(value: float) -> float:
    """Return a number to three digits: finer differences are not worth a measurement."""
    return float(f"{value:.3g}")


def space_of(codec: str, layers: frozenset[LayerType | None]) -> Cube | LatticeLine:
    """Return what can be searched of a codec on a run with these layer types.

    Raises
    ------
    ConfigError
        The codec has no setting that trades size for fidelity.

    Examples
    --------
    >>> len(list(space_of("inshrinkerator", frozenset()).places())) * 2
    216
    """
    tuning = _tuning(codec)
    if tuning.knob.within is not None:
        return LatticeLine(codec=codec, knob=tuning.knob, held=tuning.beside)
    return Cube(codec=codec, axes=tuning.searched(layers), switch=tuning.switch, held=tuning.beside)


def _tuning(codec: str) -> Tuning:
    """Return how a codec is searched; an error names those that can be."""
    tuning = get_codec(codec).tuning
    if tuning is None:
        known = [name for name in codec_names() if get_codec(name).tuning is not None]
        raise ConfigError(
            f"the codec '{codec}' has nothing to search", remedy=f"choose one of {', '.join(known)}"
        )
    return tuning
