"""The state of the map: the selected row and step, the ticked rows, and the open modules.

Map, table and link all change the selection here, so they always agree.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import streamlit as st
from inshrink_app import state
from inshrink_app.widgets.modules import is_within

LAYER, STEP, TICKED = "layer", "step", "ticked"
MAX_TICKED = 12

_SELECTION = "run.selection"
_STEPS, _TREE, _TICKED = "run.steps", "run.tree", "run.ticked"


class Selection(NamedTuple):
    """A row (a tensor, a block or a layer type) at a step."""

    layer: str
    step: int


def chosen_cell(value: object, n_rows: int, n_columns: int) -> tuple[int, int] | None:
    """Return row and column of the clicked cell of a heatmap; None without one, or for invalid data.

    Parameters
    ----------
    value
        Untrusted value from the browser: ``[row, column]``.
    n_rows, n_columns
        Numbers of cells.
    """
    if not isinstance(value, list) or len(value) != 2 or not all(type(place) is int for place in value):
        return None
    row, column = value
    return (row, column) if 0 <= row < n_rows and 0 <= column < n_columns else None


def current(steps: Sequence[int]) -> Selection | None:
    """Return the selection, at one of some ascending steps.

    A link takes effect at the first visit, and when the user goes back or forward.
    """
    st.session_state[_STEPS] = tuple(steps)
    layer, text = st.query_params.get(LAYER), st.query_params.get(STEP) or ""
    found: Selection | None = st.session_state.get(_SELECTION)
    if layer and (_SELECTION not in st.session_state or state.went_back()):
        step = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
        return _select(layer, step)
    return _select(*(found or (None, None)))


def select(layer: str | None, step: int | None = None) -> None:
    """Select a layer, at a step if one is given; None clears the selection. Also a callback."""
    if layer is not None:
        state.clicked()
    _select(layer, step)


def _select(layer: str | None, step: int | None) -> Selection | None:
    """Set the selection at the nearest existing step, by default the previous or the last one."""
    before, steps = st.session_state.get(_SELECTION), st.session_state.get(_STEPS, ())
    found = None
    if layer is not None and steps:
        wanted = step if step is not None else steps[-1] if before is None else before.step
        found = Selection(layer, min(steps, key=lambda known: (abs(known - wanted), known)))
    st.session_state[_SELECTION] = found
    return found


def publish(selection: Selection | None, ticked_rows: Sequence[str] = ()) -> None:
    """Write the selection and the ticked rows into the address."""
    if ticked_rows:
        state.publish(**{TICKED: json.dumps(list(ticked_rows))})
    else:
        state.retract(TICKED)
    if selection is None:
        state.retract(LAYER, STEP)
    else:
        state.publish(**{LAYER: selection.layer, STEP: str(selection.step)})


def ticked(run: str) -> tuple[str, ...]:
    """Return the ticked rows of a run in order of ticking; initially those of the link."""
    known = st.session_state.get(_TICKED)
    if known is not None and known[0] == run:
        return tuple(known[1])
    names: list[str] = []
    if known is None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            names = msgspec.json.decode(state.choice_text(TICKED) or "[]", type=list[str])[:MAX_TICKED]
    st.session_state[_TICKED] = (run, names)
    return tuple(names)


def tick(run: str, name: str) -> None:
    """Toggle the tick of a row."""
    known = ticked(run)
    set_ticked(run, [other for other in known if other != name] if name in known else [*known, name])


def set_ticked(run: str, names: Sequence[str]) -> None:
    """Tick these rows and no others; above the maximum, the oldest ticks are dropped."""
    state.clicked()
    st.session_state[_TICKED] = (run, list(names)[-MAX_TICKED:])


def tree(run: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules of a run that the user opened, and those that the user closed."""
    known = st.session_state.get(_TREE)
    none: frozenset[str] = frozenset()
    return known[1] if known is not None and known[0] == run else (none, none)


def fold(run: str, module: str, *, is_open: bool) -> None:
    """Close an open module, or open a closed one."""
    opened, closed = tree(run)
    if is_open:
        folded = (frozenset(name for name in opened if not is_within(name, module)), closed | {module})
    else:
        folded = (opened | {module}, closed - {module})
    st.session_state[_TREE] = (run, folded)
    state.clicked()
