"""What is picked on the map: a row at a step, the rows that are ticked, and the modules that are open.

Map, table, search box and link all speak through `apply_selection`, so that they cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import streamlit as st
from inshrink_app import state
from inshrink_app.widgets.modules import is_within

LAYER, STEP, TICKED = "layer", "step", "ticked"
MOST_TICKED = 12

_SELECTION, _PUBLISHED = "run.selection", "run.published"
_STEPS, _TREE, _TICKED = "run.steps", "run.tree", "run.ticked"


class Selection(NamedTuple):
    """A row (a tensor, a block or a layer type) at a step."""

    layer: str
    step: int


class Event(NamedTuple):
    """What the reader did.

    Parameters
    ----------
    source
        ``chart``, ``table``, ``search``, ``step``, ``link`` or ``close``.
    layer, step
        What was chosen; None where the source does not say. A table that chooses nothing has been cleared.
    """

    source: str
    layer: str | None = None
    step: int | None = None


def apply_selection(state: Selection | None, event: Event, steps: Sequence[int]) -> Selection | None:
    """Return the selection after an event.

    Parameters
    ----------
    state
        The selection before; None: nothing is selected.
    event
        What was done.
    steps
        Steps there are, ascending; a step that is not among them becomes the nearest that is.

    Notes
    -----
    A table or a search box chooses a layer and keeps the step; without one it is the last. A link that names
    no layer changes nothing, because following the navigation drops it.

    Examples
    --------
    >>> apply_selection(Selection("a", 20), Event("table", "b"), (10, 20))
    Selection(layer='b', step=20)
    >>> apply_selection(Selection("a", 20), Event("table"), (10, 20)) is None
    True
    """
    if event.source == "close" or not steps:
        return None
    if event.source == "step":
        if state is None or event.step is None:
            return state
        return Selection(state.layer, nearest_step(event.step, steps))
    if event.layer is None:
        return None if event.source == "table" else state
    step = event.step
    if step is None:
        step = state.step if state is not None else steps[-1]
    return Selection(event.layer, nearest_step(step, steps))


def nearest_step(step: int, steps: Sequence[int]) -> int:
    """Return the step nearest to a number, the earlier of two.

    Examples
    --------
    >>> nearest_step(26, (10, 20, 30))
    30
    """
    return min(steps, key=lambda known: (abs(known - step), known))


def link_event(layer: str | None, step: str | None) -> Event:
    """Read what a link says, which is untrusted: a step that is no number counts as none.

    Examples
    --------
    >>> link_event("fc.weight", "40"), link_event("fc.weight", "<b>")[2]
    (Event(source='link', layer='fc.weight', step=40), None)
    """
    number = int(step) if step is not None and step.isascii() and step.isdigit() and len(step) < 19 else None
    return Event("link", layer or None, number)


def chosen_cell(said: object, n_rows: int, n_columns: int) -> tuple[int, int] | None:
    """Return row and column of what was clicked in a heatmap; None for nothing, or for nonsense.

    Parameters
    ----------
    said
        What the browser reports: ``[row, column]``.
    n_rows, n_columns
        Cells there are; the browser's word is not taken for it.
    """
    if not isinstance(said, list) or len(said) != 2 or not all(type(place) is int for place in said):
        return None
    row, column = said
    return (row, column) if 0 <= row < n_rows and 0 <= column < n_columns else None


def current(steps: Sequence[int]) -> Selection | None:
    """Return what is selected, after the link had its say.

    A link counts where it differs from what this place wrote last: at the first visit, and when the reader
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
    """Take in what the reader did; also from within callbacks."""
    if event.source not in ("link", "close"):
        state.clicked()
    steps = st.session_state.get(_STEPS, ())
    st.session_state[_SELECTION] = apply_selection(st.session_state.get(_SELECTION), event, steps)


def publish(selection: Selection | None, ticked_rows: Sequence[str] = ()) -> None:
    """Write the selection and the ticked rows into the address."""
    if ticked_rows:
        state.publish(**{TICKED: json.dumps(list(ticked_rows))})
    else:
        state.retract(TICKED)
    if selection is None:
        state.retract(LAYER, STEP)
        st.session_state[_PUBLISHED] = (None, None)
        return
    said = {LAYER: selection.layer, STEP: str(selection.step)}
    state.publish(**said)
    st.session_state[_PUBLISHED] = (said[LAYER], said[STEP])


def ticked(run: str) -> tuple[str, ...]:
    """Return the rows of a run that are ticked, in the order they were; at first those of the link."""
    known = st.session_state.get(_TICKED)
    if known is not None and known[0] == run:
        return tuple(known[1])
    try:
        said = json.loads(state.choice_text(TICKED) or "[]") if known is None else []
    except (ValueError, RecursionError):
        said = []
    names = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    st.session_state[_TICKED] = (run, names[:MOST_TICKED])
    return tuple(names[:MOST_TICKED])


def tick(run: str, *names: str) -> None:
    """Tick rows, or take the tick from one that has it; of too many the first ones go."""
    state.clicked()
    known = list(ticked(run))
    if len(names) == 1 and names[0] in known:
        known.remove(names[0])
    else:
        known += [name for name in names if name not in known]
    st.session_state[_TICKED] = (run, known[-MOST_TICKED:])


def set_ticked(run: str, names: Sequence[str]) -> None:
    """Tick these rows and no others."""
    state.clicked()
    st.session_state[_TICKED] = (run, list(names)[-MOST_TICKED:])


def tree(run: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules of a run that the reader opened, and those that were closed."""
    known = st.session_state.get(_TREE)
    none: frozenset[str] = frozenset()
    return known[1] if known is not None and known[0] == run else (none, none)


def fold(run: str, module: str, *, is_open: bool) -> None:
    """Close a module that is open, or open one that is closed."""
    opened, closed = tree(run)
    if is_open:
        folded = (frozenset(one for one in opened if not is_within(one, module)), closed | {module})
    else:
        folded = (opened | {module}, closed - {module})
    st.session_state[_TREE] = (run, folded)
    state.clicked()
