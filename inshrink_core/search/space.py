"""Configurations as points: cubes of settings ordered from fine to coarse, and the lattice's one knob."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from inshrink_core.chain import ChainConfig, parse_overrides
from inshrink_core.chain.config import apply_settings
from inshrink_core.checkpoint import LayerType
from inshrink_core.errors import ConfigError

__all__ = ["Axis", "Candidate", "Cube", "CubePoint", "LatticeLine", "space_of"]


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
        return replace(base, codec=self.codec, config=config, overrides=(*base.overrides, *own))


class Axis(NamedTuple):
    """Settings that are turned together, and their values from the finest to the coarsest."""

    settings: tuple[str, ...]
    values: tuple[Any, ...]


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
        A setting without order, and its words; None for none.
    idle_at
        The axis whose finest value makes the switch irrelevant.
    held
        Settings of every point.
    """

    codec: str
    axes: tuple[Axis, ...]
    switch: tuple[str, tuple[str, ...]] | None = None
    idle_at: int = 0
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the switch; one empty word without a switch."""
        return self.switch[1] if self.switch else ("",)

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
            settings[self.switch[0]] = point.word or self.words[0]
        return Candidate(codec=self.codec, settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatticeLine:
    """The lattice's global step as one number, times a factor for each layer type.

    Parameters
    ----------
    held
        Settings of every point.
    factors
        Factor of the step by layer type; 1 where a type is absent.
    """

    held: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def points(self) -> tuple[float, ...]:
        """Return half octaves from very fine to very coarse, for searches that take all or any."""
        return tuple(three_digits(2.0 ** (half / 2)) for half in range(*_HALF_OCTAVES))

    def candidate(self, coarseness: float) -> Candidate:
        """Return the configuration at a global step."""
        overrides = tuple(
            {"layer_type": str(layer), "coarseness": three_digits(coarseness * factor)}
            for layer, factor in sorted(self.factors.items())
            if factor != 1
        )
        settings = {**self.held, "coarseness": three_digits(coarseness)}
        return Candidate(codec="lattice", settings=settings, overrides=overrides)


def three_digits(value: float) -> float:
    """Return a number to three digits: finer differences are not worth a measurement."""
    return float(f"{value:.3g}")


_HALF_OCTAVES: Final = (-8, 13)
"""From a sixteenth of the default's order to 64 times the movement between checkpoints."""

_BITS: Final = (Axis(("bits",), (8, 7, 6, 5, 4, 3, 2, 1)),)

_ALPHA: Final = (Axis(("alpha",), (5e-5, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)),)
"""From the published 5e-5, in steps of about √10, to where all but the largest changes are pruned."""

_INSHRINKERATOR: Final = (
    Axis(("bins",), (32, 16, 12, 8, 6, 4)),
    Axis(("prune",), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    Axis(("protect",), (0.01, 0.005, 0.0005)),
)
"""The published space (Agrawal et al., SoCC 2024, section "Search space"): 6 × 6 × 3, twice for the pruning
metric, 216 in all; bins are one number for all layers that are not embeddings."""

_EMBEDDING_BINS: Final = Axis(("embedding_bins",), (32, 16))
"""Embeddings mind quantization more, so their bins are apart (ibid.)."""

_CUBES: Final[Mapping[str, Cube]] = {
    "qd": Cube(codec="qd", axes=_BITS),
    "uniform": Cube(codec="uniform", axes=_BITS),
    "lc-checkpoint": Cube(codec="lc-checkpoint", axes=_BITS),
    # The published exact keyframe would be most of a short chain, whatever the deltas cost.
    "excp": Cube(codec="excp", axes=_ALPHA, held={"keyframe": "quantized"}),
    "context": Cube(codec="context", axes=_ALPHA, held={"keyframe": "quantized"}),
}


def space_of(codec: str, layers: frozenset[LayerType | None]) -> Cube | LatticeLine:
    """Return what can be searched of a codec on a run with these layer types.

    Raises
    ------
    ConfigError
        The codec has no setting that trades size for fidelity, or none that is known here.

    Examples
    --------
    >>> len(list(space_of("inshrinkerator", frozenset()).places())) * 2
    216
    """
    if codec == "lattice":
        return LatticeLine()
    if codec == "inshrinkerator":
        embedded = LayerType.EMBEDDING in layers
        axes = (*_INSHRINKERATOR, _EMBEDDING_BINS) if embedded else _INSHRINKERATOR
        switch = ("prune_metric", ("magnitude", "sensitivity"))
        return Cube(codec=codec, axes=axes, switch=switch, idle_at=1)
    if codec in _CUBES:
        return _CUBES[codec]
    raise ConfigError(
        f"the codec '{codec}' has nothing to search",
        remedy=f"choose one of lattice, inshrinkerator, {', '.join(_CUBES)}",
    )
