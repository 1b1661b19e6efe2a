"""The end of a page: what to do next, as a button that carries along what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import streamlit as st
from inshrink_app import state

__all__ = ["EXPORT", "Next", "offer"]


_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Next(NamedTuple):
    """One way on.

    Parameters
    ----------
    label
        What the button says.
    page
        Where it leads.
    why
        What is done there.
    carried
        Choices of that page, as its link has them.
    widgets
        Values of widgets of that page, by key, for choices that no link carries.
    """

    label: str
    page: str
    why: str
    carried: Mapping[str, str] = _NOTHING
    widgets: Mapping[str, Any] = _NOTHING


EXPORT: Final = Next("Write an archive: Export", "export", "All steps, a range, or one for transfer.")


def offer(*ways: Next) -> None:
    """Draw the way on, and others beside it."""
    with st.container(border=True):
        st.header("Next", anchor=False)
        for way in ways:
            with st.container(horizontal=True, vertical_alignment="center"):
                if st.button(way.label, icon=":material/arrow_forward:", key=f"next.{way.page}"):
                    state.remember(**way.carried)
                    st.session_state.update(dict(way.widgets))
                    st.switch_page(f"pages/{way.page}/view.py")
                st.caption(way.why)
