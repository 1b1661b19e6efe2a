"""What is selected on the sensitivity page: `selection` decides, this keeps it in session and address."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from inshrink_app import state
from inshrink_app.selection import Event, Selection, apply_selection, link_event

__all__ = ["LAYER", "STEP", "WITHIN", "apply", "current", "from_chart", "go_within", "publish", "within"]

LAYER = "layer"
STEP = "step"
WITHIN = "in"

_SELECTION = "sensitivity.selection"
_PUBLISHED = "sensitivity.published"
_SOURCE = "sensitivity.source"
_STEPS = "sensitivity.steps"


def current(steps: Sequence[int]) -> Selection | None:
    """Return what is selected now, after the link had its say.

    A link counts where it differs from what this page wrote last: at the first visit, and when the reader
    goes back or types another address.
    """
    st.session_state[_STEPS] = tuple(steps)
    linked = (st.query_params.get(LAYER), st.query_params.get(STEP))
    if linked[0] is not None and linked != st.session_state.get(_PUBLISHED):
        apply(link_event(*linked))
    found: Selection | None = st.session_state.get(_SELECTION)
    if found is not None and found.step not in steps:
        apply(Event("link", found.layer, found.step))
        found = st.session_state.get(_SELECTION)
    return found


def apply(event: Event) -> None:
    """Take in what somebody did; also from within callbacks."""
    if event.source not in ("link", "close"):
        state.clicked()
    steps = st.session_state.get(_STEPS, ())
    st.session_state[_SELECTION] = apply_selection(st.session_state.get(_SELECTION), event, steps)
    st.session_state[_SOURCE] = event.source


def from_chart() -> bool:
    """Whether the last event was a click on the heatmap, which marks its cell itself."""
    return st.session_state.get(_SOURCE) == "chart"


def publish(selection: Selection | None) -> None:
    """Write the selection into the address."""
    if selection is None:
        state.retract(LAYER, STEP)
        st.session_state[_PUBLISHED] = (None, None)
        return
    said = {LAYER: selection.layer, STEP: str(selection.step)}
    state.publish(**said)
    st.session_state[_PUBLISHED] = (said[LAYER], said[STEP])


def within() -> str:
    """Return the module whose rows are shown; empty for all."""
    linked = st.query_params.get(WITHIN)
    if linked is not None and linked != st.session_state.get(f"{_PUBLISHED}.{WITHIN}"):
        st.session_state[f"{_SELECTION}.{WITHIN}"] = linked
    return str(st.session_state.get(f"{_SELECTION}.{WITHIN}", ""))


def go_within(module: str) -> None:
    """Show the rows of a module from now on."""
    st.session_state[f"{_SELECTION}.{WITHIN}"] = module
    st.session_state[f"{_PUBLISHED}.{WITHIN}"] = module
    if module:
        state.publish(**{WITHIN: module})
    else:
        state.retract(WITHIN)
