"""Watching of a folder: a new checkpoint redraws the page."""

from __future__ import annotations

from typing import Final, NamedTuple

import streamlit as st
from inshrink_app import services
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.headers import files_stamp

_SECONDS: Final = 3.0
"""Time between two checks. A file is finished if it does not change between them."""

_SWITCH = "watch"
_CONTROL = "watch.control"
_LOOKS = "watch.looks"


class _Looks(NamedTuple):
    """Stamps of the files: the last processed one, and the one of the last check."""

    known: str
    seen: str


def is_on() -> bool:
    """Return whether the user enabled watching."""
    return bool(st.session_state.get(_SWITCH, True))


def badge(shown: Subject) -> None:
    """Draw the badge while a folder is watched; single files are not watched."""
    found = services.opened(str(shown.path)) if shown.place.is_dir() else None
    if found is not None and found.stamp is not None and is_on():  # A check of too many files is slow.
        with st.container(width="content"):
            look(str(shown.path), found.token, found.stamp)


def switch(shown: Subject) -> None:
    """Draw the switch."""
    if shown.place.is_dir() and services.opened(str(shown.path)).stamp is not None:
        st.toggle(
            "Watch for new checkpoints",
            is_on(),
            key=_CONTROL,
            # The widget's own value is lost with its page.
            on_change=lambda: st.session_state.update({_SWITCH: st.session_state[_CONTROL]}),
        )


@st.fragment(run_every=_SECONDS)
def look(path: str, token: str, stamp: str) -> None:
    """Check names, sizes and times of the files; rerun the page if a checkpoint is new.

    Parameters
    ----------
    path
        The run or archive.
    token, stamp
        Token and stamp of the displayed subject (`services.Opened`).
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
        except ServiceError:  # Files vanish while a trainer cleans up; the next check is conclusive.
            looks.pop(path)
    st.badge("watching", icon=":material/visibility:", color="green")
