"""What lies in folders, and what headers and earlier comparisons tell of every run and archive in them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from inshrink_app.model import ServiceError, Subject, known_of
from inshrink_app.server.roots import Entry, list_folder
from inshrink_app.services.opening import load_subject

_READ = ("run", "archive")
"""Kinds of which headers are read."""

_DEEPEST = 2
"""Folders below that are looked into."""

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


def shelf(folders: Sequence[Path]) -> tuple[pd.DataFrame, int]:
    """Return what lies in some folders, and how many there are more than were listed.

    These are the runs and archives three levels deep, and beside them folders and checkpoint files.
    """
    found, n_hidden = _found(folders)
    readable = [entry for entry in found if entry.kind in _READ]
    left_out = set(readable[_MOST:])
    rows = [_listed(entry) for entry in found if entry not in left_out]
    return pd.DataFrame(rows, columns=list(COLUMNS)), len(left_out) + n_hidden


def _found(starts: Sequence[Path]) -> tuple[list[Entry], int]:
    """Look for runs and archives, those near the top first, and count what folders of very many leave out."""
    found: dict[Path, Entry] = {}
    n_hidden = 0
    folders = deque((folder, 0) for folder in starts)
    for _ in range(_MOST_FOLDERS):
        if not folders:
            break
        folder, depth = folders.popleft()
        with contextlib.suppress(OSError):
            listing = list_folder(folder)
            n_hidden += listing.n_hidden
            for entry in listing.entries:
                if not depth or entry.kind in _READ:
                    found.setdefault(entry.path, entry)
                if entry.kind == "folder" and depth < _DEEPEST:
                    folders.append((entry.path, depth + 1))
    return list(found.values()), n_hidden


def _listed(entry: Entry) -> dict[str, Any]:
    """Return the line of what lies in a folder; what cannot be read is listed with the reason."""
    path = entry.path
    row: dict[str, Any] = {"path": path, "kind": entry.kind, "bytes on disk": entry.nbytes}
    if entry.kind not in _READ:
        return row
    try:
        shown = load_subject(str(path))
    except ServiceError as error:
        return row | {"problem": error.problem.what}
    archive = shown.archive
    metric, value = last_metric(shown)
    row |= {
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
