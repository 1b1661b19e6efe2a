"""The state of the map: the selected row and step, the ticked rows, and the open modules.

Map, table and link all change the selection here, so they always agree.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import streamlit as st
from inshrink_app import state
from inshrink_app.widgets.modules import is_within

if TYPE_CHECKING:
    from inshrink_app.pages.run.heatmap import StepAxis

LAYER, STEP, TICKED = "layer", "step", "ticked"
MAX_TICKED = 12

_SELECTION = "run.selection"
_STEPS, _TREE, _TICKED, ANSWERED = "run.steps", "run.tree", "run.ticked", "run.answered"

_Picked = tuple[int, tuple[int, int] | None, list[int] | None]


class Selection(NamedTuple):
    """A row (a tensor, a block or a layer type) at a step."""

    layer: str
    step: int


def pick(value: object, run: str, names: Sequence[str], steps: Sequence[int], axis: StepAxis) -> None:
    """Handle a message of the map: what the user picked since the last answered message.

    Parameters
    ----------
    value
        The message, untrusted: its number; row and column, None if no cell was picked; and the ticked rows,
        None if no box was clicked. Anything else is ignored, and so are rows and columns that do not exist.
    run
        The run on screen.
    names, steps
        The rows and columns of the map with values.
    axis
        Columns of the map.
    """
    try:
        number, cell, places = msgspec.convert(value, _Picked)
    except msgspec.ValidationError:
        return
    st.session_state[ANSWERED] = number
    row, column = cell or (-1, -1)
    place = axis.place_of(column) if 0 <= row < len(names) and 0 <= column < len(axis.columns) else None
    if place is not None:
        select(names[row], steps[place])
    if places is not None:
        tick(run, names, places)


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
    layer, step = selection or (None, "")
    names = json.dumps(list(ticked_rows)) if ticked_rows else None
    state.publish(**{TICKED: names, LAYER: layer, STEP: str(step)})


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


def tick(run: str, names: Sequence[str], places: Collection[int]) -> None:
    """Tick the rows at some places and clear the ticks of the other ones; also a callback.

    Rows that are not among the names keep their ticks. Above the maximum, the oldest ticks are dropped.
    Places are untrusted.
    """
    here = {names[place] for place in places if 0 <= place < len(names)}
    kept = [name for name in ticked(run) if name in here or name not in names]
    new = [name for name in names if name in here and name not in kept]
    state.clicked()
    st.session_state[_TICKED] = (run, [*kept, *new][-MAX_TICKED:])


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
