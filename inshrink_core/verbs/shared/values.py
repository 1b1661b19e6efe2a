"""What people write on the command line as values: steps, settings and config files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from inshrink_core.errors import ConfigError, InputError, NotFoundError

_MOST_DIGITS = 19
"""Of the largest step an archive can hold, 2^63 - 1."""

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


def choose_steps(texts: Sequence[str], available: Sequence[int], where: str) -> tuple[int, ...] | None:
    """Return the steps that some options name, ascending; None where there are no options.

    Parameters
    ----------
    texts
        Values of the option: ``100``, ``100,200``, ``100:500``, ``:500``, ``100:``, ``0:500:5``.
    available
        Every step there is. Steps of a range come from these; a step named by itself is passed on
        even if it is not there: reading it raises the error.
    where
        The run or archive, for messages.

    Raises
    ------
    InputError
        Not a step, a list or a range.
    NotFoundError
        A range without any step in it.

    Examples
    --------
    >>> choose_steps(["100:300:2", "7"], range(0, 1000, 100), "run")
    (7, 100, 300)
    """
    chosen: set[int] = set()
    for text in texts:
        for part in text.split(","):
            chosen.update(_expand(part.strip(), available, where))
    return tuple(sorted(chosen)) if texts else None


def _expand(text: str, available: Sequence[int], where: str) -> Sequence[int]:
    """Return the steps of one step or range."""
    fields = text.split(":")
    if len(fields) > 3 or (len(fields) == 1 and not text):
        raise _unreadable(text)
    numbers = [_number(field, text) for field in fields]
    if len(fields) == 1:
        return [number for number in numbers if number is not None]
    first, last = numbers[0], numbers[1]
    every = numbers[2] if len(numbers) == 3 and numbers[2] is not None else 1
    if every < 1:
        raise _unreadable(text)
    within = [
        step for step in available if (first is None or step >= first) and (last is None or step <= last)
    ]
    if not within:
        raise NotFoundError(
            f"there is no step in the range {text}",
            where=where,
            remedy=f"it has {available[0]} to {available[-1]}" if available else "it has no steps",
        )
    return within[::every]


def _number(field: str, text: str) -> int | None:
    """Return a number of a range; None where it was left out."""
    if not field:
        return None
    if not field.isascii() or not field.isdigit() or len(field) > _MOST_DIGITS:
        raise _unreadable(text)
    return int(field)


def _unreadable(text: str) -> InputError:
    return InputError(
        f"'{text}' is neither a step nor a range", remedy="write 400, 100,200 or FIRST:LAST[:EVERY]"
    )


def matching_names(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    r"""Return the names of tensors that a pattern matches.

    Parameters
    ----------
    names
        Dotted names of tensors.
    pattern
        The name of a tensor or a module, which stands for all in it. Where there is none of that name:
        ``/a regular expression/``, a glob of either with ``*``, ``?`` or ``[ab]``, or a part of a name in
        small or capital letters.

    Raises
    ------
    InputError
        The regular expression cannot be read.

    Examples
    --------
    >>> names = ["h.1.w", "h.10.w", "head.w", "head.b"]
    >>> matching_names(names, "h.1"), matching_names(names, "HEA"), matching_names(names, "h*.b")
    (('h.1.w',), ('head.w', 'head.b'), ('head.b',))
    >>> matching_names(names, r"/h\.\d\./")
    ('h.1.w',)
    """
    names = tuple(names)
    inside = tuple(name for name in names if f"{name}.".startswith(f"{pattern}."))
    if inside or not pattern:
        return inside
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/":
        try:
            found = re.compile(pattern[1:-1])
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(
                f"this regular expression cannot be read ({error})",
                found=pattern,
                remedy="mend it, or write a part of a name, or a glob such as *.bias",
            ) from error
        return tuple(filter(found.search, names))
    if any(sign in pattern for sign in "*?["):
        return tuple(n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*"))
    return tuple(name for name in names if pattern.casefold() in name.casefold())


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
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


def given_settings(
    document: Mapping[str, Any], settings: Mapping[str, Any] | Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings of a config file, overrides among them, with others, or their texts, on top."""
    overrides = {"overrides": document["override"]} if "override" in document else {}
    others = settings if isinstance(settings, Mapping) else parse_settings(settings)
    return {**document.get("settings", {}), **overrides, **others}


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
        document = _config_found(document, path)
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


def _config_found(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the config that a search wrote down; its result stands for a config file."""
    best = document["best"]
    found = best.get("config") if isinstance(best, dict) else None
    if not isinstance(found, dict):
        remedy = "loosen its bounds and search again"
        if document.get("by_step"):
            remedy = "settings by step keep its bounds: give compress the bounds instead of this file"
        raise ConfigError("the search found no configuration", where=str(path), remedy=remedy)
    return found


def _kind(path: Path) -> str:
    return "JSON" if path.suffix == ".json" else "TOML"
