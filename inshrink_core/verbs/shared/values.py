"""Parse values of the command line: steps, settings and config files."""

from __future__ import annotations

import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import msgspec

from inshrink_core.errors import ConfigError, InputError, NotFoundError
from inshrink_core.request import listed

_STEPS = re.compile(r"(?=.)(\d{1,19})?(:(\d{1,19})?(?::(\d{1,19})?)?)?", re.ASCII)
"""A step or a range FIRST:LAST:EVERY; 2^63 - 1 has 19 digits."""

_MAX_CONFIG_BYTES = 1 << 20
"""Configs are short: a larger file was given by mistake."""


class _Config(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of a config file: ``settings`` apply to the codec, ``override`` to some tensors."""

    codec: str = ""
    optimizer: str = ""
    keyframe_every: int = 0
    settings: dict[str, Any] = {}
    override: list[Any] = []


AnySteps = int | str | Sequence[int | str]


def chosen_steps(
    steps: AnySteps | None, known: Callable[[], Sequence[int]], where: str
) -> tuple[int, ...] | None:
    """Return the steps that a request names, ascending; None if it names none.

    Parameters
    ----------
    steps
        Steps, or texts: ``100``, ``100,200``, ``100:500``, ``:500``, ``100:``, ``0:500:5``.
    known
        Returns all existing steps. Called for ranges only; a single step is returned without a check, and
        reading it raises the error.
    where
        The run or archive, for messages.

    Raises
    ------
    InputError
        A text is not a step, a list or a range.
    NotFoundError
        A range contains no step.

    Examples
    --------
    >>> chosen_steps(["100:300:2", 7], lambda: range(0, 1000, 100), "run")
    (7, 100, 300)
    """
    if steps is None:
        return None
    try:
        named = [value if isinstance(value, str) else str(operator.index(value)) for value in listed(steps)]
    except TypeError as error:
        raise InputError(
            "a step is a whole number, or a text", where=where, expected="25, [25, 50] or '0:100:25'"
        ) from error
    chosen: set[int] = set()
    for text in (part.strip() for item in named for part in item.split(",")):
        match = _STEPS.fullmatch(text)
        first, span, last, every = match.groups() if match else ("", "", "", "0")
        if int(every or 1) < 1:
            raise InputError(
                f"'{text}' is neither a step nor a range", remedy="write 400, 100,200 or FIRST:LAST[:EVERY]"
            )
        if span is None:
            chosen.add(int(first))
            continue
        available = known()
        within = [step for step in available if int(first or 0) <= step and (not last or step <= int(last))]
        if not within:
            raise NotFoundError(
                f"there is no step in the range {text}",
                where=where,
                remedy=f"it has {available[0]} to {available[-1]}" if available else "it has no steps",
            )
        chosen.update(within[:: int(every or 1)])
    return tuple(sorted(chosen))


def matching_names(names: Iterable[str], pattern: str) -> tuple[str, ...]:
    r"""Return the names of tensors that a pattern matches.

    Parameters
    ----------
    names
        Dotted names of tensors.
    pattern
        The name of a tensor, or of a module, which matches all tensors in it. If no tensor or module has that
        name: ``/a regular expression/``, a glob with ``*``, ``?`` or ``[ab]`` that matches either, or a part
        of a name in any case.

    Raises
    ------
    InputError
        The regular expression is invalid.

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
                remedy="correct it, or give part of a name or a glob such as *.bias",
            ) from error
        return tuple(filter(found.search, names))
    if any(sign in pattern for sign in "*?["):
        return tuple(n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*"))
    return tuple(name for name in names if pattern.casefold() in name.casefold())


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return settings from ``KEY=VALUE`` texts.

    A value is parsed as JSON if possible, else it is a text. ``KEY.NAME=VALUE`` sets one entry of a table.

    Raises
    ------
    ConfigError
        A text lacks ``=``, or a setting is both a value and a table.

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
        try:
            table[names[-1]] = json.loads(value)
        except ValueError:
            table[names[-1]] = value.strip()
    return settings


def given_settings(
    document: Mapping[str, Any], settings: Mapping[str, Any] | Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings and overrides of a config file, updated with other settings or their texts."""
    overrides = {"overrides": document["override"]} if "override" in document else {}
    others = settings if isinstance(settings, Mapping) else parse_settings(settings)
    return {**document.get("settings", {}), **overrides, **others}


def read_config_file(path: Path) -> Mapping[str, Any]:
    """Return the contents of a TOML or JSON config file: codec, optimizer, settings and so on.

    Raises
    ------
    NotFoundError
        The file does not exist.
    ConfigError
        The file is not TOML or JSON, or has unknown keys.
    """
    if not path.is_file():
        raise NotFoundError("there is no such config file", where=str(path))
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError("a config file is at most 1 MB", where=str(path))
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        document: Any = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not valid {kind} ({error})", where=str(path)) from error
    if isinstance(document, dict) and "best" in document and "trials" in document:
        best = document["best"]
        document = best.get("config") if isinstance(best, dict) else None
        if document is None:
            remedy = "give compress the bounds themselves, or loosen them and search again"
            raise ConfigError("the search found no configuration", where=str(path), remedy=remedy)
    try:
        msgspec.convert(document, _Config)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        keys = ", ".join(_Config.__struct_fields__)
        raise ConfigError(
            f"this is not a config: {error}", where=str(path), remedy=f"its keys are {keys}"
        ) from error
    return cast("Mapping[str, Any]", document)
