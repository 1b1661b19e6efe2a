"""All rows at all steps: heatmap, search, table and, under a click, what is inside. One fragment."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.sensitivity import drilldown, group_list, grouping, heatmap, rows_table, selection
from inshrink_app.pages.sensitivity import heatmap as heat_columns
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.narrowing import View, narrowed
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.widgets import figures
from inshrink_app.widgets.formatting import elide, markdown_text
from inshrink_app.widgets.kept import kept
from inshrink_app.widgets.tables import METRICS, Sensitivity, Subject

__all__ = ["show"]

_CHART = "heatmap"
_NAME_WIDTH = 60
_PINNED = "heatmap.pinned"


@st.fragment
def show(shown: Subject, tables: Mapping[str, Sensitivity], by: str, statistic: str) -> None:
    """Draw a measurement; a click, a search or a link redraws this part of the page alone.

    Parameters
    ----------
    shown
        The run or archive.
    tables
        The measurement by grouping.
    by, statistic
        What a row is, and what of its values is shown.
    """
    tensors = tables["tensor"]
    if state.was_clicked():
        services.warm_up(shown)
    found = _valid(chosen.current(tensors.steps), tensors, tables["layer_type"])
    with st.container(border=True):
        view = narrowed(shown, tables, by, statistic)
        if not view.table.rows:
            st.caption("No row matches. Clear the filter to see all of them.")
        elif not np.isfinite(view.table.values[statistic]).any():
            _nothing_to_see(view.table)
        else:
            _chart(view, found)
    if found is not None:
        _inside(view, found)
    chosen.publish(found)
    if view.table.rows:
        rows_table.show(view.tensors, view.table, statistic, _row_of(view, found))


def _valid(found: Selection | None, tensors: Sensitivity, types: Sensitivity) -> Selection | None:
    """Drop a selection that this run knows nothing of, such as that of the run before."""
    if found is None:
        return None
    if _members(found.layer, tensors, types):
        return found
    st.caption(f"This run has no layer {markdown_text(elide(found.layer, _NAME_WIDTH))}.")
    chosen.apply(Event("close"))
    return None


def _members(layer: str, tensors: Sensitivity, types: Sensitivity) -> tuple[int, ...]:
    """Return the places of the tensors that a row stands for."""
    names = [row.name for row in tensors.rows]
    if layer in names:
        return (names.index(layer),)
    if any(row.name == layer for row in types.rows):
        return tuple(i for i, row in enumerate(tensors.rows) if row.layer == layer)
    return grouping.members_of(names, layer)


def _chart(view: View, found: Selection | None) -> None:
    """Draw the heatmap; its figure stays the same while clicks select in it."""
    table = view.table
    n_columns = min(len(table.steps), heat_columns.MAX_COLUMNS)
    pinned = _pinned(view, found)
    figure = kept(
        "heatmap.figure",
        view.tensors,
        (*_base(view), pinned),
        lambda: heatmap.heatmap_figure(
            table, view.statistic, clip=view.clip, scale=view.scale, pinned=pinned
        ),
    )
    st.plotly_chart(
        figure,
        config=dict(figures.CONFIG),
        key=_CHART,
        on_select=functools.partial(
            _clicked, [row.name for row in table.rows], table.steps, len(table.rows), n_columns
        ),
        selection_mode=("points",),
        alt=f"{METRICS[view.metric].label} of {len(table.rows)} rows over {len(table.steps)} steps",
    )
    st.caption(_caption(view))


def _clicked(names: Sequence[str], steps: Sequence[int], n_rows: int, n_columns: int) -> None:
    """Take in a click on the heatmap."""
    points = st.session_state[_CHART]["selection"]["points"]
    cell = selection.chosen_cell(points, n_rows, n_columns)
    if cell is None:
        chosen.apply(Event("chart"))
        return
    edges = heat_columns.column_edges(len(steps))
    chosen.apply(Event("chart", names[cell[0]], steps[int(edges[cell[1] + 1]) - 1]))


def _pinned(view: View, found: Selection | None) -> tuple[int, int] | None:
    """Return the cell that the figure itself marks: what was selected when it was last drawn anew.

    A click marks its cell in the browser. Drawing it into the figure as well would make it another figure,
    which loses its zoom and the next click.
    """
    base = _base(view)
    known = st.session_state.get(_PINNED)
    if known is not None and known[0] == base and chosen.from_chart():
        cell: tuple[int, int] | None = known[1]
        return cell
    row = _row_of(view, found)
    pinned = None
    if found is not None and row is not None:
        steps = view.table.steps
        pinned = (row, heat_columns.column_of(steps.index(found.step), len(steps)))
    st.session_state[_PINNED] = (base, pinned)
    return pinned


def _base(view: View) -> tuple[object, ...]:
    """Return what the figure shows, but for the cell that it marks."""
    return (
        str(view.shown.path),
        view.table.by,
        view.metric,
        view.statistic,
        view.clip,
        view.scale,
        tuple(row.name for row in view.table.rows),
        view.table.steps,
    )


def _row_of(view: View, found: Selection | None) -> int | None:
    """Return the row that shows what is selected: itself, or the group it lies in."""
    if found is None:
        return None
    for place, row in enumerate(view.table.rows):
        if row.name == found.layer:
            return place
    names = {row.name: row.layer for row in view.tensors.rows}
    for place, row in enumerate(view.table.rows):
        if found.layer in names and (
            names[found.layer] == row.name or found.layer in grouping_names(view, row.name)
        ):
            return place
    return None


def grouping_names(view: View, group: str) -> set[str]:
    """Return the tensors of a group by name."""
    names = [row.name for row in view.tensors.rows]
    return {names[i] for i in grouping.members_of(names, group)}


def _inside(view: View, found: Selection) -> None:
    """Draw what was selected: a tensor's inside, or a group's tensors."""
    names = [row.name for row in view.tensors.rows]
    with st.container(border=True):
        _inside_head(found)
        if found.layer in names:
            drilldown.show_tensor(view.shown, view.tensors, found.layer, found.step)
        else:
            group_list.show(view.tensors, view.statistic, found, by_block=view.table.by == "block")


def _inside_head(found: Selection) -> None:
    """Name what is looked into."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.header(markdown_text(elide(found.layer, _NAME_WIDTH)), anchor=False, width="content")
        st.button(
            "Close", icon=":material/close:", type="tertiary", on_click=chosen.apply, args=(Event("close"),)
        )


def _nothing_to_see(table: Sensitivity) -> None:
    """Say why a metric has no values."""
    st.header("This run does not tell", anchor=False)
    reasons = {
        "update": "Movement needs two checkpoints; there is no earlier one to compare with.",
        "fisher": "It is read from Adam's second moment, and the checkpoints hold no optimizer state.",
        "taylor": "It needs gradients or Adam's first moment, and the checkpoints hold neither.",
        "gain": "It needs two steps of a chain between which the weights moved.",
        "noise": "It needs two steps of a chain between which the weights moved.",
    }
    st.write(reasons.get(table.metric, "No weight has a finite value."))
    if table.note:
        st.text(table.note)


def _caption(view: View) -> str:
    """Say what the picture does not show by itself."""
    table = view.table
    scale = "logarithmic" if view.scale == "log" else "linear"
    parts = [f"Colours are {scale}" + (", outliers clipped at 1 % and 99 %." if view.clip else ".")]
    if len(table.steps) > heat_columns.MAX_COLUMNS:
        per_column = -(-len(table.steps) // heat_columns.MAX_COLUMNS)
        parts.append(
            f"Each column is the mean of up to {per_column} neighbouring steps; a click takes the last one."
        )
    if len(table.rows) * min(len(table.steps), heat_columns.MAX_COLUMNS) > heatmap.MAX_ANCHORS:
        parts.append("A click takes the nearest of the cells that can be clicked.")
    if any(len(group.members) > 1 for group in view.groups) and view.statistic != "mean":
        parts.append("Of rows above the modules themselves it is the mean over their tensors.")
    if any(np.isnan(values).any() for values in table.values.values()):
        parts.append("Grey: the tensor is absent or has no value at this step.")
    if table.note:
        parts.append(markdown_text(table.note))
    parts.append("Click a cell to look inside.")
    return " ".join(parts)
