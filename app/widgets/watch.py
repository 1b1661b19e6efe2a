"""Watching of a folder: a new checkpoint redraws the page."""

from __future__ import annotations

from typing import Final

import streamlit as st
from inshrink_app import services
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services.headers import files_stamp

_SECONDS: Final = 3.0
"""Time between two checks. A file is finished if it does not change between them."""

_SEEN, _DONE = "watch.seen", "watch.done"
"""Keys of the last stamp of each path, and of the stamps that were read."""


def show(shown: Subject) -> None:
    """Watch a folder; single files, and folders of too many files, are not watched."""
    found = services.opened(str(shown.path)) if shown.place.is_dir() else None
    if found is not None and found.stamp is not None:
        with st.container(width="content"):
            look(str(shown.path), found.token, found.stamp)


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
    seen: dict[str, str] = st.session_state.setdefault(_SEEN, {})
    done: set[str] = st.session_state.setdefault(_DONE, set())
    now = files_stamp(services.place_of(services.resolve(path)))
    if now is None or now == stamp or now in done:
        return
    if seen.get(path) != now:
        seen[path] = now
        st.badge("new files", icon=":material/hourglass_top:", color="orange")
        return
    done.add(now)
    try:
        services.refresh(services.resolve(path))
        if services.opened(path).token != token:
            st.rerun()
    except ServiceError:  # Files vanish while a trainer cleans up; the next check is conclusive.
        done.discard(now)
