"""Settings for some of the tensors: by name pattern, by layer type, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from inshrink_core.checkpoint import LayerType, TensorSpec
from inshrink_core.codec import CodecConfig
from inshrink_core.errors import ConfigError

__all__ = ["Override", "overridden", "parse_overrides"]

_SELECTORS = ("match", "layer_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Settings that replace the codec's own for the tensors it matches.

    Parameters
    ----------
    match
        Pattern of parameter names: ``*`` and ``?`` as in file names, ``[ab]`` for one of a few letters.
    layer_type
        A `LayerType` that tensors must be of too; None: any.
    settings
        Fields of the codec's config.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> spec = TensorSpec(name="wte.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 8))
    >>> Override(layer_type="embedding", settings={"coarseness": 1.0}).matches(spec)
    True
    """

    match: str = "*"
    layer_type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, spec: TensorSpec) -> bool:
        """Whether the settings hold for a tensor."""
        if self.layer_type is not None and spec.layer != self.layer_type:
            return False
        return fnmatchcase(spec.name, self.match)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in a config file."""
        selectors: dict[str, Any] = {"match": self.match}
        if self.layer_type is not None:
            selectors["layer_type"] = self.layer_type
        return selectors | dict(self.settings)


def overridden(config: CodecConfig, overrides: Sequence[Override], spec: TensorSpec) -> CodecConfig:
    """Return the config of one tensor: every override that matches, in their order.

    Raises
    ------
    ConfigError
        A setting that the codec does not have, or that is out of range.
    """
    settings: dict[str, Any] = {}
    for override in overrides:
        if override.matches(spec):
            settings |= override.settings
    return apply_settings(config, settings) if settings else config


def apply_settings(config: CodecConfig, settings: Mapping[str, Any]) -> CodecConfig:
    """Return a config with some of its fields replaced.

    Raises
    ------
    ConfigError
        A field it does not have, or a value that is out of range.
    """
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"an override sets '{name}', which the codec does not have",
                remedy=f"it has: {', '.join(known)}; an override is chosen by {' and '.join(_SELECTORS)}",
            )
    try:
        return dataclasses.replace(config, **settings)  # type: ignore[type-var]
    except TypeError as error:
        raise ConfigError(f"a setting of an override has a wrong type ({error})") from error


def parse_overrides(entries: Any, config: CodecConfig) -> tuple[Override, ...]:
    """Return the overrides of a config document, each tried on the codec's config.

    Parameters
    ----------
    entries
        A list of tables: ``match``, ``layer_type``, and settings of the codec.
    config
        What they override.

    Raises
    ------
    ConfigError
        The list is not of that form, or asks for what the codec does not have.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError("'override' is a list of tables", found=repr(entries))
    return tuple(_parse(entry, config) for entry in entries)


def _parse(entry: Any, config: CodecConfig) -> Override:
    if isinstance(entry, Override):
        entry = entry.to_json()
    if not isinstance(entry, Mapping):
        raise ConfigError("an override is a table", found=repr(entry))
    match, layer_type = entry.get("match", "*"), entry.get("layer_type")
    if not isinstance(match, str) or not match:
        raise ConfigError("'match' of an override is a pattern of parameter names", found=repr(match))
    if layer_type is not None and layer_type not in set(LayerType):
        raise ConfigError(
            "an override is for no known layer type", expected=" or ".join(LayerType), found=repr(layer_type)
        )
    settings = {name: value for name, value in entry.items() if name not in _SELECTORS}
    if not settings:
        raise ConfigError(f"the override of '{match}' sets nothing", remedy="give it a setting of the codec")
    apply_settings(config, settings)
    return Override(match=match, layer_type=layer_type, settings=settings)
