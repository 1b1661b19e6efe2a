"""A codec's settings as they are written on the command line or in a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_core.errors import ConfigError, NotFoundError

__all__ = ["FILE_KEYS", "Written", "given_settings", "parse_settings", "read_config_file", "written_as"]

_KEYFRAME_EVERY = 32
"""Where neither the command line nor a file says it."""

FILE_KEYS: Mapping[str, tuple[type, str]] = {
    "codec": (str, "a name"),
    "optimizer": (str, "a word"),
    "keyframe_every": (int, "a whole number"),
    "settings": (dict, "a table"),
    "override": (list, "a list of tables"),
}
"""What a config file may hold, and as what: ``settings`` are the codec's own, ``override`` some tensors'."""

_MAX_CONFIG_BYTES = 1 << 20
"""A config is a page of text: anything larger is another file by mistake."""


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings from ``KEY=VALUE`` texts.

    A value is JSON where it reads as JSON, else a text. ``KEY.NAME=VALUE`` sets one entry of a table.

    Raises
    ------
    ConfigError
        A text without ``=``, or a setting that is both a value and a table.

    Examples
    --------
    >>> parse_settings(["bins=16", "codebook=exact", "prune.linear=0.4"])
    {'bins': 16, 'codebook': 'exact', 'prune': {'linear': 0.4}}
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"--set {text}", expected="KEY=VALUE", found=text)
        table = settings
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {text}: '{name}' has been given a single value already")
        table[names[-1]] = _value(value.strip())
    return settings


def given_settings(document: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a config file, overrides among them, with those of the command line on top."""
    overrides = {"overrides": document["override"]} if "override" in document else {}
    return {**document.get("settings", {}), **overrides, **parse_settings(texts)}


class Written(NamedTuple):
    """How frames are to be written, as a file and the command line say; None leaves it to the defaults."""

    codec: str | None
    config: dict[str, Any] | None
    optimizer: str | None
    keyframe_every: int


def written_as(
    file: Path | None,
    settings: Sequence[str] | None,
    *,
    codec: str | None = None,
    own: Mapping[str, Any] | None = None,
    optimizer: str | None = None,
    keyframe_every: int | None = None,
) -> Written:
    """Return how frames are to be written: what a config file says, the command line on top of it.

    Parameters
    ----------
    file
        The config file.
    settings
        ``KEY=VALUE`` texts.
    codec, optimizer, keyframe_every
        Options, None where they were not given.
    own
        Settings that have options of their own; those that are None were not given.

    Raises
    ------
    NotFoundError, ConfigError
        As `read_config_file` and `parse_settings`.
    """
    given = read_config_file(file) if file is not None else {}
    named = {name: value for name, value in (own or {}).items() if value is not None}
    config = {**given_settings(given, settings or []), **named}
    return Written(
        codec=codec or given.get("codec"),
        config=config or None,
        optimizer=optimizer or given.get("optimizer"),
        keyframe_every=keyframe_every or given.get("keyframe_every", _KEYFRAME_EVERY),
    )


def _value(text: str) -> Any:
    """Return a JSON value, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def read_config_file(path: Path) -> Mapping[str, Any]:
    """Return what a TOML or JSON file says of how to compress (`FILE_KEYS`).

    Raises
    ------
    NotFoundError
        There is no such file.
    ConfigError
        It is not TOML or JSON, or has other keys.
    """
    if not path.is_file():
        raise NotFoundError("there is no such config file", where=str(path))
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError("a config file is at most 1 MB", where=str(path))
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this does not read as {_kind(path)} ({error})", where=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigError("a config is a table of keys", where=str(path))
    if "best" in document and "trials" in document:
        document = _config_found(document["best"], path)
    for key, value in document.items():
        if key not in FILE_KEYS:
            raise ConfigError(
                f"a config has no key '{key}'", where=str(path), remedy=f"it has: {', '.join(FILE_KEYS)}"
            )
        kind, expected = FILE_KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(
                f"'{key}' has the wrong type", where=str(path), expected=expected, found=repr(value)
            )
    return document


def _config_found(best: Any, path: Path) -> dict[str, Any]:
    """Return the config that a search wrote down; its result stands for a config file."""
    found = best.get("config") if isinstance(best, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(
            "the search found no configuration", where=str(path), remedy="loosen its bounds and search again"
        )
    return found


def _kind(path: Path) -> str:
    return "JSON" if path.suffix == ".json" else "TOML"
