"""Watching a folder: the page is drawn anew when a checkpoint comes."""

from __future__ import annotations

from typing import Final, NamedTuple

import streamlit as st
from inshrink_app import services
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.headers import files_stamp

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


def badge(shown: Subject) -> None:
    """Draw the badge while a folder is watched; a file does not grow."""
    found = services.opened(str(shown.path)) if shown.place.is_dir() else None
    if found is not None and found.stamp is not None and is_on():  # Of too many files a look is not cheap.
        with st.container(width="content"):
            look(str(shown.path), found.token, found.stamp)


def switch(shown: Subject) -> None:
    """Draw the switch."""
    if shown.place.is_dir() and services.opened(str(shown.path)).stamp is not None:
        st.toggle(
            "Watch for new checkpoints",
            is_on(),
            key=_CONTROL,
            # The widget's own value goes with its page.
            on_change=lambda: st.session_state.update({_SWITCH: st.session_state[_CONTROL]}),
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
