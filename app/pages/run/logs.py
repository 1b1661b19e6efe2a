"""The metrics of a training from another file, by choice of columns."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.services import LogChoice
from inshrink_app.widgets import fmt
from inshrink_app.widgets.choices import pick_one, pick_several
from inshrink_app.widgets.layout import answer

_FILE = "log.file"
_DROPS = "log.drops"
_WIDTH = 60
_MOST_CHOSEN = 12


def show(shown: Subject) -> None:
    """Draw the choice."""
    used = services.chosen_log(state.log_choice(state.run_path() or ""))
    file = _file(shown, used) or ""
    found = answer(lambda: services.metrics_of(file), "Reading columns") if file else None
    if found is None:
        return
    if found.note:
        st.caption(fmt.markdown(fmt.sentence(found.note)))
    before = used if used is not None and used.file == file else None
    first = before.step_column if before is not None else found.step_column
    place = found.columns.index(first) if first in found.columns else None
    step = pick_one("Column of the steps", found.columns, index=place, key=f"log.step.{file}")
    usual = [name for name in before.columns if name in found.columns] if before is not None else []
    usual = usual or list(found.metrics[:_MOST_CHOSEN])
    columns = pick_several("Metrics", found.columns, default=usual, key=f"log.columns.{file}")
    columns = [name for name in columns if name != step]
    if step is None or not columns:
        st.caption("Choose the column of the steps, and at least one metric.")
        return
    choice = LogChoice(file, step, tuple(columns))
    log = answer(lambda: services.log_of(choice))
    if log is not None:
        steps = sorted({step for series in log.values() for step, _ in series})
        n_values = sum(len(series) for series in log.values())
        st.caption(f"{fmt.counted(n_values, 'value')} at {fmt.steps(steps)}.")
    with st.container(horizontal=True):
        is_used = choice == used
        if st.button(
            "Use these metrics", icon=":material/check:", key="log.use", disabled=is_used or log is None
        ):
            _choose(choice.text)
        if used is not None and st.button("Use the run's own", icon=":material/undo:", key="log.own"):
            _choose("")


def _choose(text: str) -> None:
    state.choose_log(state.run_path() or "", text)
    st.rerun()


def _file(shown: Subject, used: LogChoice | None) -> str | None:
    """Let the user choose, type or drop a file."""
    turn = st.session_state.setdefault(_DROPS, 0)
    key = f"{_FILE}.{shown.path}"
    uploaded = st.file_uploader(
        "Drop a file: CSV, JSON lines, or an event file of TensorBoard", key=f"{_DROPS}.{turn}"
    )
    if uploaded is not None:
        stored = answer(lambda: services.keep_log(uploaded.name, uploaded))
        if stored is not None:
            st.session_state[_DROPS] += 1
            st.session_state[key] = str(stored)
            st.rerun()  # The area gets a new key, or the next file would go to this one.
    paths = [str(path) for path in services.log_files(shown)]
    chosen = st.session_state.get(key) or (used.file if used is not None else None)
    options = list(dict.fromkeys([*paths, *([chosen] if chosen else [])]))
    labels = dict(
        zip(options, fmt.elided_all([_label(path, shown) for path in options], _WIDTH), strict=True)
    )
    if key not in st.session_state:
        st.session_state[key] = chosen or next(iter(options), None)
    file: str | None = pick_one(
        "File",
        options,
        format_func=lambda path: labels.get(path, path),
        key=key,
        accept_new_options=True,
        placeholder="Choose a file, or type its path",
        help="Files of metrics in the run's folder and beside it, and those that were dropped.",
    )
    return file


def _label(path: str, shown: Subject) -> str:
    """Return a path relative to the folder of the run; for a dropped file, its name."""
    if services.is_dropped(Path(path)):
        return f"{Path(path).name} (dropped)"
    folder = shown.place.parent
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path
