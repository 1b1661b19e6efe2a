"""What moved between two steps, and which other runs one can be laid over."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import streamlit as st
from inshrink_app.pages.sensitivity.drill_figures import Moved, MovedRow
from inshrink_app.server.recent import load_recent
from inshrink_app.server.roots import list_folder, settings
from inshrink_app.services.failures import reported
from inshrink_app.services.opening import engine_of, samples
from inshrink_app.widgets.tables import MODEL_ROLES, ServiceError, Subject

__all__ = ["diff_cost", "moved_between", "other_runs"]

_log = logging.getLogger(__name__)

_MOST_OTHER_RUNS = 50


def diff_cost(subject: Subject) -> int:
    """Return the bytes that `moved_between` reads."""
    return 2 * sum(row.nbytes for row in subject.tensors if row.role in MODEL_ROLES)


def moved_between(subject: Subject, first: int, second: int) -> Moved:
    """Measure what moved between two steps.

    Raises
    ------
    ServiceError
        They cannot be read.
    """
    _, token = engine_of(subject)
    return _moved(str(subject.path), token, first, second, subject)


@st.cache_resource(show_spinner=False, max_entries=50)
def _moved(path: str, token: str, first: int, second: int, _subject: Subject) -> Moved:
    from inshrink_core.verbs.diff import diff

    with reported():
        found = diff(engine_of(_subject)[0], steps=(first, second))
    rows = tuple(
        MovedRow(
            name=str(row["key"]),
            layer=str(row["layer"] or row["role"]),
            shape=tuple(row["shape"]),
            relative=row["relative"],
            rms=row["rms"],
            max_abs=row["max_abs"],
            cosine=row["cosine"],
            changed=row["changed"],
        )
        for row in found.rows()
    )
    return Moved(rows, tuple(found.added), tuple(found.removed), tuple(found.reshaped))


def other_runs(subject: Subject) -> tuple[Path, ...]:
    """Return runs and archives that a run can be laid over: recent ones, its neighbours, and samples."""
    known: dict[Path, None] = {}
    for recent in load_recent():
        real = Path(os.path.realpath(recent.path))
        if settings().allows(real) and real.exists():
            known[real] = None
    if settings().allows(subject.path.parent):
        try:
            entries = list_folder(subject.path.parent).entries
            known |= {entry.path: None for entry in entries if entry.kind in ("run", "archive")}
        except OSError as error:
            _log.info("the neighbours of a run cannot be listed: %s", error)
    try:
        known |= {sample.path: None for sample in samples()}
    except ServiceError:
        _log.info("there are no samples to lay a run over")
    known.pop(subject.path, None)
    return tuple(known)[:_MOST_OTHER_RUNS]
