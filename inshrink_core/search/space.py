"""Configurations as points: cubes of settings ordered from fine to coarse, and lines of one number."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from inshrink_core.chain import ChainConfig, parse_overrides
from inshrink_core.chain.config import apply_settings
from inshrink_core.checkpoint import LayerType
from inshrink_core.codec import AnyCodec, Knob, Switch, codec_names, get_codec
from inshrink_core.errors import ConfigError


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


Point = TypeVar("Point", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(ABC, Generic[Point]):
    """The configurations of a codec that a search chooses between, as points from fine to coarse.

    Parameters
    ----------
    codec
        Name of the codec.
    held
        Settings of every point.
    """

    codec: str
    held: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def points(self) -> tuple[Point, ...]:
        """Return every point that differs from all others, for searches that take all or any."""

    @abstractmethod
    def candidate(self, point: Point) -> Candidate:
        """Return the configuration of a point."""

    @abstractmethod
    def point_of(self, config: AnyCodec) -> Point | None:
        """Return the point of a configuration; None where it has none."""

    @abstractmethod
    def levels(self, most: int) -> list[Candidate]:
        """Return at most so many configurations, from fine to coarse."""


class CubePoint(NamedTuple):
    """A place on every axis of a cube, 0 the finest, and the word of its switch (empty without one)."""

    place: tuple[int, ...]
    word: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube(Space[CubePoint]):
    """A grid of configurations; along every axis, coarser is smaller and, as a rule, worse.

    Parameters
    ----------
    axes
        What is turned.
    switch
        A setting without order; None for none.
    """

    axes: tuple[Knob, ...]
    switch: Switch | None = None

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

    def is_finer(self, one: CubePoint, other: CubePoint) -> bool:
        """Whether a point is at least as fine as another on every axis, under the same word of the switch."""
        alike = one.word == other.word or one.place[self.idle_at] == 0
        return alike and all(map(operator.le, one.place, other.place))

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

    def point_of(self, config: AnyCodec) -> CubePoint | None:
        """Return the point of a configuration; None where it is none of the cube's."""
        values = [getattr(config, axis.settings[0], None) for axis in self.axes]
        if any(value not in axis.values for axis, value in zip(self.axes, values, strict=True)):
            return None
        word = str(getattr(config, self.switch[0])) if self.switch is not None else ""
        return self.point([axis.values.index(v) for axis, v in zip(self.axes, values, strict=True)], word)

    def levels(self, most: int) -> list[Candidate]:
        """Return at most so many configurations, from fine to coarse: all axes are turned at once."""
        n = min(most, max(self.shape))
        ends = [size - 1 for size in self.shape]
        places = [tuple(round(i * end / max(1, n - 1)) for end in ends) for i in range(n)]
        return [self.candidate(self.point(place)) for place in dict.fromkeys(places)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Space[float]):
    """One number that says how coarse all tensors are, times a factor for each layer type.

    Parameters
    ----------
    knob
        The number, of which every value between two ends is worth searching.
    factors
        Factor of the number by layer type; 1 where a type is absent.
    """

    knob: Knob
    factors: Mapping[str, float] = field(default_factory=dict)

    def points(self) -> tuple[float, ...]:
        """Return half octaves from very fine to very coarse, for searches that take all or any."""
        low, high = (round(2 * math.log2(end)) for end in self.knob.within or (1.0, 1.0))
        return tuple(three_digits(2.0 ** (half / 2)) for half in range(low, high + 1))

    def candidate(self, point: float) -> Candidate:
        """Return the configuration at a value of the number."""
        overrides = tuple(
            {"layer_type": str(layer), **self._at(point * factor)}
            for layer, factor in sorted(self.factors.items())
            if factor != 1
        )
        return Candidate(codec=self.codec, settings={**self.held, **self._at(point)}, overrides=overrides)

    def point_of(self, config: AnyCodec) -> float:
        """Return the number as a configuration has it."""
        return three_digits((config.tuning and config.tuning.value(config)) or 1.0)

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


def space_of(
    codec: str, layers: Iterable[LayerType | None] = (), factors: Mapping[str, float] | None = None
) -> Cube | Line:
    """Return what can be searched of a codec, as its own tuning says.

    Parameters
    ----------
    codec
        Its name.
    layers
        The layer types of the run.
    factors
        Factors of a continuous knob by layer type.

    Raises
    ------
    ConfigError
        The codec has no setting that trades size for fidelity.

    Examples
    --------
    >>> len(list(space_of("inshrinkerator").places())) * 2
    216
    """
    tuning = get_codec(codec).tuning
    if tuning is None:
        known = [name for name in codec_names() if get_codec(name).tuning is not None]
        raise ConfigError(
            f"the codec '{codec}' has nothing to search", remedy=f"choose one of {', '.join(known)}"
        )
    if tuning.knob.within is not None:
        return Line(codec=codec, knob=tuning.knob, held=tuning.beside, factors=factors or {})
    axes = tuning.searched(frozenset(layers))
    return Cube(codec=codec, axes=axes, switch=tuning.switch, held=tuning.beside)
