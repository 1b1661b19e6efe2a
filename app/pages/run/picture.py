"""The map of all rows at all steps, the selection in it, and the ticked rows as lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.run import heatmap, rows
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.heatmap import MAX_ROW_LABELS, StepAxis
from inshrink_app.pages.run.rows import View
from inshrink_app.pages.run.selection import Selection
from inshrink_app.theme import CATEGORICAL, MARK, PRIMARY
from inshrink_app.widgets import fmt, modules
from inshrink_app.widgets.figures import lay_out, log_ticks, steps_axis, title
from inshrink_app.widgets.layout import chart
from inshrink_app.widgets.modules import Node

from inshrink_core.analysis.findings import findings, learning_rates

_CHART, _CELLS = "heatmap", "heatmap.cells"
_LINES_HEIGHT = 150
_MOST_GAPS = 6
_NAME_WIDTH = 60
_KEYS = "`/` filters rows, arrows move the picked cell, `p` pins its row, `u` undoes a change of bits."
_SCRIPT = Path(__file__).parents[2] / "assets" / "cells.js"

_component = st.components.v2.component("inshrink.cells", js=_SCRIPT.read_text(), isolate_styles=False)

Made = TypeVar("Made")


def show(view: View, found: Selection | None, ticked: Sequence[str], *, is_partial: bool) -> None:
    """Draw the map. Clicks select and tick without changing its figure.

    Parameters
    ----------
    view
        The rows.
    found, ticked
        The selection, and the ticked rows.
    is_partial
        Whether values are still being measured.
    """
    table = view.table
    if not table.rows:
        st.caption("No row matches. Clear the filter to see all of them.")
        return
    names = [row.name for row in table.rows]
    missing = heatmap.missing_steps(table.steps, [Path(path).name for path, _ in view.shown.unreadable])

    def make() -> go.Figure:
        shapes = ["" if row.shape is None else fmt.shape(row.shape) for row in table.rows]
        tree = list(zip(modules.labels(view.nodes), shapes, strict=True))
        curves = [(name, view.shown.log[name]) for name in view.look.curves if name in view.shown.log]
        return heatmap.heatmap_figure(
            table, view.look.statistic, relative=view.look.relative, curves=curves, tree=tree, missing=missing
        )

    figure = remembered("map.figure", view.tensors, _contents(view), make)
    axis = StepAxis.of(table.steps, missing)
    with st.container(gap=None):
        metric = METRICS[table.metric]
        chart(figure, _CHART, f"{metric.label} of {len(table.rows)} rows over {len(table.steps)} steps")
        places, column = _marked(view, found, axis)
        actions: dict[str, Any] = {
            "cell": functools.partial(_clicked, names, table.steps, axis),
            "name": functools.partial(_named, view),
            "tick": functools.partial(_ticked, str(view.shown.path), names),
        }
        callbacks: dict[str, Any] = {
            f"on_{word}_change": functools.partial(_hear, word, act) for word, act in actions.items()
        }
        _component(
            key=_CELLS,
            data={
                "chart": _CHART,
                "colour": MARK,
                "accent": PRIMARY,
                "rows": runs_of(places),
                "column": column,
                "names": names if len(names) <= MAX_ROW_LABELS else [],
                "n_rows": len(names),
                "edges": axis.edges.tolist(),
                "gaps": list(axis.gaps),
                "ticked": [place for place, name in enumerate(names) if name in ticked],
            },
            **callbacks,
        )
    with st.container(horizontal=True, horizontal_alignment="distribute", gap="small"):
        st.caption(" ".join(_notes(view, axis, is_partial=is_partial)), width="stretch")
        with st.popover("?", type="tertiary", key="keys", help="Keys of the map"):
            st.markdown(_KEYS)


def sentence(shown: Subject, tables: Mapping[str, Sensitivity], level: str) -> None:
    """Draw a sentence that summarises the map, for metrics of the engine only."""
    tensors = tables["tensor"]
    if tensors.metric not in ("fisher", "taylor", "magnitude", "update"):
        return

    def describe() -> str:
        table = rows.at_level(tables, level)
        names, means = [row.name for row in table.rows], table.values["mean"]
        rates = learning_rates(shown.log, table.steps) if table.metric == "update" else None
        return findings(table.metric, table.by, names, table.extents(), table.steps, means, rates).sentence()

    text = remembered("map.sentence", tensors, (str(shown.path), level), describe)
    if text:
        st.markdown(f"**{fmt.markdown(text)}**")


def lines(view: View, ticked: Sequence[str]) -> None:
    """Draw the ticked rows over the steps in one chart; rows without values are omitted."""
    tensors, look = view.tensors, view.look
    nodes = [Node(name, places) for name in ticked if (places := rows.tensors_of(tensors, name))]
    if not nodes:
        return
    table = rows.normalised(heatmap.aggregate(tensors, nodes), look.relative, tensors)
    series = table.values[look.statistic]
    metric = METRICS[table.metric]
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        count = fmt.counted(len(nodes), "row")
        st.caption(
            f"{metric.label} of {count}" if np.isfinite(series).any() else metric.needs, width="content"
        )
        st.button(
            "Clear",
            icon=":material/close:",
            type="tertiary",
            on_click=chosen.set_ticked,
            args=(str(view.shown.path), ()),
            key="lines.clear",
        )
    if not np.isfinite(series).any():
        return
    figure = go.Figure()
    labels = fmt.elided_all([node.name for node in nodes], _NAME_WIDTH)
    for place, (label, values) in enumerate(zip(labels, series, strict=True)):
        if np.isfinite(values).any():
            figure.add_trace(
                go.Scatter(
                    x=list(table.steps),
                    y=values.astype(np.float64),
                    name=fmt.html(label),
                    mode="lines+markers" if len(table.steps) <= heatmap.MOST_APART else "lines",
                    marker={"size": 4},
                    line={"color": CATEGORICAL[place % len(CATEGORICAL)], "width": 2},
                    hovertemplate=f"{fmt.html(label)} %{{y:{fmt.d3_format(values)}}}<extra></extra>",
                )
            )
    lay_out(figure, _LINES_HEIGHT, legend=True)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(**steps_axis(8))
    scale = {} if table.metric == "bits" else {"type": "log", **log_ticks(series.ravel())}
    figure.update_yaxes(title=title(fmt.html(metric.symbol)), automargin=True, **scale)
    chart(figure, f"lines.{len(nodes)}", f"{metric.label} of {', '.join(labels)} over the steps")


def remembered(slot: str, of: object, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return the last result for the same object and an equal key, or make it."""
    known = st.session_state.get(slot)
    if known is not None and known[0] is of and known[1] == key:
        made: Made = known[2]
        return made
    made = make()
    st.session_state[slot] = (of, key, made)
    return made


def _contents(view: View) -> tuple[object, ...]:
    """Return the cache key of the figure."""
    names = tuple(row.name for row in view.table.rows)
    folds = tuple(node.is_open for node in view.nodes)
    return (str(view.shown.path), view.look, view.table.metric, names, folds, view.table.steps)


def _named(view: View, place: object) -> None:
    """Handle a click on the name of a row: toggle a module, or close the module of a tensor."""
    if type(place) is not int or not 0 <= place < len(view.nodes) or not view.is_tree:
        return
    node = view.nodes[place]
    run = str(view.shown.path)
    if node.is_open is not None:
        chosen.fold(run, node.name, is_open=node.is_open)
    elif "." in node.name:
        outer = [other.name for other in view.nodes[:place] if other.is_open]
        above = [name for name in outer if modules.is_within(node.name, name)]
        if above:
            chosen.fold(run, above[-1], is_open=True)


def _clicked(names: Sequence[str], steps: Sequence[int], axis: StepAxis, value: object) -> None:
    """Handle a click on a cell."""
    cell = chosen.chosen_cell(value, len(names), len(axis.columns))
    place = None if cell is None else axis.place_of(cell[1])
    if cell is not None and place is not None:
        chosen.select(names[cell[0]], steps[place])


def _ticked(run: str, names: Sequence[str], place: object) -> None:
    """Handle a click on the box before a name."""
    if type(place) is int and 0 <= place < len(names):
        chosen.tick(run, names[place])


def _marked(view: View, found: Selection | None, axis: StepAxis) -> tuple[tuple[int, ...], int]:
    """Return the rows and the column of the selection; no rows without one."""
    places = _rows_of(view, found)
    if found is None or not places:
        return (), 0
    return places, axis.column_of(view.table.steps.index(found.step))


def _rows_of(view: View, found: Selection | None) -> tuple[int, ...]:
    """Return the rows that show the selection: itself, its parts, or the row that contains it."""
    if found is None:
        return ()
    names = [row.name for row in view.table.rows]
    if found.layer in names:
        return (names.index(found.layer),)
    if view.look.level == modules.LAYER_TYPE:
        types = {view.tensors.rows[i].layer_type for i in rows.tensors_of(view.tensors, found.layer)}
        return tuple(i for i, name in enumerate(names) if name in types)
    inside = modules.members_of(names, found.layer)
    holding = [i for i, name in enumerate(names) if modules.is_within(found.layer, name)]
    return inside or tuple(holding[-1:])


def _notes(view: View, axis: StepAxis, *, is_partial: bool) -> list[str]:
    """Return notes on the picture."""
    table, n_columns = view.table, len(axis.columns)
    values = table.values[view.look.statistic]
    parts = []
    if is_partial:
        parts.append("The steps are being measured, the last one first.")
    elif not np.isfinite(values).any():
        parts.append(METRICS[table.metric].needs or "No weight has a finite value.")
    elif table.metric != "bits":
        parts.append("Logarithmic colours, clipped at 1 % and 99 %.")
    if axis.gaps:
        listed = ", ".join(fmt.count(axis.steps[column]) for column in axis.gaps[:_MOST_GAPS])
        more = " and more" if len(axis.gaps) > _MOST_GAPS else ""
        parts.append(f"× No readable checkpoint at step {listed}{more}.")
    if len(table.steps) > n_columns:
        parts.append(
            f"A column is the mean of up to {-(-len(table.steps) // n_columns)} neighbouring steps; a click "
            "picks the last of them."
        )
    if any(len(node.members) > 1 for node in view.nodes) and view.look.statistic != "mean":
        parts.append("A row of several modules shows the mean over their tensors.")
    if np.isnan(values).any() and np.isfinite(values).any() and not is_partial:
        parts.append(_grey(view))
    averages = services.averages_of(view.shown)
    if averages:
        parts.append(f"{fmt.counted(len(averages), 'tensor')} are a moving average of the model.")
    if table.note:
        parts.append(fmt.markdown(table.note))
    return parts


def _grey(view: View) -> str:
    """Return why cells are grey: the optimizer state is not matched to tensors, or no value exists."""
    lost = int((~np.isfinite(view.tensors.values["mean"])).all(axis=1).sum())
    if lost and (view.table.metric == "fisher" or any(row.is_unattributed for row in view.shown.tensors)):
        return f"Grey: {fmt.counted(lost, 'tensor')} without optimizer state that is known to be theirs."
    return "Grey: the tensor is absent or has no value at this step."


def _hear(word: str, act: Callable[[object], None]) -> None:
    """Handle an untrusted value from the browser."""
    act(st.session_state[_CELLS].get(word))


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last index of every run of consecutive indices.

    Examples
    --------
    >>> runs_of([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    runs = (
        [place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])
    )
    return [(run[0], run[-1]) for run in runs]
