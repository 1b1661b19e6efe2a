"""Cells of a heatmap, clicked and marked: Streamlit reports and marks points of a chart alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import streamlit as st
from inshrink_app.theme import MARK

__all__ = ["picked_cells", "runs_of"]

_SCRIPT = Path(__file__).parents[1] / "assets" / "cells.js"
_CELL = "cell"

_component = st.components.v2.component("inshrink.cells", js=_SCRIPT.read_text(), isolate_styles=False)


def picked_cells(
    chart: str, told: Callable[[object], None], *, marked: tuple[Sequence[int], int] | None
) -> None:
    """Listen to clicks on the cells of a heatmap that stands in the same container, and mark some.

    The figure stays the same whatever is marked, and so keeps its zoom.

    Parameters
    ----------
    chart
        The figure's key. Its axes run over whole numbers, a cell each, and have ranges.
    told
        Called with what the browser says was clicked, ``[row, column]``; it may say anything.
    marked
        Rows, ascending, and the column they are marked in.
    """
    key = f"{chart}.cells"
    rows, column = marked or ((), 0)
    _component(
        key=key,
        data={"chart": chart, "colour": MARK, "rows": runs_of(rows), "column": column},
        on_cell_change=lambda: told(st.session_state[key].get(_CELL)),
    )


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last of every run of neighbours in ascending places.

    Examples
    --------
    >>> runs_of([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    runs = (
        [place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])
    )
    return [(run[0], run[-1]) for run in runs]
