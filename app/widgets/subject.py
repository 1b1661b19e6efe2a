"""The start of every page about a run: the header, or why nothing can be shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import remember_recent
from inshrink_app.widgets import fmt, header, problem
from inshrink_app.widgets.layout import answer, section


def require(
    page: str, rescue: Callable[[str], bool] | None = None, *, watched: bool = False
) -> Subject | None:
    """Draw the header of a page and return its subject; None if the page has nothing more to show.

    Parameters
    ----------
    page
        Title of the page without a run.
    rescue
        Draws the readable parts of a damaged subject, given its path; returns whether any exist.
    watched
        Whether a new checkpoint redraws the page.
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
            with st.container(horizontal=True):
                _lead_away("Open another run")
                is_archive = path.endswith(".inshrink") and rescue is None
                if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
                    state.go_to("archives")
        return None
    if state.is_given():
        remember_recent(subject.path, subject.kind)
    st.set_page_config(page_title=f"{fmt.printable(subject.name)} · {page}")
    header.show(subject, watched=watched)
    if text := state.log_choice(path):
        subject = answer(lambda: services.with_log(subject, text)) or subject
    if not subject.steps:
        _no_steps(subject)
        return None
    return subject


def _lead_away(label: str) -> None:
    """Offer a link to the place that opens runs."""
    if st.button(label, type="primary", icon=":material/folder_open:"):
        state.set_run(None)
        state.go_to("open")


def _no_run(page: str) -> None:
    """Draw that a run must be opened first, with a link."""
    st.title(page, anchor=False)
    with section("No run is open"):
        st.write(
            "Open a training run or an archive first. The bundled sample takes one click. Nothing is "
            "uploaded: the explorer reads files on this computer."
        )
        _lead_away("Choose a run")


def _no_steps(subject: Subject) -> None:
    """Draw that the archive has no steps yet, and how to write some."""
    with section("This archive is empty"):
        st.write("It is intact and holds no steps yet. Add a run to it:")
        st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
        _lead_away("Open another run")
