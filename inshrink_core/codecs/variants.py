"""Variants of codecs to sweep: a codec, its fixed settings, and the parameter that the sweep varies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.codec import (
    AnyCodec,
    Tunable,
    codec_names,
    get_codec,
    make_codec,
    require_weight_codec,
    weight_codecs,
)
from inshrink_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variant:
    """A codec with settings that stay fixed while its tunable parameter is swept.

    Parameters
    ----------
    codec
        Name of the codec.
    settings
        Fixed settings. If they include the tunable parameter, the variant is not swept.

    Raises
    ------
    ConfigError
        The codec is not installed, or does not have a setting.

    Examples
    --------
    >>> Variant("excp", {"coder": "rans"}).label
    'excp:coder=rans'
    >>> Variant("uniform", {"bits": 4}).tunable is None
    True
    """

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_weight_codec(self.codec)
        self.configs()

    @property
    def label(self) -> str:
        """Name and fixed settings, in the syntax of `choose_variants`."""
        pairs = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.codec}:{pairs}" if pairs else self.codec

    @property
    def tunable(self) -> Tunable | None:
        """The swept parameter; None if there is none."""
        tuning = get_codec(self.codec).tuning
        is_fixed = tuning is None or any(name in self.settings for name in tuning.tunable.settings)
        return None if tuning is None or is_fixed else tuning.tunable

    def config(self, value: float | None) -> AnyCodec:
        """Return the config at one value of the swept parameter; None if nothing is swept."""
        tuning = get_codec(self.codec).tuning
        turned = tuning.settings(value) if tuning is not None and value is not None else {}
        return make_codec(self.codec, {**turned, **self.settings})

    def configs(self) -> tuple[AnyCodec, ...]:
        """Return the configs at all values of the swept parameter."""
        tunable = self.tunable
        return tuple(self.config(value) for value in (tunable.values if tunable is not None else (None,)))

    def optimizer(self, asked: str) -> str:
        """Return the storage of the rest of the optimizer.

        A codec that encodes moments itself cannot be combined with ``drop``, so it becomes ``exact``.
        """
        moments = self.configs()[0].takes() - MODEL_ROLES
        return "exact" if asked == "drop" and moments else asked


def compared_variants() -> dict[str, Variant]:
    """Return the variants for comparisons (`Codec.compared`) by label, with fixed tunable parameters.

    Examples
    --------
    >>> {label: one.label for label, one in compared_variants().items()}["Uniform, 4 bit"]
    'uniform:bits=4'
    """
    found = {}
    for name in codec_names():
        kind = get_codec(name)
        for label, settings in kind.compared:
            variant = Variant(name, settings)
            if variant.tunable is not None:
                tunable = variant.tunable.settings[0]
                variant = Variant(name, {**settings, tunable: make_codec(name, settings).settings()[tunable]})
            found[label] = variant
    return found


def choose_variants(codecs: str | None) -> tuple[Variant, ...]:
    """Return variants without duplicates, in order.

    Parameters
    ----------
    codecs
        A text such as ``a,b:KEY=VALUE,KEY=VALUE,c``. None: every installed codec of weights, with its default
        settings.

    Examples
    --------
    >>> [one.label for one in choose_variants("excp:coder=rans,bits=3,uniform")]
    ['excp:coder=rans,bits=3', 'uniform']
    """
    codecs = ",".join(weight_codecs()) if codecs is None else codecs
    chosen: list[tuple[str, dict[str, Any]]] = []
    for part in codecs.split(","):
        head, equals, value = part.strip().partition("=")
        name, colon, key = head.partition(":")
        if colon or not equals:  # a setting alone continues the codec before it
            chosen.append((name, {}))
        if not chosen or not name or (colon and not equals):
            raise ConfigError(
                f"'{part}' names no variant of a codec", expected="NAME:KEY=VALUE,…", found=codecs
            )
        if equals:
            chosen[-1][1][(key if colon else name).strip()] = _value(value.strip())
    variants = (Variant(*row) for row in chosen)
    return tuple({variant.label: variant for variant in variants}.values())


def _value(text: str) -> Any:
    """Parse a JSON value; other text is returned as is, like ``--set``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
