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
            _ways_out(is_archive=path.endswith(".inshrink") and rescue is None)
        return None
    if state.takes_given():
        services.remember(subject)
    st.set_page_config(page_title=f"{fmt.printable(subject.name)} · {page}")
    header.show(subject, watched=watched)
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
        state.go_to("open")


def _ways_out(*, is_archive: bool) -> None:
    """Lead away from what cannot be opened: to another run, and to what is left of an archive."""
    with st.container(horizontal=True):
        open_another()
        if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
            state.go_to("archives")


def _no_run(page: str) -> None:
    """Say that a run must be opened first, and lead there."""
    st.title(page, anchor=False)
    with section("No run is open"):
        st.write(
            "Open a training run or an archive first. The bundled sample takes one click. Nothing is "
            "uploaded: the explorer reads files on this computer."
        )
        choose_run()


def choose_run() -> None:
    """Lead to where a run is opened."""
    if st.button("Choose a run", type="primary", icon=":material/folder_open:"):
        state.go_to("open")


def _no_steps(subject: Subject) -> None:
    """Say that the archive holds nothing yet, and how to fill it."""
    with section("This archive is empty"):
        st.write("It is intact and holds no steps yet. Add a run to it:")
        st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
        open_another()
