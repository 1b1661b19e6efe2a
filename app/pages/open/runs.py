"""All runs and archives as one table, and two of them side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import ServiceError, Subject, known_of
from inshrink_app.server.roots import Entry, list_folder, settings
from inshrink_app.widgets import fmt, listing
from inshrink_app.widgets.figures import log_figure, main_curve
from inshrink_app.widgets.layout import answer, chart

_WIDTH = 48
_PANELS = 4
_COUNTS = (
    *("steps", "last step", "parameters"),
    *("bytes on disk", "bytes of the archive", "steps not archived"),
)
_CLICKED, _FOLDER = "runs.clicked", "runs.folder"


@st.fragment
def show(open_path: Callable[[Path], None]) -> None:
    """Draw the table of a folder or of all roots, with links to other folders.

    Parameters
    ----------
    open_path
        Opens a run and leaves the page.
    """
    folder, roots = _current_folder(), settings().roots
    with st.container(horizontal=True, vertical_alignment="center"):
        look: dict[str, Any] = {"label_visibility": "collapsed", "width": 260, "icon": ":material/search:"}
        pattern = st.text_input("Filter by name", placeholder="Filter by name", key="runs.filter", **look)
        if folder is not None:
            is_top = folder in roots and len(roots) == 1
            if st.button("Up", icon=":material/arrow_upward:", disabled=is_top, key="up"):
                _go(None if folder in roots else folder.parent)
            if st.button("Open this folder", icon=":material/folder_open:", key="open_folder"):
                open_path(folder)
            st.caption(fmt.markdown(str(folder)), width="content")
    with st.spinner("Reading headers…"):
        found, n_more = shelf(roots if folder is None else [folder])
    found = found[[(pattern or "").casefold() in str(path).casefold() for path in found["path"]]]
    if found.empty:
        st.caption("No runs or archives here." if not pattern else "No name contains this text.")
        return
    names = fmt.clipped_all([services.path_in_roots(path) for path in found["path"]], _WIDTH)
    lines = list(zip(map(Path, found["path"]), found["kind"], strict=True))
    rows = _table(found, names)
    st.caption("Click a name to open it. Tick two runs to compare them.")
    if n_more:
        st.caption(f"{fmt.count(n_more)} more are not listed; open their folder, or type a path.")
    clicked = st.session_state.pop(_CLICKED, None)
    if len(rows) == 1 and st.button("Open it", icon=":material/play_arrow:", key="runs.open"):
        clicked = rows[0]
    if clicked is not None:
        path, kind = lines[clicked]
        if kind == "folder":
            _go(path)
        open_path(path)
    if len(rows) == 2:
        first, second = (answer(partial(services.load_whole, str(lines[row][0]))) for row in rows)
        if first is not None and second is not None:
            _overlaid(first, second, [names[row] for row in rows])


def _current_folder() -> Path | None:
    """Return the displayed folder if it still exists; None for all roots together."""
    roots = settings().roots
    remembered = st.session_state.get(_FOLDER)
    if isinstance(remembered, str):
        path = Path(remembered).resolve()
        if path.is_dir() and settings().allows(path):
            return path
    return roots[0] if len(roots) == 1 else None


def _go(folder: Path | None) -> NoReturn:
    """Show another folder."""
    st.session_state[_FOLDER] = folder and str(folder)
    st.rerun()


def _table(found: pd.DataFrame, names: Sequence[str]) -> list[int]:
    """Draw the table, and return the ticked rows."""
    table = found.drop(columns="path")
    table.insert(0, "name", names)
    for name in _COUNTS:
        table[name] = table[name].astype("Int64")
    key = f"runs.table.{hash(tuple(names))}"  # In another list, the same row is another run.

    def picked() -> None:
        chosen = st.session_state[key]["selection"]
        st.session_state[_CLICKED] = next((row for row, column in chosen["cells"] if column == "name"), None)
        st.session_state[key] = {"selection": {**chosen, "cells": []}}

    listing.show(
        table,
        "runs",
        alt="Runs and archives with steps, parameters, sizes, ratio, bits per weight, drop and last metric",
        formats={"last value": listing.SMALL},
        helps={
            "ratio": "Raw over stored bytes, of the archive or of the one beside the run",
            "steps not archived": "Steps of a run that the archive beside it lacks",
        },
        hidden=[name for name in table if table[name].isna().all()],
        key=key,
        on_select=picked,
        selection_mode=["multi-row", "single-cell"],
    )
    return list(st.session_state[key]["selection"]["rows"])


def _overlaid(first: Subject, second: Subject, names: list[str]) -> None:
    """Draw the metrics that both runs logged, and lead to the comparison of their weights."""
    shared = [name for name in first.log if name in second.log][:_PANELS]
    log = {
        f"{name} · {label}": run.log[name]
        for name in shared
        for run, label in ((first, names[0]), (second, names[1]))
    }
    if shared:
        groups = {name: [f"{name} · {label}" for label in names] for name in shared}
        chart(log_figure(log, groups), "runs.curves", f"By step, of both runs: {', '.join(shared)}")
        st.caption(f"Solid: {fmt.markdown(names[0])}. Dashed: {fmt.markdown(names[1])}.")
    else:
        st.caption("The two runs share no logged metric.")
    common = sorted(set(first.steps) & set(second.steps))
    shared_steps = f"{fmt.counted(len(common), 'step')} in common" if common else "No step in common"
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Compare their weights", icon=":material/arrow_forward:", key="runs.two"):
            state.set_run(str(first.path))
            state.go_to("run", drawer="compare", compared="runs", other=str(second.path))
        st.caption(fmt.markdown(f"{shared_steps}; compared tensor by tensor at the last one."))


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
        shown = services.load_subject(str(entry.path))
    except ServiceError as error:
        return row | {"problem": error.problem.what}
    archive = shown.archive
    metric = main_curve(shown.log) or next((name for name, series in shown.log.items() if series), "")
    row |= {
        "kind": shown.kind,
        "steps": len(shown.steps) + shown.n_unread,
        "bytes on disk": entry.nbytes if shown.n_unread else shown.total_bytes,
        "parameters": shown.n_parameters,
        "last step": shown.steps[-1] if shown.steps else None,
        "metric": metric,
        "last value": shown.log[metric][-1][1] if metric else None,
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
