"""A configuration as rows of an editor and back, as a file, and in a few words. No Streamlit here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inshrink_core.verbs.search import describe

OVERRIDE_COLUMNS = ("layer type", "names", "setting", "value")
"""Columns of the table of overrides; ``names`` is a pattern of parameter names."""

_SELECTORS = ("match", "layer_type")
_ANY = "*"


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that shares nothing with the search."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(config)))
    return copied


def setting_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of a configuration as names and texts."""
    return [(name, _text(value)) for name, value in config.get("settings", {}).items()]


def override_rows(config: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the overrides of a configuration, one setting a row (`OVERRIDE_COLUMNS`)."""
    return [
        (str(one.get("layer_type") or ""), str(one.get("match") or _ANY), name, _text(value))
        for one in config.get("override", ())
        for name, value in one.items()
        if name not in _SELECTORS
    ]


def edited(
    codec: str, settings: Iterable[Sequence[Any]], overrides: Iterable[Sequence[Any]]
) -> dict[str, Any]:
    """Return the configuration that rows of an editor say; rows without a name or a value say nothing.

    Parameters
    ----------
    codec
        Its name.
    settings
        Rows of name and text.
    overrides
        Rows of `OVERRIDE_COLUMNS`.

    Raises
    ------
    ValueError
        An override without a setting or a value.

    Examples
    --------
    >>> edited("lattice", [("coarseness", "2.5")], [("embedding", "", "coarseness", "1")])["override"]
    [{'layer_type': 'embedding', 'coarseness': 1}]
    """
    document: dict[str, Any] = {
        "codec": codec,
        "settings": {_clean(name): _value(text) for name, text in settings if _clean(name) and _clean(text)},
    }
    tables = []
    for layer, match, name, text in overrides:
        if not any(_clean(cell) for cell in (layer, match, name, text)):
            continue
        if not _clean(name) or not _clean(text):
            raise ValueError("a row of the overrides lacks its setting or its value")
        table: dict[str, Any] = {"layer_type": _clean(layer)} if _clean(layer) else {}
        if not table or _clean(match) not in ("", _ANY):
            table = {"match": _clean(match) or _ANY} | table
        tables.append(table | {_clean(name): _value(text)})
    return document | ({"override": tables} if tables else {})


def loaded(content: bytes, name: str) -> dict[str, Any]:
    """Return the configuration that a file holds; the file is not trusted.

    Parameters
    ----------
    content, name
        TOML or, where the name ends so, JSON: ``codec``, ``settings`` and ``override``, or what a search
        found.

    Raises
    ------
    ValueError
        It is neither, or says something else.

    Examples
    --------
    >>> loaded(b"codec = 'lattice'", "inshrink.toml")
    {'codec': 'lattice', 'settings': {}}
    """
    try:
        text = content.decode("utf-8")
        told = json.loads(text) if name.casefold().endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("the file does not read as TOML or JSON") from error
    if isinstance(told, dict) and isinstance(told.get("best"), dict):
        told = told["best"].get("config")
    if not isinstance(told, dict) or set(told) - {"codec", "settings", "override"}:
        raise ValueError("the file holds other keys than codec, settings and override")
    found = {"codec": told.get("codec", ""), "settings": told.get("settings", {})}
    overrides = told.get("override", [])
    if not isinstance(found["codec"], str) or not found["codec"] or not isinstance(found["settings"], dict):
        raise ValueError("the file names no codec, or its settings are no table")
    if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
        raise ValueError("the overrides of the file are no list of tables")
    return plain(found | ({"override": overrides} if overrides else {}))


def engine_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and overrides as `inshrink_core.compress` takes them."""
    overrides = {"overrides": config["override"]} if config.get("override") else {}
    return {**config.get("settings", {}), **overrides}


def config_words(config: Mapping[str, Any]) -> str:
    """Return a configuration in a few words, as the engine has them. Untrusted text."""
    return describe({"codec": "", **config})


def toml_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as the TOML file that ``inshrink compress --config`` takes."""
    lines = [f"codec = {_toml(config['codec'])}", "", "[settings]"]
    lines += [f"{_key(name)} = {_toml(value)}" for name, value in config.get("settings", {}).items()]
    for one in config.get("override", ()):
        lines += ["", "[[override]]", *(f"{_key(name)} = {_toml(value)}" for name, value in one.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, str):
        # JSON's escapes are TOML's too; DEL is the one sign that JSON leaves and TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(name))} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _clean(cell: Any) -> str:
    """Return the text of a cell; an empty one may be None or, in a column without values, NaN."""
    return "" if cell is None or cell != cell else str(cell).strip()


def _value(text: Any) -> Any:
    """Return a JSON value, or the text itself, as ``--set`` reads it."""
    clean = _clean(text)
    try:
        return json.loads(clean)
    except ValueError:
        return clean


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
