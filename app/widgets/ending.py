"""The end of a page: equivalent code, and the next actions."""

from __future__ import annotations

import streamlit as st
from inshrink_app.jobs import Requests, python_text, shell_text
from inshrink_app.widgets.layout import folded


def requests(asked: Requests, key: str = "snippets") -> None:
    """Draw the requests that a job of the page performs, as shell commands and in Python.

    Parameters
    ----------
    asked
        The requests, in order.
    key
        Distinguishes two on one page.
    """
    snippets(shell_text(asked), python_text(asked), key)


@st.fragment
def snippets(command: str, python: str, key: str = "snippets") -> None:
    """Draw a command line and Python code, each with a copy button.

    They are drawn when the panel opens, since the browser's code viewer is the second largest script after
    the charts' and would delay the page.

    Parameters
    ----------
    command, python
        Their texts.
    key
        Distinguishes two on one page.
    """

    def draw() -> None:
        for name, text in (("Command line", command), ("Python", python)):
            st.caption(name)
            st.code(text, language=None, wrap_lines=True)

    folded("Do this without the explorer", ":material/terminal:", key, draw)
