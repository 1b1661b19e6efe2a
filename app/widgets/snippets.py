"""The same result without the explorer: the command and the Python lines for what is on screen."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from inshrink_app.jobs.commands import python_text, shell_text

__all__ = ["of", "show"]


def of(commands: Sequence[Sequence[str]], key: str = "snippets") -> None:
    """Offer commands, which are the very ones that a job of the page runs, and the same in Python.

    Parameters
    ----------
    commands
        The words after `inshrink`, of each.
    key
        Tells two on one page apart.
    """
    show(shell_text(commands), python_text(commands), key)


@st.fragment
def show(command: str, python: str, key: str = "snippets") -> None:
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
    panel = st.expander(
        "Do this without the explorer", icon=":material/terminal:", key=key, on_change="rerun"
    )
    if not panel.open:
        return
    with panel:
        st.caption("Command line")
        st.code(command, language=None, wrap_lines=True)
        st.caption("Python")
        st.code(python, language=None, wrap_lines=True)
