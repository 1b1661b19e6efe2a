"""The end of a page: the same without the explorer, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import streamlit as st
from inshrink_app import state
from inshrink_app.jobs import Requests, python_text, shell_text
from inshrink_app.widgets.layout import folded, section


def requests(asked: Requests, key: str = "snippets") -> None:
    """Offer requests, the very ones that a job of the page performs, for a shell and in Python.

    Parameters
    ----------
    asked
        One after the other.
    key
        Tells two on one page apart.
    """
    snippets(shell_text(asked), python_text(asked), key)


@st.fragment
def snippets(command: str, python: str, key: str = "snippets") -> None:
    """Offer a command line and Python lines, each with its button to copy.

    They are drawn when the panel is opened: what draws code in the browser is the largest script after the
    charts', and the page should not wait for it.

    Parameters
    ----------
    command, python
        What stands in them.
    key
        Tells two on one page apart.
    """

    def draw() -> None:
        for name, text in (("Command line", command), ("Python", python)):
            st.caption(name)
            st.code(text, language=None, wrap_lines=True)

    folded("Do this without the explorer", ":material/terminal:", key, draw)


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


ALLOCATE: Final = Next("Give layers their bits: Run", "run", "More bits or fewer, and what that costs.")
ARCHIVE: Final = Next("Open the archive", "archive", "Its chain, its checksums, and what can go.")
COMPARE: Final = Next(
    "Is it good enough? Restore & compare", "compare", "Measures what a restore really costs, step by step."
)
EXPORT: Final = Next("Write an archive: Export", "export", "All steps, a range, or one for transfer.")


def offer(*ways: Next) -> None:
    """Draw the way on, and others beside it."""
    with section("Next"):
        for way in ways:
            with st.container(horizontal=True, vertical_alignment="center"):
                if st.button(way.label, icon=":material/arrow_forward:", key=f"next.{way.page}"):
                    state.remember(**way.carried)
                    st.session_state.update(dict(way.widgets))
                    state.go_to(way.page)
                st.caption(way.why)
