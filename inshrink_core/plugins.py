"""What other packages add: entry points, found once.

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
    """Return the entry points of a group by name; the project's own are never replaced.

    Notes
    -----
    Scans the installed distributions, which takes 20 ms.
    """
    found = {point.name: point for point in entry_points(group=group)}
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text()).get("project", {})
        own = project.get("entry-points", {}).get(group, {}) if project.get("name") == "inshrink" else {}
        found |= {name: EntryPoint(name, value, group) for name, value in own.items()}
    return found
