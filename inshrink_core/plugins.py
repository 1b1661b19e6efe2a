"""What can be added from outside: codecs, run layouts, tasks. One mechanism, entry points.

The project's own stand in ``pyproject.toml`` like everybody's, and are read from there where the project is
used from a checkout, installed or not.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

__all__ = ["plugins"]

_PYPROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"


@functools.cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name: the project's own first, which no other can replace.

    Parameters
    ----------
    group
        ``inshrink.codecs``, ``inshrink.readers`` or ``inshrink.tasks``.

    Notes
    -----
    Scans the installed distributions, which takes 20 ms.

    Examples
    --------
    >>> "lattice" in plugins("inshrink.codecs"), "char-gpt" in plugins("inshrink.tasks")
    (True, True)
    """
    points = entry_points(group=group)
    own = {point.name: point for point in points if point.dist is not None and point.dist.name == "inshrink"}
    found = {point.name: point for point in points} | own
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text()).get("project", {})
        stated = project.get("entry-points", {}).get(group, {}) if project.get("name") == "inshrink" else {}
        own |= {name: EntryPoint(name, value, group) for name, value in stated.items()}
    return {name: own[name] for name in sorted(own)} | {
        name: found[name] for name in sorted(found.keys() - own.keys())
    }
