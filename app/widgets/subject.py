"""What every page about a run begins with: the header, or why there is nothing to show."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import ServiceError, Subject
from inshrink_app.widgets import fmt, header, problem
from inshrink_app.widgets.layout import answer, section


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
            with st.container(horizontal=True):
                _lead_away("Open another run")
                is_archive = path.endswith(".inshrink") and rescue is None
                if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
                    state.go_to("archives")
        return None
    if state.takes_given():
        services.remember(subject)
    st.set_page_config(page_title=f"{fmt.printable(subject.name)} · {page}")
    header.show(subject, watched=watched)
    if text := state.log_choice(path):
        subject = answer(lambda: services.with_log(subject, text)) or subject
    if not subject.steps:
        _no_steps(subject)
        return None
    return subject


def _lead_away(label: str) -> None:
    """Offer to leave for the place where runs are opened."""
    if st.button(label, type="primary", icon=":material/folder_open:"):
        state.set_run(None)
        state.go_to("open")


def _no_run(page: str) -> None:
    """Say that a run must be opened first, and lead there."""
    st.title(page, anchor=False)
    with section("No run is open"):
        st.write(
            "Open a training run or an archive first. The bundled sample takes one click. Nothing is "
            "uploaded: the explorer reads files on this computer."
        )
        _lead_away("Choose a run")


def _no_steps(subject: Subject) -> None:
    """Say that the archive holds nothing yet, and how to fill it."""
    with section("This archive is empty"):
        st.write("It is intact and holds no steps yet. Add a run to it:")
        st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
        _lead_away("Open another run")
