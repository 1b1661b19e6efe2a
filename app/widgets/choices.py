"""Choices that a link carries: they begin with what it says, or the session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st
from inshrink_app import state
from inshrink_app.widgets.formatting import count_text, inked

__all__ = ["ends_of_range", "one_of_few", "one_of_many"]


def one_of_few(
    page: str,
    label: str,
    key: str,
    options: Mapping[str, str],
    default: str,
    tip: str | None = None,
    **look: Any,
) -> str:
    """Draw one choice of a few, side by side.

    Parameters
    ----------
    page, key
        Name the widget, and `key` its word in a link.
    label, options, tip
        What is asked, the answers and what to call each, and what stands behind the question.
    default
        The answer to begin with.
    **look
        For `st.segmented_control`.
    """
    widget = f"{page}.{key}"
    # None where a click takes back the answer, or comes before the first drawing has ended.
    if st.session_state.get(widget) not in options:
        st.session_state[widget] = state.choice(key, list(options), default)
    chosen = st.segmented_control(
        label, list(options), format_func=lambda name: inked(options[name]), key=widget, help=tip, **look
    )
    state.publish(**{key: str(chosen)})
    return str(chosen)


def one_of_many(
    page: str, label: str, key: str, options: Mapping[str, str], default: str, tip: str | None = None
) -> str:
    """Draw one choice of many, as a list; what is chosen goes where it is no option any more."""
    widget = f"{page}.{key}"
    if st.session_state.get(widget) not in options:
        st.session_state[widget] = state.choice(key, list(options), default)
    chosen = st.selectbox(label, list(options), format_func=options.__getitem__, key=widget, help=tip)
    state.publish(**{key: str(chosen)})
    return str(chosen)


def ends_of_range(page: str, steps: Sequence[int]) -> tuple[int, int]:
    """Draw the first and the last of a range of steps; all of them to begin with."""
    first, last = st.select_slider(
        "From and to",
        steps,
        value=(steps[0], steps[-1]),
        format_func=count_text,
        key=f"{page}.range",
    )
    return first, last
