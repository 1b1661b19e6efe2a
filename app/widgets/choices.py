"""Choices that a link carries, and choices among the installed codecs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st
from inshrink_app import state
from inshrink_app.widgets import fmt

from inshrink_core.codec import get_codec, weight_codecs


def one_of_few(
    page: str,
    label: str,
    key: str,
    options: Mapping[str, str],
    default: str,
    tip: str | None = None,
    draw: Callable[..., Any] = st.segmented_control,
    **look: Any,
) -> str:
    """Draw a choice among a few options, side by side; the default replaces an option that no longer exists.

    Parameters
    ----------
    page, key
        Names of the widget; `key` is also its word in a link.
    label, options, tip
        The question, the options with their labels, and the help text.
    default
        The initial option.
    draw
        Draws it.
    **look
        Passed to `draw`.
    """
    widget = f"{page}.{key}"
    named = options
    if draw is st.segmented_control:
        named, look = {name: fmt.inked(text) for name, text in options.items()}, {"required": True} | look
    # None if a click deselects the option, or comes before the first run has ended.
    if st.session_state.get(widget) not in options or state.went_back():
        st.session_state[widget] = state.choice(key, list(options), default)
    chosen = str(draw(label, list(options), format_func=named.__getitem__, key=widget, help=tip, **look))
    state.publish(**{key: chosen})
    return chosen


pick_one: Callable[..., Any] = functools.partial(st.selectbox, filter_mode="contains")
pick_several: Callable[..., Any] = functools.partial(st.multiselect, filter_mode="contains", select_all=False)
"""A list that filters by a contiguous substring; Enter takes only the first match."""

one_of_many = functools.partial(one_of_few, draw=pick_one)
"""Draw one choice of many, as a list."""


def ends_of_range(page: str, steps: Sequence[int], usual: Sequence[int] = ()) -> tuple[int, int]:
    """Draw the first and last step of a range; initially those of the usual steps, else all."""
    known = [step for step in usual if step in steps] or steps
    first, last = st.select_slider(
        "From and to", steps, value=(known[0], known[-1]), format_func=fmt.count, key=f"{page}.range"
    )
    return first, last


def codec_labels(*, searched: bool = False) -> dict[str, str]:
    """Return the label of each codec of weights, by its name; the default comes first.

    Parameters
    ----------
    searched
        Only codecs with a parameter to search.
    """
    kinds = {name: get_codec(name) for name in weight_codecs()}
    return {
        name: kind.label or name for name, kind in kinds.items() if kind.tuning is not None or not searched
    }
