"""The map of all rows at all steps, the selection in it, and the ticked rows as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

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
from inshrink_app.widgets.figures import TOOLBAR, curve, lay_out, log_ticks, steps_axis, title
from inshrink_app.widgets.layout import chart, remembered
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.findings import findings
from inshrink_core.sensitivity import SensitivityMetric

_CHART, _CELLS = "heatmap", "heatmap.cells"
_LINES_HEIGHT, _MAX_TICKS = 120, 4
_MAX_GAPS = 6
_DASHES = ("solid", "dot")
_NAME_WIDTH = 60
_KINDS = (modules.TENSOR, modules.LAYER_TYPE)
_SCRIPT = Path(__file__).parents[2] / "assets" / "cells.js"

_component = st.components.v2.component("inshrink.cells", js=_SCRIPT.read_text(), isolate_styles=False)


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
    lost = [Path(path).name for path, _ in view.shown.unreadable]
    missing = () if view.shown.n_unread else heatmap.missing_steps(table.steps, lost)
    curves = tuple((name, view.shown.log[name]) for name in view.look.curves if name in view.shown.log)
    # The frame is that of the whole training while its earlier checkpoints are being read.
    logged = [series[0][0] for _, series in curves if series]
    is_end = view.shown.n_unread > 0 and table.steps == view.shown.steps
    since = min([table.steps[0], *logged]) if is_end else None

    def make() -> go.Figure:
        shapes = ["" if row.shape is None else fmt.shape(row.shape) for row in table.rows]
        tree = list(zip(modules.labels(view.nodes), shapes, strict=True))
        return heatmap.heatmap_figure(
            table, view.look.statistic, curves=curves, tree=tree, missing=missing, since=since
        )

    figure = remembered("map.figure", table, (curves, missing, since), make)
    axis = StepAxis.of(table.steps, missing, since=since)
    with st.container(gap=None):
        metric = METRICS[table.metric]
        chart(figure, _CHART, f"{metric.label} of {len(table.rows)} rows over {len(table.steps)} steps")
        places = _rows_of(view, found)
        at = table.steps.index(found.step) if found is not None and places else None
        run = str(view.shown.path)

        def heard(word: str) -> Any:
            return st.session_state[_CELLS].get(word)  # Untrusted, from the browser.

        _component(
            key=_CELLS,
            data={
                "chart": _CHART,
                "colour": MARK,
                "accent": PRIMARY,
                "rows": runs_of(places),
                "column": 0 if at is None else axis.column_of(at),
                "names": names if len(names) <= MAX_ROW_LABELS else [],
                "n_rows": len(names),
                "edges": axis.edges.tolist(),
                "gaps": list(axis.gaps),
                "answered": st.session_state.get(chosen.ANSWERED, 0),
                "ticked": [place for place, name in enumerate(names) if name in ticked],
            },
            on_picked_change=lambda: chosen.pick(heard("picked"), run, names, table.steps, axis),
            on_name_change=lambda: _named(view, heard("name")),
        )
    st.caption(" ".join(_notes(view, axis, is_partial=is_partial)))


def sentence(shown: Subject, tensors: Sensitivity, level: str) -> None:
    """Draw a sentence that summarises the map, for metrics of the engine only."""
    if tensors.metric not in list(SensitivityMetric):
        return

    def describe() -> str:
        layers = [row.layer_type for row in tensors.rows]
        nodes = modules.rows_at([row.name for row in tensors.rows], layers, level)
        table = heatmap.aggregate(tensors, nodes, ("mean",))
        names, by = [node.name for node in nodes], level if level in _KINDS else modules.BLOCK
        return findings(
            table.metric, by, names, table.extents(), table.steps, table.values["mean"]
        ).sentence()

    text = remembered("map.sentence", tensors, (str(shown.path), level), describe)
    if text:
        st.markdown(f"**{fmt.markdown(fmt.joined(text))}**")


def lines(view: View, ticked: Sequence[str]) -> None:
    """Draw the ticked rows over the steps in one chart; rows without values are omitted."""
    tensors, look = view.tensors, view.look
    nodes = [Node(name, places) for name in ticked if (places := rows.tensors_of(tensors, name))]
    if not nodes:
        return
    table = heatmap.aggregate(tensors, nodes, {"mean", look.statistic})
    series = table.values[look.statistic]
    metric, is_known = METRICS[table.metric], bool(np.isfinite(series).any())
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        text = f"{metric.label} of {fmt.counted(len(nodes), 'row')}" if is_known else metric.needs
        st.caption(text, width="content")
        clear: dict[str, Any] = {"on_click": chosen.tick, "args": (str(view.shown.path), ticked, ())}
        st.button("Clear", icon=":material/close:", type="tertiary", key="lines.clear", **clear)
    if is_known:
        draw_lines(
            table.metric, [(node.name, table.steps, row) for node, row in zip(nodes, series, strict=True)]
        )


def draw_lines(
    metric: str, curves: Sequence[tuple[str, Sequence[int], NDArray[np.float32]]], n_each: int = 1
) -> None:
    """Draw values over steps in one chart.

    Parameters
    ----------
    metric
        A key of `METRICS`.
    curves
        Name, steps and values of each line; lines without values are omitted.
    n_each
        Number of neighbouring lines that share a colour.
    """
    figure = go.Figure()
    labels = fmt.clipped_all([name for name, _, _ in curves], _NAME_WIDTH)
    for place, (label, (_, steps, values)) in enumerate(zip(labels, curves, strict=True)):
        if np.isfinite(values).any():
            colour = CATEGORICAL[place // n_each % len(CATEGORICAL)]
            hover, dash = f"{fmt.html(label)} %{{y:{fmt.d3_format(values)}}}", _DASHES[place % n_each]
            figure.add_trace(curve(list(steps), values, fmt.html(label), hover, colour, dash=dash))
    lay_out(figure, _LINES_HEIGHT, legend=chosen.MAX_TICKED)
    figure.update_layout(hovermode="x unified", margin_t=TOOLBAR, height=figure.layout.height - TOOLBAR)
    figure.update_xaxes(**steps_axis(8))
    every = np.concatenate([values.ravel() for _, _, values in curves])
    ticks = log_ticks(every)
    even = {name: line[:: math.ceil(len(line) / _MAX_TICKS)] for name, line in ticks.items() if line}
    scale = {} if metric == "bits" else {"type": "log", **even}
    figure.update_yaxes(title=title(fmt.html(METRICS[metric].symbol)), automargin=True, **scale)
    alt = f"{METRICS[metric].label} of {', '.join(labels)} over the steps"
    chart(figure, f"lines.{metric}.{len(curves)}.{n_each}", alt)


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
    parts = [f"{METRICS[table.metric].label}: {METRICS[table.metric].meaning}"]
    if is_partial:
        parts.append("Not all steps are measured yet; the last one comes first.")
    elif not np.isfinite(values).any():
        parts.append(METRICS[table.metric].needs or "No weight has a finite value.")
    elif table.metric != "bits":
        parts.append("Colours are logarithmic, clipped at the 1st and 99th percentile.")
    if axis.gaps:
        listed = ", ".join(fmt.count(axis.steps[column]) for column in axis.gaps[:_MAX_GAPS])
        more = " and more" if len(axis.gaps) > _MAX_GAPS else ""
        parts.append(f"× No readable checkpoint at step {listed}{more}.")
    if len(table.steps) > n_columns:
        n = -(-len(table.steps) // n_columns)
        parts.append(f"A column is the mean of up to {n} neighbouring steps; a click picks the last one.")
    if any(len(node.members) > 1 for node in view.nodes) and view.look.statistic != "mean":
        parts.append("This statistic is measured for single tensors only.")
    if np.isnan(values).any() and np.isfinite(values).any() and not is_partial:
        parts.append(_grey(view))
    averages = services.averages_of(view.shown)
    if averages:
        parts.append(f"{fmt.counted(len(averages), 'tensor')} belong to a moving average of the model.")
    if table.note:
        parts.append(fmt.markdown(table.note))
    return parts


def _grey(view: View) -> str:
    """Return why cells are grey: the optimizer state is not matched to tensors, or no value exists."""
    lost = int((~np.isfinite(view.tensors.values["mean"])).all(axis=1).sum())
    if lost and (view.table.metric == "fisher" or any(row.is_unattributed for row in view.shown.tensors)):
        return f"Grey: {fmt.counted(lost, 'tensor')} without matching optimizer state."
    return "Grey: absent at this step, or without a value."


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
