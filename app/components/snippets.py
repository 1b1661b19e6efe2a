"""The same result without the explorer: the command and the Python lines for what is on screen."""

from __future__ import annotations

import streamlit as st

__all__ = ["show"]


def show(command: str, python: str) -> None:
    """Offer a command line and Python lines, each with its button to copy."""
    with st.expander("Do this without the explorer", icon=":material/terminal:"):
        st.caption("Command line")
        st.code(command, language="bash", wrap_lines=True)
        st.caption("Python")
        st.code(python, language="python", wrap_lines=True)
