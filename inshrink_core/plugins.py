"""Plug-ins by entry points: codecs, run layouts, storages, verbs, tasks, evaluators.

The project's own entry points are declared in ``pyproject.toml``. In a checkout they are read from that file,
so that no installation is needed.
"""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

VERBS: Final = "inshrink.verbs"
"""Group of verbs; each is a request (`inshrink_core.request.Request`)."""

_PYPROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"


def plugin(group: str, name: str) -> EntryPoint | None:
    """Return one entry point, or None. The project's own are found without a scan.

    Parameters
    ----------
    group, name
        Group and name, as in `plugins`.

    Examples
    --------
    >>> plugin("inshrink.codecs", "lattice").attr, plugin("inshrink.codecs", "none")
    ('LatticeCodec', None)
    """
    return _bundled(group).get(name) or plugins(group).get(name)


@functools.cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name: the project's own first, which others cannot replace.

    Parameters
    ----------
    group
        ``inshrink.codecs``, ``inshrink.readers``, ``inshrink.storages``, ``inshrink.verbs``
        or ``inshrink.tasks``.

    Notes
    -----
    Scans the installed distributions, which takes 20 ms.

    Examples
    --------
    >>> "lattice" in plugins("inshrink.codecs"), "char-gpt" in plugins("inshrink.tasks")
    (True, True)
    """
    found = {p.name: p for p in entry_points(group=group) if p.dist is None or p.dist.name != "inshrink"}
    return _bundled(group) | {name: found[name] for name in sorted(found.keys() - _bundled(group).keys())}


@functools.cache
def _bundled(group: str) -> dict[str, EntryPoint]:
    """Return the project's own entry points of a group, by name; without the lab, those of the engine."""
    points: list[EntryPoint] = []
    with contextlib.suppress(PackageNotFoundError):
        points += distribution("inshrink").entry_points.select(group=group)
    points += (EntryPoint(name, value, group) for name, value in _stated().get(group, {}).items())
    present = [point for point in points if find_spec(point.module.partition(".")[0])]
    return {point.name: point for point in sorted(present, key=lambda point: point.name)}


@functools.cache
def _stated() -> Mapping[str, Mapping[str, str]]:
    """Return the entry points in the checkout's ``pyproject.toml``; empty without a checkout."""
    if not _PYPROJECT.is_file():
        return {}
    project = tomllib.loads(_PYPROJECT.read_text()).get("project", {})
    stated: Mapping[str, Mapping[str, str]] = project.get("entry-points", {})
    return stated if project.get("name") == "inshrink" else {}
