"""Configurations as files and in a few words. No Streamlit here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from inshrink_core.verbs.search import describe


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a configuration."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(config)))
    return copied


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
    except (ValueError, RecursionError) as error:
        raise ValueError("the text does not read as TOML or JSON") from error
    if isinstance(document, dict) and isinstance(document.get("best"), dict):
        document = document["best"].get("config")
    if not isinstance(document, dict) or set(document) - {"codec", "settings", "override"}:
        raise ValueError("the text holds other keys than codec, settings and override")
    found = {"codec": document.get("codec", ""), "settings": document.get("settings", {})}
    overrides = document.get("override", [])
    if not isinstance(found["codec"], str) or not found["codec"] or not isinstance(found["settings"], dict):
        raise ValueError("the text names no codec, or its settings are no table")
    if not isinstance(overrides, list) or not all(isinstance(override, dict) for override in overrides):
        raise ValueError("the overrides are no list of tables")
    return plain(found | ({"override": overrides} if overrides else {}))


def engine_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and overrides as arguments of `inshrink_core.compress`."""
    overrides = {"overrides": config["override"]} if config.get("override") else {}
    return {**config.get("settings", {}), **overrides}


def config_words(config: Mapping[str, Any]) -> str:
    """Return a configuration in a few words, in the engine's terms. Untrusted text."""
    return describe({"codec": "", **config})


def toml_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as a TOML file for ``inshrink compress --config``."""
    lines = [f"codec = {_toml(config['codec'])}", "", "[settings]"]
    lines += [f"{_key(name)} = {_toml(value)}" for name, value in config.get("settings", {}).items()]
    for override in config.get("override", ()):
        lines += ["", "[[override]]", *(f"{_key(name)} = {_toml(value)}" for name, value in override.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, str):
        # JSON's escapes are valid in TOML. DEL is the only character that JSON leaves and TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(name))} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
