"""Every run and archive that the explorer may see, with what headers and earlier comparisons tell of each."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

import pandas as pd
from inshrink_app.model.measured import known_of
from inshrink_app.model.problem import ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.server.roots import list_folder, settings
from inshrink_app.services.opening import load_subject

_DEEPEST = 2
"""Folders below a root that are looked into."""

_MOST_FOLDERS = 200
_MOST = 60
"""Runs and archives whose headers are read: some milliseconds each, more for a run of many files."""


COLUMNS = (
    *("path", "kind", "steps", "steps not archived", "bytes on disk", "bytes of the archive", "ratio"),
    *("restore cost", "largest drop", "bits per weight", "parameters", "last step", "metric", "last value"),
    "problem",
)
"""Of the table; empty where nothing tells.

Bytes and ratios of the archive are those of the archive itself, or of the one beside the run; restore cost
and drop are the largest that were measured of it. The problem says why something cannot be read.
"""


def shelf() -> tuple[pd.DataFrame, int]:
    """Return the runs and archives of the roots, and how many more there are than were read."""
    found = _found()
    rows = [_listed(*one) for one in found[:_MOST]]
    return pd.DataFrame(rows, columns=list(COLUMNS)), max(0, len(found) - _MOST)


def _found() -> list[tuple[Path, str]]:
    """Look for runs and archives, those near the roots first."""
    found: dict[Path, str] = {}
    folders = deque((root, 0) for root in settings().roots)
    for _ in range(_MOST_FOLDERS):
        if not folders:
            break
        folder, depth = folders.popleft()
        with contextlib.suppress(OSError):
            for entry in list_folder(folder).entries:
                if entry.kind in ("run", "archive"):
                    found.setdefault(entry.path, entry.kind)
                elif entry.kind == "folder" and depth < _DEEPEST:
                    folders.append((entry.path, depth + 1))
    return list(found.items())


def _listed(path: Path, kind: str) -> dict[str, Any]:
    """Return the line of a run or an archive; one that cannot be read is listed with the reason."""
    try:
        shown = load_subject(str(path))
    except ServiceError as error:
        return {"path": path, "kind": kind, "problem": error.problem.what}
    archive = shown.archive
    metric, value = last_metric(shown)
    row = {
        "path": path,
        "kind": shown.kind,
        "steps": len(shown.steps),
        "bytes on disk": shown.total_bytes,
        "parameters": shown.n_parameters,
        "last step": shown.steps[-1] if shown.steps else None,
        "metric": metric,
        "last value": value,
    }
    if shown.kind == "run":
        row["steps not archived"] = len(set(shown.steps) - set(() if archive is None else archive.steps))
    if archive is not None:
        row |= {
            "bytes of the archive": archive.nbytes,
            "ratio": archive.ratio_total,
            "bits per weight": archive.bits_per_weight,
        }
        known = known_of(archive)
        if known is not None and known.is_current:
            row["restore cost"] = known.comparison.max_restore_cost
            row["largest drop"] = known.comparison.max_drop
    return row


def last_metric(shown: Subject) -> tuple[str, float | None]:
    """Return the last value of the metric that says most: a validation loss before another loss.

    The name is empty where nothing was logged.
    """

    def rank(name: str) -> tuple[bool, bool]:
        words = name.casefold()
        return "loss" not in words, not any(part in words for part in ("val", "eval", "test"))

    names = sorted((name for name, series in shown.log.items() if series), key=rank)
    return (names[0], shown.log[names[0]][-1][1]) if names else ("", None)
