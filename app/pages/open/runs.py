"""All runs and archives as one table, and two of them side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.subject import Subject
from inshrink_app.pages.open import shelf
from inshrink_app.pages.open.shelf import Listed
from inshrink_app.widgets import fmt, layout, listing
from inshrink_app.widgets.layout import answer, panels, section

_WIDTH = 48
_PANELS = 4
_WHOLE = (
    *("steps", "last step", "parameters"),
    *("bytes on disk", "bytes of the archive", "steps not archived"),
)
_HEIGHT = 240
_COLUMNS = {
    "kind": "kind",
    "steps": "steps",
    "not_archived": "steps not archived",
    "nbytes": "bytes on disk",
    "archive_bytes": "bytes of the archive",
    "ratio": "ratio",
    "restore_cost": "restore cost",
    "drop": "largest drop",
    "bits_per_weight": "bits per weight",
    "parameters": "parameters",
    "last_step": "last step",
    "metric": "metric",
    "value": "last value",
    "problem": "problem",
}


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
        found = shelf.shelf()
    pattern = st.text_input(
        "Filter by name", placeholder="Filter by name", icon=":material/search:", key="runs.filter"
    )
    rows = [row for row in found.rows if (pattern or "").casefold() in str(row.path).casefold()]
    if not rows:
        st.caption("No run or archive is there." if not pattern else "No name contains this text.")
        return
    _table(rows)
    if found.n_more:
        st.caption(f"{fmt.counted(found.n_more, 'more')} are not read; open their folder below.")
    _two(rows, open_path)


def _table(rows: list[Listed]) -> None:
    """List them; a click on a heading sorts."""
    table = pd.DataFrame(rows)[list(_COLUMNS)].rename(columns=_COLUMNS)
    table.insert(0, "name", fmt.elided_all([services.path_in_roots(row.path) for row in rows], _WIDTH))
    for name in _WHOLE:
        table[name] = table[name].astype("Int64")
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
        wide=["name"],
        helps={
            "ratio": "Raw over stored bytes of everything, of the archive or of the one beside the run",
            "steps not archived": "Of a run: steps that the archive beside it lacks; empty without one",
            "restore cost": "Largest that was measured of the archive, as a share of the loss",
            "largest drop": "Relative, the largest that was measured of the archive",
        },
        hidden=[] if any(row.problem for row in rows) else ["problem"],
    )


def _two(rows: list[Listed], open_path: Callable[[Path], None]) -> None:
    """Open one, or look at two side by side."""
    paths = [str(row.path) for row in rows if not row.problem]
    labels = dict(zip(paths, fmt.elided_all(paths, _WIDTH), strict=True))
    st.session_state["runs.chosen"] = [
        path for path in st.session_state.get("runs.chosen", []) if path in labels
    ]
    chosen = st.multiselect(
        "Open one, or compare two",
        paths,
        format_func=labels.__getitem__,
        max_selections=2,
        key="runs.chosen",
    )
    if len(chosen) == 1 and st.button("Open it", icon=":material/play_arrow:", key="runs.open"):
        open_path(Path(chosen[0]))
    if len(chosen) == 2:
        first, second = (_opened(path) for path in chosen)
        if first is not None and second is not None:
            _overlaid(first, second, [labels[path] for path in chosen])


def _opened(path: str) -> Subject | None:
    """Read the headers of a run; draw why not, where that fails."""
    return answer(lambda: services.load_subject(path))


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
