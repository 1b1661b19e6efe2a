"""The runs and archives in folders, with facts from headers and earlier comparisons."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from inshrink_app.model import ServiceError, Subject, known_of
from inshrink_app.server.roots import Entry, list_folder
from inshrink_app.services.opening import load_subject
from inshrink_app.widgets.figures import main_curve

_READ = ("run", "archive")
"""Kinds whose headers are read."""

_DEEPEST = 2
"""Depth of subfolders that are searched."""

_MAX_FOLDERS = 200
_MOST = 60
"""Number of runs and archives whose headers are read; each takes milliseconds, or more with many files."""

COLUMNS = (
    *("path", "kind", "steps", "steps not archived", "bytes on disk", "bytes of the archive", "ratio"),
    *("restore cost", "largest drop", "bits per weight", "parameters", "last step", "metric", "last value"),
    "problem",
)
"""Columns of the table; a cell is empty if unknown.

Bytes and ratios are those of the archive itself, or of the archive beside the run. Restore cost and drop are
the largest measured ones. The problem is the reason why something cannot be read.
"""


def shelf(folders: Sequence[Path]) -> tuple[pd.DataFrame, int]:
    """Return the entries of some folders, and the number of omitted ones.

    The entries are runs and archives three levels deep, top levels first, and the folders and checkpoint
    files of the first level.
    """
    found: dict[Path, Entry] = {}
    waiting, n_hidden = [(folder, 0) for folder in folders], 0
    for folder, depth in waiting:  # The list grows during the loop.
        with contextlib.suppress(OSError):
            listing = list_folder(folder)
            n_hidden += listing.n_hidden
            for entry in listing.entries:
                if not depth or entry.kind in _READ:
                    found.setdefault(entry.path, entry)
                if entry.kind == "folder" and depth < _DEEPEST and len(waiting) < _MAX_FOLDERS:
                    waiting.append((entry.path, depth + 1))
    left_out = [entry for entry in found.values() if entry.kind in _READ][_MOST:]
    rows = [_row(entry) for entry in found.values() if entry not in left_out]
    return pd.DataFrame(rows, columns=list(COLUMNS)), len(left_out) + n_hidden


def _row(entry: Entry) -> dict[str, Any]:
    """Return the row of an entry; an unreadable one is listed with the reason."""
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
        "steps": len(shown.steps) + shown.n_unread,
        "bytes on disk": entry.nbytes if shown.n_unread else shown.total_bytes,
        "parameters": shown.n_parameters,
        "last step": shown.steps[-1] if shown.steps else None,
        "metric": metric,
        "last value": value,
    }
    if shown.kind == "run" and not shown.n_unread:
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
    """Return name and last value of the main loss, or of another metric; an empty name without any."""
    name = main_curve(shown.log) or next((name for name, series in shown.log.items() if series), "")
    return name, shown.log[name][-1][1] if name else None
