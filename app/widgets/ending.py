"""The end of a page: the same without the explorer, and what to do next."""

from __future__ import annotations

import streamlit as st
from inshrink_app.jobs import Requests, python_text, shell_text
from inshrink_app.widgets.layout import folded


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
