"""The state of the map: the selected row and step, the ticked rows, and the open modules.

Map, table and link all change the selection through `selected`, so they always agree.
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


def selected(
    before: Selection | None, layer: str | None, step: int | None, steps: Sequence[int]
) -> Selection | None:
    """Return the selection after the choice of a layer, at an existing step.

    Parameters
    ----------
    before
        The previous selection.
    layer
        The chosen layer; None clears the selection.
    step
        By default that of the previous selection, else the last; a step that `steps` lacks becomes the
        nearest one.
    steps
        Ascending steps.

    Examples
    --------
    >>> selected(Selection("a", 20), "b", None, (10, 20)), selected(None, "b", 14, (10, 20))
    (Selection(layer='b', step=20), Selection(layer='b', step=10))
    """
    if layer is None or not steps:
        return None
    if step is None:
        step = steps[-1] if before is None else before.step
    return Selection(layer, nearest_step(step, steps))


def nearest_step(step: int, steps: Sequence[int]) -> int:
    """Return the step nearest to a number; the earlier one if two are equally near.

    Examples
    --------
    >>> nearest_step(26, (10, 20, 30))
    30
    """
    return min(steps, key=lambda known: (abs(known - step), known))


def step_of_link(text: str | None) -> int | None:
    """Return the step in a link's untrusted text; None if it is not a number.

    Examples
    --------
    >>> step_of_link("40"), step_of_link("<b>")
    (40, None)
    """
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


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
    """Return the selection.

    A link takes effect if it differs from the last published address: at the first visit, and when the user
    goes back or types another address.
    """
    st.session_state[_STEPS] = tuple(steps)
    layer, step = st.query_params.get(LAYER), st.query_params.get(STEP)
    found: Selection | None = st.session_state.get(_SELECTION)
    if layer and (layer, step) != st.session_state.get(_PUBLISHED):
        found = selected(found, layer, step_of_link(step), steps)
    elif found is not None:
        found = selected(found, found.layer, found.step, steps)
    st.session_state[_SELECTION] = found
    return found


def select(layer: str | None, step: int | None = None) -> None:
    """Select a layer, at a step if one is given; None clears the selection. Also a callback."""
    if layer is not None:
        state.clicked()
    before, steps = st.session_state.get(_SELECTION), st.session_state.get(_STEPS, ())
    st.session_state[_SELECTION] = selected(before, layer, step, steps)


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
    words = (selection.layer, str(selection.step))
    state.publish(**dict(zip((LAYER, STEP), words, strict=True)))
    st.session_state[_PUBLISHED] = words


def ticked(run: str) -> tuple[str, ...]:
    """Return the ticked rows of a run in order of ticking; initially those of the link."""
    known = st.session_state.get(_TICKED)
    if known is not None and known[0] == run:
        return tuple(known[1])
    try:
        linked = json.loads(state.choice_text(TICKED) or "[]") if known is None else []
    except (ValueError, RecursionError):
        linked = []
    names = [name for name in linked if isinstance(name, str)] if isinstance(linked, list) else []
    st.session_state[_TICKED] = (run, names[:MOST_TICKED])
    return tuple(names[:MOST_TICKED])


def tick(run: str, *names: str) -> None:
    """Toggle the ticks of rows; above the maximum, the oldest ticks are dropped."""
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
