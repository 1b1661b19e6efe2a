"""Watching a run while it grows: a cheap look at its folder, and the page anew once a checkpoint is there."""

from __future__ import annotations

from typing import Final, NamedTuple

import streamlit as st
from inshrink_app import services
from inshrink_app.services.headers import files_stamp
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = ["is_on", "show"]

SECONDS: Final = 3.0
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


def show(shown: Subject) -> None:
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
        on_change=_switched,
        help="New checkpoints appear by themselves, here and on the other page that has this switch.",
    )


def _switched() -> None:
    """Remember the switch for other pages; the widget's own value goes with its page."""
    st.session_state[_SWITCH] = st.session_state[_CONTROL]


@st.fragment(run_every=SECONDS)
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
