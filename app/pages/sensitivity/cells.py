"""All rows at all steps: heatmap, search, table and, under a click, what is inside. One fragment."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import state
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.sensitivity import ahead, drilldown, heatmap, rows
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.heatmap import MAX_COLUMNS, column_edges
from inshrink_app.pages.sensitivity.rows import View
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.theme import MARK
from inshrink_app.widgets import ending, fmt, modules
from inshrink_app.widgets.layout import chart

from inshrink_core.analysis.findings import findings

_CHART = "heatmap"
_NAME_WIDTH = 60
_MOST_CARRIED = 100
_LISTED_WIDTH = 40

_SCRIPT = Path(__file__).parents[2] / "assets" / "cells.js"
_CELL, _NAME = "cell", "name"

_component = st.components.v2.component("inshrink.cells", js=_SCRIPT.read_text(), isolate_styles=False)

Made = TypeVar("Made")


@st.fragment
def show(
    shown: Subject,
    tables: Mapping[str, Sensitivity],
    level: str,
    statistic: str,
    before_next: Callable[[], None],
) -> None:
    """Draw a measurement; a click, a search or a link redraws this part of the page alone.

    Parameters
    ----------
    shown
        The run or archive.
    tables
        The measurement by grouping.
    level, statistic
        What a row is (`modules.levels`), and what of its values is shown.
    before_next
        Draws what stands between the table and the way on.
    """
    tensors = tables["tensor"]
    if state.was_clicked():
        ahead.warm_up(shown)
    found = _valid(chosen.current(tensors.steps), tensors)
    _say(shown, _kept("sensitivity.level", tensors, level, lambda: rows.at_level(tables, level)))
    with st.container(border=True):
        view = rows.narrowed(shown, tables, level, statistic, found)
        if not view.table.rows:
            st.caption("No row matches. Clear the filter to see all of them.")
        elif not np.isfinite(view.table.values[statistic]).any():
            _nothing_to_see(view.table)
        else:
            picture, panel = st.columns([3, 2], gap="medium")
            with picture:
                _chart(view, found)
                # The same rows as a table: what is selected in one is in the other.
                about = (view.statistic, view.relative, view.nodes)
                frame = _kept("sensitivity.frame", view.tensors, about, lambda: rows.summary(view))
                rows.show_table(view, frame, found)
            with panel:
                _panel(view, found)
    chosen.publish(found)
    before_next()
    if view.table.rows:
        _go_on(view, found)


def _go_on(view: View, found: Selection | None) -> None:
    """Lead on to the page that gives layers their bits, with what is selected, or with the rows on screen."""
    shown = [view.table.rows[place].name for place in view.leaves]
    names = shown if found is None else [found.layer]
    n_shown = sum(view.table.rows[place].n_tensors for place in view.leaves)
    whole = found is None and n_shown == len(view.tensors.rows)
    label = "Allocate bits" if whole else f"Allocate bits to these {len(names)} rows"
    if len(names) == 1 and not whole:
        label = f"Allocate bits to {fmt.elided(names[0], _LISTED_WIDTH)}"
    ending.offer(
        ending.ALLOCATE._replace(
            label=fmt.markdown(label),
            carried={state.LAYERS: "" if whole else json.dumps(names[:_MOST_CARRIED])},
        ),
        ending.EXPORT,
    )


def _say(shown: Subject, table: Sensitivity) -> None:
    """Say in words what the picture shows."""

    def said() -> str:
        names = [row.name for row in table.rows]
        rates = rows.learning_rates_of(shown, table)
        means, extents = table.values["mean"], table.extents()
        told = findings(table.metric, table.by, names, extents, table.steps, means, rates)
        return told.sentence()

    sentence = _kept("sensitivity.said", table, str(shown.path), said)
    if sentence:
        st.markdown(f"**{fmt.markdown(sentence)}**")


def _kept(slot: str, of: object, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what was made last time of the very same object under an equal key, or make it: one a slot."""
    known = st.session_state.get(slot)
    if known is not None and known[0] is of and known[1] == key:
        made: Made = known[2]
        return made
    made = make()
    st.session_state[slot] = (of, key, made)
    return made


def _valid(found: Selection | None, tensors: Sensitivity) -> Selection | None:
    """Drop a selection that this run knows nothing of, such as that of the run before."""
    if found is None or rows.tensors_of(tensors, found.layer):
        return found
    st.caption(f"This run has no layer {fmt.markdown(fmt.elided(found.layer, _NAME_WIDTH))}.")
    chosen.apply(Event("close"))
    return None


def _chart(view: View, found: Selection | None) -> None:
    """Draw the heatmap; its figure stays the same while clicks select in it."""
    table = view.table

    def made() -> go.Figure:
        shapes = ["" if row.shape is None else fmt.shape(row.shape) for row in table.rows]
        tree, loss = list(zip(modules.labels(view.nodes), shapes, strict=True)), _loss(view)
        return heatmap.heatmap_figure(table, view.statistic, relative=view.relative, loss=loss, tree=tree)

    figure = _kept("heatmap.figure", view.tensors, _base(view), made)
    with st.container(gap=None):
        alt = f"{METRICS[table.metric].label} of {len(table.rows)} rows over {len(table.steps)} steps"
        chart(figure, _CHART, alt)
        told = functools.partial(_clicked, [row.name for row in table.rows], table.steps)
        picked_cells(_CHART, told, marked=_marked(view, found), named=functools.partial(_named, view))
    st.caption(_caption(view))


def _named(view: View, said: object) -> None:
    """Take in a click on the name of a row: a module is closed or opened, a tensor's module is closed."""
    if type(said) is not int or not 0 <= said < len(view.nodes) or not view.is_tree:
        return
    node = view.nodes[said]
    run = str(view.shown.path)
    if node.is_open is not None:
        chosen.fold(run, node.name, is_open=node.is_open)
    elif "." in node.name:
        above = [one for one in view.nodes[:said] if one.is_open and modules.is_within(node.name, one.name)]
        if above:
            chosen.fold(run, above[-1].name, is_open=True)


def _loss(view: View) -> tuple[str, Sequence[tuple[int, float]]] | None:
    """Return the training loss and its name, where the training logged one."""
    name = heatmap.training_loss(view.shown.log)
    return None if name is None else (name, view.shown.log[name])


def _clicked(names: Sequence[str], steps: Sequence[int], said: object) -> None:
    """Take in a click on the heatmap."""
    edges = column_edges(len(steps))
    cell = chosen.chosen_cell(said, len(names), len(edges) - 1)
    if cell is not None:
        chosen.apply(Event("chart", names[cell[0]], steps[int(edges[cell[1] + 1]) - 1]))


def _marked(view: View, found: Selection | None) -> tuple[tuple[int, ...], int] | None:
    """Return the rows and the column of what is selected."""
    marked = _rows_of(view, found)
    if found is None or not marked:
        return None
    steps = view.table.steps
    return marked, heatmap.column_of(steps.index(found.step), len(steps))


def _base(view: View) -> tuple[object, ...]:
    """Return what the figure shows."""
    table = view.table
    names = tuple(row.name for row in table.rows)
    path = str(view.shown.path)
    look = (view.statistic, view.relative)
    folds = tuple(node.is_open for node in view.nodes)
    return (path, view.level, table.metric, *look, names, folds, table.steps)


def _rows_of(view: View, found: Selection | None) -> tuple[int, ...]:
    """Return the rows that show what is selected: itself, what it holds, or the row it lies in."""
    if found is None:
        return ()
    names = [row.name for row in view.table.rows]
    if found.layer in names:
        return (names.index(found.layer),)
    if view.level == modules.LAYER_TYPE:
        types = {view.tensors.rows[i].layer_type for i in rows.tensors_of(view.tensors, found.layer)}
        return tuple(i for i, name in enumerate(names) if name in types)
    inside = modules.members_of(names, found.layer)
    holding = [i for i, name in enumerate(names) if modules.is_within(found.layer, name)]
    return inside or tuple(holding[-1:])


def _panel(view: View, found: Selection | None) -> None:
    """Draw beside the picture what was selected: a tensor's inside, or a group's tensors."""
    if found is None:
        _most_sensitive(view)
        return
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.header(fmt.markdown(fmt.elided(found.layer, _NAME_WIDTH)), anchor=False, width="content")
        st.button(
            "Close",
            icon=":material/close:",
            type="tertiary",
            on_click=chosen.apply,
            args=(Event("close"),),
        )
    if any(row.name == found.layer for row in view.tensors.rows):
        drilldown.show_tensor(view.shown, view.tensors, found.layer, found.step)
    else:
        rows.show_group(view, found)


def _most_sensitive(view: View) -> None:
    """List the rows that carry most at the last step; each opens as a click on its cell does."""
    table = view.plain
    st.header(f"Largest share of the total at step {fmt.count(table.steps[-1])}", anchor=False)
    st.caption("Click a cell, or one of these, to look inside; the name of a module to close or to open it.")
    rows.show_ranked(table, view.ranked, view.shares, len(table.steps) - 1, "largest")


def _nothing_to_see(table: Sensitivity) -> None:
    """Say why a metric has no values."""
    st.header("This run has no such values", anchor=False)
    st.write(METRICS[table.metric].needs or "No weight has a finite value.")
    if table.note:
        st.text(table.note)


def _caption(view: View) -> str:
    """Say what the picture does not show by itself."""
    table = view.table
    n_columns = min(len(table.steps), MAX_COLUMNS)
    parts = ["Colours are logarithmic, outliers clipped at 1 % and 99 %."]
    if len(table.steps) > n_columns:
        parts.append(
            f"Each column is the mean of up to {-(-len(table.steps) // n_columns)} neighbouring steps; "
            "a click selects the last of them."
        )
    if any(len(node.members) > 1 for node in view.nodes) and view.statistic != "mean":
        parts.append("A row of several modules shows the mean over their tensors.")
    parts += _grey(view)
    if table.note:
        parts.append(fmt.markdown(table.note))
    return " ".join(parts)


def _grey(view: View) -> list[str]:
    """Say why cells are grey: nothing tells whose the optimizer's state is, or there is nothing."""
    if not np.isnan(view.table.values[view.statistic]).any():
        return []
    lost = int((~np.isfinite(view.tensors.values["mean"])).all(axis=1).sum())
    if lost and (view.table.metric == "fisher" or any(row.is_unattributed for row in view.shown.tensors)):
        return [
            f"Grey: {fmt.counted(lost, 'tensor')} whose optimizer state is unattributed, as neither names, "
            "values nor order tell whose it is; or that is absent at the step."
        ]
    return ["Grey: the tensor is absent or has no value at this step."]


def picked_cells(
    chart: str,
    told: Callable[[object], None],
    *,
    marked: tuple[Sequence[int], int] | None,
    named: Callable[[object], None],
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
    named
        Called with the row whose name was clicked; it may be anything.
    """
    key = f"{chart}.cells"
    rows, column = marked or ((), 0)
    _component(
        key=key,
        data={"chart": chart, "colour": MARK, "rows": runs_of(rows), "column": column},
        on_cell_change=lambda: told(st.session_state[key].get(_CELL)),
        on_name_change=lambda: named(st.session_state[key].get(_NAME)),
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
