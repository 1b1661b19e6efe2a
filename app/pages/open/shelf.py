"""Every run and archive that the explorer may see, with what headers and earlier comparisons tell of each."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import NamedTuple

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


class Listed(NamedTuple):
    """One run or archive, as a table has it; None where nothing tells.

    `nbytes` is what lies on disk; `archive_bytes` and the ratios are those of the archive itself, or of the
    one beside the run, and `not_archived` counts the steps that this one lacks; `drop` and `restore_cost` are
    the largest that were measured of it. `problem` says why it cannot be read.
    """

    path: Path
    kind: str
    steps: int | None = None
    last_step: int | None = None
    parameters: int | None = None
    nbytes: int | None = None
    archive_bytes: int | None = None
    ratio: float | None = None
    bits_per_weight: float | None = None
    not_archived: int | None = None
    restore_cost: float | None = None
    drop: float | None = None
    metric: str = ""
    value: float | None = None
    problem: str = ""


class Shelf(NamedTuple):
    """All of them, and how many more there are than were read."""

    rows: tuple[Listed, ...]
    n_more: int


def shelf() -> Shelf:
    """Return the runs and archives of the roots; reads names, and the headers of the first of them."""
    found = _found()
    return Shelf(tuple(_listed(*one) for one in found[:_MOST]), max(0, len(found) - _MOST))


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


def _listed(path: Path, kind: str) -> Listed:
    """Return the line of a run or an archive; one that cannot be read is listed with the reason."""
    try:
        shown = load_subject(str(path))
    except ServiceError as error:
        return Listed(path, kind, problem=error.problem.what)
    archive = shown.archive
    metric, value = last_metric(shown)
    known = None if archive is None else known_of(archive)
    compared = known.comparison if known is not None and known.is_current else None
    return Listed(
        path=path,
        kind=shown.kind,
        steps=len(shown.steps),
        last_step=shown.steps[-1] if shown.steps else None,
        parameters=shown.n_parameters,
        nbytes=shown.total_bytes,
        archive_bytes=None if archive is None else archive.nbytes,
        ratio=None if archive is None else archive.ratio_total,
        bits_per_weight=None if archive is None else archive.bits_per_weight,
        not_archived=None if archive is None else len(set(shown.steps) - set(archive.steps)),
        restore_cost=None if compared is None else compared.max_restore_cost,
        drop=None if compared is None else compared.max_drop,
        metric=metric,
        value=value,
    )


def last_metric(shown: Subject) -> tuple[str, float | None]:
    """Return the last value of the metric that says most: a validation loss before another loss.

    The name is empty where nothing was logged.
    """

    def rank(name: str) -> tuple[bool, bool]:
        words = name.casefold()
        return "loss" not in words, not any(part in words for part in ("val", "eval", "test"))

    names = sorted((name for name, series in shown.log.items() if series), key=rank)
    return (names[0], shown.log[names[0]][-1][1]) if names else ("", None)
