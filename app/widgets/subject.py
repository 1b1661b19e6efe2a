"""The head of every page about a run: its name, the way to another one, and whether it is watched."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final, NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.roots import Address
from inshrink_app.services.headers import files_stamp
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.layout import answer, section

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
    if state.takes_given():
        services.remember(subject)
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
        state.go_to("open")


def _ways_out(*, is_archive: bool) -> None:
    """Lead away from what cannot be opened: to another run, and to what is left of an archive."""
    with st.container(horizontal=True):
        open_another()
        if is_archive and st.button("See what is left", icon=":material/inventory_2:"):
            state.go_to("archive")


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


def _head(subject: Subject, *, watched: bool) -> None:
    """Name the run, and offer to read it anew."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title(fmt.markdown(fmt.elided(subject.name, _NAME_WIDTH)), anchor=False, width="content")
        with st.container(
            horizontal=True, horizontal_alignment="right", vertical_alignment="center", width=_HEAD_WIDTH
        ):
            if watched:
                _watch(subject)
            if st.button(
                "Refresh",
                icon=":material/refresh:",
                type="tertiary",
                help="Read the headers again, to see checkpoints written since.",
            ):
                services.refresh(subject.path)
                st.rerun()
    kind = "Archive" if subject.kind == "archive" else f"Run · {subject.format}"
    st.caption(fmt.markdown(f"{kind} · {fmt.steps(subject.steps)} · {subject.path}"))
    if watched and isinstance(subject.place, Address):
        st.caption("At an address, what is new is seen by Refresh; folders can be watched.")


def _no_steps(subject: Subject) -> None:
    """Say that the archive holds nothing yet, and how to fill it."""
    with section("This archive is empty"):
        st.write("It is intact and holds no steps yet. Add a run to it:")
        st.code(f"inshrink compress RUN -o {shlex.quote(str(subject.path))}", language=None)
        open_another()


_SECONDS: Final = 3.0
"""Between two looks. A file counts as finished when it has not changed from one to the next."""

_SWITCH = "watch"
_CONTROL = "watch.control"
_LOOKS = "watch.looks"


class _Looks(NamedTuple):
    """Stamps of the files: as they are accounted for, and as they were at the last look."""

    known: str
    seen: str


def is_on() -> bool:
    """Return whether the reader lets runs be watched."""
    return bool(st.session_state.get(_SWITCH, True))


def _watch(shown: Subject) -> None:
    """Draw the switch, and the badge while a folder is watched; a file does not grow."""
    if not shown.place.is_dir():
        return
    found = services.opened(str(shown.path))
    if found.stamp is None:  # Too many files for a look to be cheap.
        return
    if is_on():
        with st.container(width="content"):
            look(str(shown.path), found.token, found.stamp)
    st.toggle(
        "Watch",
        is_on(),
        key=_CONTROL,
        # The widget's own value goes with its page.
        on_change=lambda: st.session_state.update({_SWITCH: st.session_state[_CONTROL]}),
        help="New checkpoints appear by themselves, here and on the other page that has this switch.",
    )


@st.fragment(run_every=_SECONDS)
def look(path: str, token: str, stamp: str) -> None:
    """Look at names, sizes and times of the files; draw the page anew where there is another checkpoint.

    Parameters
    ----------
    path
        The run or archive.
    token, stamp
        Of what the page shows (`services.Opened`).
    """
    looks: dict[str, _Looks] = st.session_state.setdefault(_LOOKS, {})
    last = looks.get(path, _Looks("", ""))
    now = files_stamp(services.place_of(services.resolve(path)))
    if now is not None and now not in (stamp, last.known):
        if now != last.seen:
            looks[path] = last._replace(seen=now)
            st.badge("new files", icon=":material/hourglass_top:", color="orange")
            return
        looks[path] = _Looks(now, now)
        try:
            if services.look_again(services.resolve(path)) != token:
                st.rerun()
        except ServiceError:  # Files vanish while a trainer tidies up; the next look tells.
            looks.pop(path)
    st.badge("watching", icon=":material/visibility:", color="green")
