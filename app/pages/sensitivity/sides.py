"""Two runs side by side: the same rows, and one scale of colours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from inshrink_app.pages.sensitivity import grouping
from inshrink_app.pages.sensitivity.heatmap import MAX_COLUMNS, Drawn, bucket_steps, cells, row_labels
from inshrink_app.widgets import modules
from inshrink_app.widgets.figures import add_heading, columns_axis, few_ticks
from inshrink_app.widgets.formatting import count_text, counted, elide, html_text, markdown_text
from inshrink_app.widgets.layout import chart
from inshrink_app.widgets.tables import METRICS, Sensitivity

__all__ = ["Sides", "aligned", "show", "sides_figure"]

_NAME_WIDTH = 30
_MARKS = {(True, True): "", (True, False): "◧ ", (False, True): "◨ "}
"""What stands before a row that only the run on the left, or on the right, has."""

_MOST_ROW_LABELS, _MOST_STEP_LABELS = 60, 2
_GAP = 0.12
"""Share of the width between the two: room for the labels of steps on a telephone."""

_TICK_SHIFT = 7
"""Pixels by which labels of steps are moved apart, where one half ends and the other begins."""

_TITLE_WIDTH = 12
"""Letters of a name above its half, on a telephone."""


class Sides(NamedTuple):
    """Two measurements with the same rows, and which of the two have each row."""

    tables: tuple[Sensitivity, Sensitivity]
    present: tuple[tuple[bool, bool], ...]


def aligned(mine: Sensitivity, other: Sensitivity, level: str) -> Sides:
    """Return two measurements by tensor with the same rows, matched by name.

    Parameters
    ----------
    mine, other
        One metric of two runs, by tensor; each has steps of its own.
    level
        What a row is (`modules.levels`). Those that only the second has come last.
    """
    places = [{row.name: i for i, row in enumerate(table.rows)} for table in (mine, other)]
    rows = {row.name: row for table in (other, mine) for row in table.rows}
    names = tuple(dict.fromkeys([*places[0], *places[1]]))
    nodes = modules.rows_at(names, [rows[name].layer for name in names], level)
    sides = []
    for table, known in zip((mine, other), places, strict=True):
        there = [i for i, name in enumerate(names) if name in known]
        taken = [known[names[i]] for i in there]
        values = {}
        for statistic, measured in table.values.items():
            values[statistic] = np.full((len(names), len(table.steps)), np.nan, np.float32)
            values[statistic][there] = measured[taken]
        own = tuple(table.rows[known[name]] if name in known else rows[name] for name in names)
        sides.append(grouping.aggregate(dataclasses.replace(table, rows=own, values=values), nodes))
    present = [tuple(any(names[i] in known for i in node.members) for known in places) for node in nodes]
    return Sides((sides[0], sides[1]), tuple((one, two) for one, two in present))


def sides_figure(sides: Sides, names: tuple[str, str], statistic: str) -> go.Figure:
    """Draw two runs beside each other, rows in common, each over its own steps.

    Parameters
    ----------
    sides
        What was measured; of the same metric.
    names
        Of the runs.
    statistic
        A key of the values.
    """
    buckets = [bucket_steps(table.values[statistic], table.steps, MAX_COLUMNS // 2) for table in sides.tables]
    values = np.concatenate([one.values for one in buckets], axis=1)
    drawn = Drawn.of(sides.tables[0], values, statistic)
    halves = np.split(drawn.colours, [len(buckets[0].labels)], axis=1)
    figure = go.Figure()
    for place, (one, colours, name) in enumerate(zip(buckets, halves, names, strict=True)):
        shown = cells(
            one._replace(values=colours),
            drawn.rows,
            one.values,
            f"{html_text(name)}<br>{drawn.hover}{drawn.told}<extra></extra>",
            missing=f"{html_text(name)}<br>%{{y}}<br>step %{{x}}<br>no value<extra></extra>",
            **drawn.look,
            showscale=place == 0,
        )
        figure.add_traces([trace.update(xaxis="x2" if place else "x") for trace in shown.data])
        half = [place * (0.5 + _GAP / 2), 0.5 - _GAP / 2 + place * (0.5 + _GAP / 2)]
        shift = {"ticklabelshift": _TICK_SHIFT if place else -_TICK_SHIFT}
        axis = columns_axis(one.labels) | few_ticks(one.labels, one.labels, _MOST_STEP_LABELS)
        figure.update_layout({f"xaxis{2 if place else ''}": {**axis, "domain": half, "anchor": "y", **shift}})
        add_heading(figure, html_text(elide(name, _TITLE_WIDTH)), half[0])
    tables = sides.tables
    labels = row_labels([row.name for row in tables[0].rows])
    marked = [_MARKS[who] + label for who, label in zip(sides.present, labels, strict=True)]
    figure.update_yaxes(
        type="category",
        range=[len(marked) - 0.5, -0.5],
        showgrid=False,
        automargin=True,
        ticklabelstandoff=4,
        **few_ticks(drawn.rows, marked, _MOST_ROW_LABELS),
    )
    drawn.lay_out(figure, marked)
    return figure


def show(mine: Sensitivity, other: Sensitivity, names: tuple[str, str], statistic: str, level: str) -> None:
    """Draw both, and say what is to be seen; nothing where they have no tensor in common.

    Parameters
    ----------
    mine, other
        One metric of two runs, by tensor.
    names
        What to call them.
    statistic, level
        What of the values is shown, and what a row is.
    """
    if not {row.name for row in mine.rows} & {row.name for row in other.rows}:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
        return
    sides = aligned(mine, other, level)
    short = (elide(names[0], _NAME_WIDTH), elide(names[1], _NAME_WIDTH))
    metric = METRICS[mine.metric]
    chart(sides_figure(sides, short, statistic), "sides", f"{metric.label} of two runs side by side")
    st.caption(_caption(sides, short))


def _caption(sides: Sides, names: Sequence[str]) -> str:
    """Say what the picture does not show by itself."""
    left, right = map(markdown_text, names)
    said = [f"Left: {left}. Right: {right}. The same rows and colours; each run over its own steps."]
    common = len(set(sides.tables[0].steps) & set(sides.tables[1].steps))
    said.append(f"{counted(common, 'step')} in common." if common else "No step in common.")
    for who, name in zip(((True, False), (False, True)), names, strict=True):
        n_rows = sides.present.count(who)
        if n_rows:
            said.append(f"{_MARKS[who]}{count_text(n_rows)} only in {markdown_text(name)}.")
    return " ".join(said)
