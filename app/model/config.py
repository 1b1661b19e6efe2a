"""Configurations as files and in a few words. No Streamlit here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a configuration."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(config)))
    return copied


class _Config(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    codec: Annotated[str, msgspec.Meta(min_length=1)]
    settings: dict[str, Any]
    override: list[dict[str, Any]] = []


def loaded(text: str) -> dict[str, Any]:
    """Return the configuration in an untrusted text.

    Parameters
    ----------
    text
        TOML or JSON: ``codec``, ``settings`` and ``override``, or the report of a search.

    Raises
    ------
    ValueError
        It is neither, or has other contents.

    Examples
    --------
    >>> loaded("codec = 'lattice'")
    {'codec': 'lattice', 'settings': {}}
    """
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        if isinstance(document.get("best"), dict):
            document = document["best"].get("config")
        config = msgspec.convert({"settings": {}, **document}, _Config)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the text is no configuration in TOML or JSON: {error}") from error
    return plain(msgspec.to_builtins(config))


def engine_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and overrides as arguments of `inshrink_core.compress`."""
    overrides = {"overrides": config["override"]} if config.get("override") else {}
    return {**config.get("settings", {}), **overrides}


def config_words(config: Mapping[str, Any]) -> str:
    """Return a configuration in a few words: its settings, and those of layer types. Untrusted text.

    Examples
    --------
    >>> config_words({"codec": "lattice", "settings": {"coarseness": 2.5}})
    'coarseness 2.5'
    """
    words = [f"{name} {_short(value)}" for name, value in config.get("settings", {}).items()]
    for override in config.get("override", []):
        chosen = override.get("layer_type") or override.get("match", "*")
        values = [_short(value) for name, value in override.items() if name not in ("layer_type", "match")]
        words.append(f"{chosen} {' '.join(values)}")
    return ", ".join(words) or str(config.get("codec", ""))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as a JSON file for ``inshrink compress --config``."""
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"
