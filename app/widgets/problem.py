"""The panel of an error: problem, location and remedy."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import streamlit as st
from inshrink_app.model import Problem
from inshrink_app.widgets import fmt

_MAX_NAMED = 10
_log = logging.getLogger(__name__)


def show(problem: Problem) -> None:
    """Draw a problem. Every part is untrusted, since it may contain paths and names from files."""
    with st.container(border=True):
        st.error(f"**{fmt.markdown(fmt.sentence(problem.what))}**", icon=":material/error:")
        if problem.where:
            st.code(problem.where, language=None, wrap_lines=True)
        if problem.remedy:
            st.markdown(f"**What to do:** {fmt.markdown(fmt.sentence(problem.remedy))}")
        if problem.detail:
            with st.expander("Details"):
                st.code(problem.detail, language=None, wrap_lines=True)


def show_unreadable(rows: Sequence[tuple[str, str]], what_follows: str) -> None:
    """Draw the unreadable checkpoints of a run and their consequence; nothing without any."""
    if not rows:
        return
    some = rows[:_MAX_NAMED]
    more = f"\n- and {fmt.count(len(rows) - len(some))} more" if len(rows) > len(some) else ""
    listed = "".join(f"\n- **{fmt.markdown(path)}**: {fmt.markdown(reason)}" for path, reason in some)
    st.error(
        f"{fmt.counted(len(rows), 'checkpoint')} cannot be read. {what_follows}\n{listed}{more}",
        icon=":material/error:",
    )


def show_unexpected(error: Exception) -> bool:
    """Draw an error of the explorer itself; its traceback goes to the terminal, not to the page.

    Returns
    -------
    bool
        True, so that Streamlit does not draw it itself.
    """
    _log.error("a page failed", exc_info=error)
    show(
        Problem(
            f"the explorer failed on this page ({type(error).__name__})",
            remedy="reload the page; if it fails again, the terminal that it was started from shows more",
        )
    )
    return True
