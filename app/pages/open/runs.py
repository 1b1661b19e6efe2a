"""All runs and archives as one table, and two of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.subject import Subject
from inshrink_app.pages.open import shelf
from inshrink_app.widgets import fmt, layout, listing
from inshrink_app.widgets.layout import answer, panels, section

_WIDTH = 48
_PANELS = 4
_WHOLE = (
    *("steps", "last step", "parameters"),
    *("bytes on disk", "bytes of the archive", "steps not archived"),
)
_HEIGHT = 240
_CLICKED = "runs.clicked"


def show(open_path: Callable[[Path], None]) -> None:
    """Draw the table, once the page is on the screen: reading all headers takes a while.

    Parameters
    ----------
    open_path
        Opens a run and leaves the page.
    """
    with section("Runs and archives"):
        layout.below("runs", partial(_listed, open_path), height=_HEIGHT)


def _listed(open_path: Callable[[Path], None]) -> None:
    """Draw what is in the table."""
    with st.spinner("Reading headers…"):
        found, n_more = shelf.shelf()
    pattern = st.text_input(
        "Filter by name", placeholder="Filter by name", icon=":material/search:", key="runs.filter"
    )
    found = found[[(pattern or "").casefold() in str(path).casefold() for path in found["path"]]]
    if found.empty:
        st.caption("No run or archive is there." if not pattern else "No name contains this text.")
        return
    names = fmt.elided_all([services.path_in_roots(path) for path in found["path"]], _WIDTH)
    paths = list(map(Path, found["path"]))
    rows = _table(found, names)
    st.caption("A click on a name opens it; two that are ticked are compared.")
    if n_more:
        st.caption(f"{fmt.counted(n_more, 'more')} are not read; open their folder below.")
    if (clicked := st.session_state.pop(_CLICKED, None)) is not None:
        open_path(paths[clicked])
    if len(rows) == 1 and st.button("Open it", icon=":material/play_arrow:", key="runs.open"):
        open_path(paths[rows[0]])
    if len(rows) == 2:
        first, second = (answer(partial(services.load_subject, str(paths[row]))) for row in rows)
        if first is not None and second is not None:
            _overlaid(first, second, [names[row] for row in rows])


def _table(found: pd.DataFrame, names: Sequence[str]) -> list[int]:
    """List them, and return the rows that are ticked; a click on a heading sorts."""
    table = found.drop(columns="path")
    table.insert(0, "name", names)
    for name in _WHOLE:
        table[name] = table[name].astype("Int64")
    key = f"runs.table.{hash(tuple(names))}"  # A row that is ticked is another run's in another list.

    def picked() -> None:
        chosen = st.session_state[key]["selection"]
        st.session_state[_CLICKED] = next((row for row, column in chosen["cells"] if column == "name"), None)
        st.session_state[key] = {"selection": {**chosen, "cells": []}}

    listing.show(
        table,
        "runs",
        alt="Runs and archives with steps, parameters, sizes, ratio, bits per weight, drop and last metric",
        formats={
            "ratio": listing.RATIO,
            "bits per weight": "%.2f",
            "restore cost": listing.SHARE,
            "largest drop": listing.SHARE,
            "last value": "%.4g",
        },
        helps={
            "ratio": "Raw over stored bytes of everything, of the archive or of the one beside the run",
            "steps not archived": "Steps of a run that no archive beside it holds",
            "restore cost": "Largest that was measured of the archive, as a share of the loss",
            "largest drop": "Relative, the largest that was measured of the archive",
        },
        hidden=[] if found["problem"].notna().any() else ["problem"],
        key=key,
        on_select=picked,
        selection_mode=["multi-row", "single-cell"],
    )
    return list(st.session_state[key]["selection"]["rows"])


def _overlaid(first: Subject, second: Subject, names: list[str]) -> None:
    """Draw the metrics that both have logged over each other, and lead to what differs in the weights."""
    shared = [name for name in first.log if name in second.log][:_PANELS]
    log = {
        f"{name} · {label}": one.log[name]
        for name in shared
        for one, label in ((first, names[0]), (second, names[1]))
    }
    if shared:
        groups = {name: [f"{name} · {label}" for label in names] for name in shared}
        panels(log, groups, "runs.curves", legends=False)
        st.caption(f"Solid: {fmt.markdown(names[0])}. Dashed: {fmt.markdown(names[1])}.")
    else:
        st.caption("They have logged no metric of the same name.")
    common = sorted(set(first.steps) & set(second.steps))
    said = f"{fmt.counted(len(common), 'step')} in common" if common else "No step in common"
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "How far apart are their weights? Sensitivity",
            icon=":material/arrow_forward:",
            key="runs.two",
        ):
            state.set_run(str(first.path))
            state.remember(view="runs", other=str(second.path))
            state.go_to("sensitivity")
        st.caption(fmt.markdown(f"{said}; tensor by tensor, at the last of them."))
