"""The head of every page about a run: its name, the way to another one, and what to show without one."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import streamlit as st
from inshrink_app import services, state
from inshrink_app.widgets import problem, watching
from inshrink_app.widgets.formatting import elide, markdown_text, steps_text
from inshrink_app.widgets.layout import answer
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = ["open_another", "require"]

OPEN_PAGE = "pages/open/view.py"
ARCHIVE_PAGE = "pages/archive/view.py"

_NAME_WIDTH = 48
_HEAD_WIDTH = 340
"""Pixels beside the title: in one line, also where the page is narrow."""


def require(
    page: str, rescue: Callable[[str], bool] | None = None, *, watched: bool = False
) -> Subject | None:
    """Draw the head of a page and return what it is about; None where the page has nothing more to show.

    Parameters
    ----------
    page
        What the page is called while there is no run to name it after.
    rescue
        Draws what is left of something that cannot be opened as a whole, given its path; returns whether it
        did.
    watched
        Whether the page is drawn anew when a checkpoint comes.
    """
    path = state.run_path()
    if path is None:
        _no_run(page)
        return None
    state.publish(run=path)
    try:
        with st.spinner("Reading headers…"):
            subject = services.load_subject(path)
    except ServiceError as error:
        st.title(page, anchor=False)
        problem.show(error.problem)
        if rescue is None or not rescue(path):
            _ways_out(is_archive=path.endswith(".inshrink") and rescue is None)
        return None
    _head(subject, watched=watched)
    if said := state.log_choice(path):
        chosen = answer(lambda: services.with_log(subject, said))
        subject = chosen or subject
    if not subject.steps:
        _no_steps(subject)
        return None
    return subject


def open_another() -> None:
    """Offer to leave this run for another one."""
    if st.button("Open another run", type="primary", icon=":material/folder_open:"):
        state.set_run(None)
        st.switch_page(OPEN_PAGE)


def _ways_out(*, is_archive: bool) -> None:
    """Lead away from what cannot be opened: to another run, and to what is left of an archive."""
    with st.container(horizontal=True):
        open_another()
        if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
            st.switch_page(ARCHIVE_PAGE)


def _no_run(page: str) -> None:
    """Say that a run must be opened first, and lead there."""
    st.title(page, anchor=False)
    with st.container(border=True):
        st.header("No run is open", anchor=False)
        st.write(
            "Open a training run or an archive first. The bundled sample takes one click. Nothing is "
            "uploaded: the explorer reads files on this computer."
        )
        if st.button("Choose a run", type="primary", icon=":material/folder_open:"):
            st.switch_page(OPEN_PAGE)


def _head(subject: Subject, *, watched: bool) -> None:
    """Name the run, and offer to read it anew."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title(markdown_text(elide(subject.name, _NAME_WIDTH)), anchor=False, width="content")
        with st.container(
            horizontal=True, horizontal_alignment="right", vertical_alignment="center", width=_HEAD_WIDTH
        ):
            if watched:
                watching.show(subject)
            if st.button(
                "Refresh",
                icon=":material/refresh:",
                type="tertiary",
                help="Read the headers again, to see checkpoints written since.",
            ):
                services.refresh(subject.path)
                st.rerun()
    kind = "Archive" if subject.kind == "archive" else f"Run · {subject.format}"
    st.caption(markdown_text(f"{kind} · {steps_text(subject.steps)} · {subject.path}"))


def _no_steps(subject: Subject) -> None:
    """Say that the archive holds nothing yet, and how to fill it."""
    with st.container(border=True):
        st.header("This archive is empty", anchor=False)
        st.write("It is intact and holds no steps yet. Add a run to it:")
        st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
        if st.button("Open another run", type="primary", icon=":material/folder_open:"):
            st.switch_page(OPEN_PAGE)
