"""The runs and archives in folders, with what headers and earlier comparisons say of each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from inshrink_app.model import ServiceError, Subject, known_of
from inshrink_app.server.roots import Entry, list_folder
from inshrink_app.services.opening import load_subject

_READ = ("run", "archive")
"""Kinds whose headers are read."""

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
"""Of the table; empty if not known.

Bytes and ratios of the archive are those of the archive itself, or of the archive beside the run; restore
cost and drop are the largest that were measured of it. The problem is why something cannot be read.
"""


def shelf(folders: Sequence[Path]) -> tuple[pd.DataFrame, int]:
    """Return the entries of some folders, and how many more there are than are listed.

    These are the runs and archives three levels deep, those near the top first, and beside them folders and
    checkpoint files of the first level.
    """
    found: dict[Path, Entry] = {}
    waiting, n_hidden = [(folder, 0) for folder in folders], 0
    for folder, depth in waiting:  # It grows.
        with contextlib.suppress(OSError):
            listing = list_folder(folder)
            n_hidden += listing.n_hidden
            for entry in listing.entries:
                if not depth or entry.kind in _READ:
                    found.setdefault(entry.path, entry)
                if entry.kind == "folder" and depth < _DEEPEST and len(waiting) < _MOST_FOLDERS:
                    waiting.append((entry.path, depth + 1))
    left_out = [entry for entry in found.values() if entry.kind in _READ][_MOST:]
    rows = [_row(entry) for entry in found.values() if entry not in left_out]
    return pd.DataFrame(rows, columns=list(COLUMNS)), len(left_out) + n_hidden


def _row(entry: Entry) -> dict[str, Any]:
    """Return the line of an entry; what cannot be read is listed with the reason."""
    row: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "bytes on disk": entry.nbytes}
    if entry.kind not in _READ:
        return row
    try:
        shown = load_subject(str(entry.path))
    except ServiceError as error:
        return row | {"problem": error.problem.what}
    archive, (metric, value) = shown.archive, last_metric(shown)
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
        row["steps not archived"] = len(set(shown.steps).difference(archive.steps if archive else ()))
    if archive is not None:
        row |= {"bytes of the archive": archive.nbytes, "ratio": archive.ratio_total}
        row["bits per weight"] = archive.bits_per_weight
        known = known_of(archive)
        if known is not None and known.is_current:
            row["restore cost"] = known.comparison.max_restore_cost
            row["largest drop"] = known.comparison.max_drop
    return row


def last_metric(shown: Subject) -> tuple[str, float | None]:
    """Return the last value of the most telling metric: a validation loss before another loss.

    The name is empty if nothing was logged.
    """

    def rank(name: str) -> tuple[bool, bool]:
        words = name.casefold()
        return "loss" not in words, not any(part in words for part in ("val", "eval", "test"))

    names = sorted((name for name, series in shown.log.items() if series), key=rank)
    return (names[0], shown.log[names[0]][-1][1]) if names else ("", None)
