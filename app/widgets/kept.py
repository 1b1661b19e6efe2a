"""One thing a session keeps from one drawing of a page to the next, as long as what it is made of stays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import streamlit as st

__all__ = ["kept"]

Made = TypeVar("Made")


def kept(slot: str, of: object, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what was made last time, or make it: one thing a slot, so that memory stays bounded.

    Parameters
    ----------
    slot
        Where in the session.
    of
        The object it is made of: the very same one, not an equal one.
    key
        What else it depends on.
    make
        Makes it; nobody may change it afterwards.
    """
    known = st.session_state.get(slot)
    if known is not None and known[0] is of and known[1] == key:
        made: Made = known[2]
        return made
    made = make()
    st.session_state[slot] = (of, key, made)
    return made
