"""Search spaces: cubes of configurations ordered from fine to coarse, and lines of one parameter."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from inshrink_core.chain import ChainConfig
from inshrink_core.chain.config import Override, apply_settings, assignments
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, LayerType
from inshrink_core.codec import AnyCodec, Switch, Tunable, codec_names, get_codec
from inshrink_core.errors import ConfigError

Settings = Mapping[str, Any]
"""The settings of a codec in which a configuration to try differs from others: a candidate."""


def with_settings(
    base: ChainConfig,
    settings: Settings,
    checkpoint: Checkpoint | None = None,
    which: str | None = None,
) -> ChainConfig:
    """Return a chain config with a candidate's settings on top of the base's, whose overrides stay.

    Parameters
    ----------
    base, settings
        The configuration, and the candidate.
    checkpoint, which
        A checkpoint to encode, and the evaluated model as in `Checkpoint.state_dict`. All other models keep
        the settings of the base: a bound limits the error of the evaluated model alone, and a moving average
        may fail at errors that hardly change the model. None applies the candidate to all models.
    """
    config = apply_settings(base.config, settings)
    if checkpoint is None or which is None:
        return replace(base, config=config)
    twins = {} if which else checkpoint.twins
    evaluated = {key for name, key in checkpoint.model_keys(which).items() if name not in twins}
    specs = [spec for spec in base.members(checkpoint.specs) if spec.role in MODEL_ROLES]
    others = assignments(specs, {spec.key: spec.key not in evaluated for spec in specs}, False, ())
    kept = {name: getattr(base.config, name) for name in settings}
    known = {(override.match, override.layer_type) for override in base.overrides}
    added = (Override(**table, settings=kept) for table in others)
    missing = (override for override in added if (override.match, override.layer_type) not in known)
    return replace(base, config=config, overrides=(*missing, *base.overrides))


Point = TypeVar("Point", bound=Hashable)


class CubePoint(NamedTuple):
    """An index on each axis of a cube, 0 the finest, and the value of its switch (empty without a switch)."""

    place: tuple[int, ...]
    word: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube:
    """A grid of configurations. Along each axis, coarser is smaller and usually worse.

    Parameters
    ----------
    axes
        The ordered settings.
    switch
        A setting without an order, or None.
    fixed
        Settings that all points share.
    """

    axes: tuple[Tunable, ...]
    switch: Switch | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """Values of the switch; a single empty word without a switch."""
        return self.switch.words if self.switch else ("",)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each axis."""
        return tuple(len(axis.values) for axis in self.axes)

    def point(self, place: Sequence[int], word: str = "") -> CubePoint:
        """Return a point; places whose switch has no effect share one point."""
        idle = self.switch is not None and place[self.switch.idle_at] == 0
        return CubePoint(tuple(place), self.words[0] if idle or not word else word)

    def is_finer(self, point: CubePoint, other: CubePoint) -> bool:
        """Return whether a point is at least as fine as another on every axis, at the same switch value."""
        alike = point.word == other.word or (
            self.switch is not None and point.place[self.switch.idle_at] == 0
        )
        return alike and all(map(operator.le, point.place, other.place))

    def points(self) -> tuple[CubePoint, ...]:
        """Return all distinct points, the finest first."""
        places = list(itertools.product(*(range(n) for n in self.shape)))
        return tuple(dict.fromkeys(self.point(place, word) for word in self.words for place in places))

    def settings(self, point: CubePoint) -> Settings:
        """Return the settings of a point."""
        settings = dict(self.fixed)
        for axis, at in zip(self.axes, point.place, strict=True):
            settings |= dict.fromkeys(axis.settings, axis.values[at])
        if self.switch is not None:
            settings[self.switch.setting] = point.word or self.words[0]
        return settings

    def point_of(self, config: AnyCodec) -> CubePoint | None:
        """Return the point of a configuration, or None if it is not in the cube."""
        values = [getattr(config, axis.settings[0], None) for axis in self.axes]
        if any(value not in axis.values for axis, value in zip(self.axes, values, strict=True)):
            return None
        word = str(getattr(config, self.switch[0])) if self.switch is not None else ""
        return self.point([axis.values.index(v) for axis, v in zip(self.axes, values, strict=True)], word)

    def levels(self, most: int) -> list[Settings]:
        """Return at most `most` configurations from fine to coarse; all axes change together."""
        n = min(most, max(self.shape))
        ends = [size - 1 for size in self.shape]
        places = [tuple(round(i * end / max(1, n - 1)) for end in ends) for i in range(n)]
        return [self.settings(self.point(place)) for place in dict.fromkeys(places)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number that sets the coarseness of all tensors; a search may use any value.

    Parameters
    ----------
    tunable
        The tunable parameter.
    fixed
        Settings that all points share.
    """

    tunable: Tunable
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, point: float) -> Settings:
        """Return the settings at a value of the parameter."""
        return {**self.fixed, **dict.fromkeys(self.tunable.settings, three_digits(point))}

    def point_of(self, config: AnyCodec) -> float:
        """Return the value of the parameter in a configuration."""
        return three_digits((config.tuning and config.tuning.value(config)) or 1.0)

    def levels(self, most: int) -> list[Settings]:
        """Return at most `most` configurations from fine to coarse, at least half an octave apart.

        They cover the middle of the line; only searches use its ends.
        """
        low, high = (round(2 * math.log2(end)) for end in self.tunable.within or (1.0, 1.0))
        length = high - low + 1
        first, last = length // 4, length - 1 - length // 6
        n = min(most, last - first + 1)
        halves = [low + round(first + i * (last - first) / max(1, n - 1)) for i in range(n)]
        return [self.settings(2.0 ** (half / 2)) for half in halves]


def three_digits(value: float) -> float:
    """Return a number rounded to three digits; finer differences are not worth a measurement."""
    return float(f"{value:.3g}")


def space_of(codec: str, layers: Iterable[LayerType | None] = ()) -> Cube | Line:
    """Return the search space of a codec, as its tuning defines it.

    Parameters
    ----------
    codec
        Its name.
    layers
        The layer types of the run.

    Raises
    ------
    ConfigError
        The codec has no setting that trades size for fidelity.

    Examples
    --------
    >>> len(space_of("inshrinkerator").points())
    198
    """
    tuning = get_codec(codec).tuning
    if tuning is None:
        known = [name for name in codec_names() if get_codec(name).tuning is not None]
        raise ConfigError(
            f"the codec '{codec}' has nothing to search", remedy=f"choose one of {', '.join(known)}"
        )
    if tuning.tunable.within is not None:
        return Line(tunable=tuning.tunable, fixed=tuning.beside)
    axes = tuning.searched(frozenset(layers))
    return Cube(axes=axes, switch=tuning.switch, fixed=tuning.beside)
