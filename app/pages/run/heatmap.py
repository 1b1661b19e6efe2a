"""The map as a picture: rows by steps, with training metrics above them. No Streamlit here."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.model import METRICS, Sensitivity
from inshrink_app.theme import CATEGORICAL, DIVERGING, GAP, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import (
    TOOLBAR,
    colour_bar,
    columns_axis,
    few_ticks,
    gaps,
    linear_scale_ticks,
    log_scale_ticks,
    log_ticks,
    title,
)
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""

_CLIPPED = (1.0, 99.0)
"""Percentiles between which colours spread: outliers take the colour of the ends."""

_LONGEST_COLORBAR = 420

_ROW_HEIGHTS = ((16, 24), (28, 18), (60, 12), (120, 7), (250, 4), (700, 2), (10**9, 1))
"""Pixels of a row by how many there are: (at most so many rows, pixels)."""

_LETTER_PIXELS = 5.8
"""Width of a letter of a label, rather more than less; a margin too narrow grows by itself."""

_ROOM_OF_ROWS, _ROOM_OF_COLORBAR, ROOM_OF_STEPS = 55, 70, 66
"""Pixels beside the letters: boxes, paddings, the bar itself; below, the labels of steps and their title."""

_ROOM_OF_BOXES = 22
"""Pixels before the names, for the boxes by which rows are ticked."""

_NAME_WIDTH = 34
MAX_ROW_LABELS = 60

MOST_APART = 60
"""With more rows or columns there is no line between them."""

_RELATIVE = {
    "plain": "{symbol} per weight, {unit}",
    "share": "share of the total",
    "rate": "{symbol} / Σ learning rate",
    "times": "{symbol}, times",
}
"""What stands behind the name of a metric, by what its values are relative to."""


class Columns(NamedTuple):
    """The columns of a heatmap: values ``[rows, columns]``, and a label each."""

    values: NDArray[np.float32]
    labels: tuple[str, ...]


def column_edges(n_steps: int, limit: int = MAX_COLUMNS) -> NDArray[np.int64]:
    """Return where columns begin, and the end of the last one."""
    return np.linspace(0, n_steps, min(limit, n_steps) + 1).round().astype(np.int64)


def bucket_steps(values: NDArray[np.float32], steps: Sequence[int], limit: int = MAX_COLUMNS) -> Columns:
    """Merge neighbouring steps into at most `limit` columns, by the mean of what is there.

    Parameters
    ----------
    values
        ``[rows, steps]``, NaN where there is no value. A column is NaN only where all its steps are.
    steps
        Ascending.
    """
    n_steps = len(steps)
    if n_steps <= limit:
        return Columns(values, tuple(fmt.count(step) for step in steps))
    edges = column_edges(n_steps, limit)
    present = np.isfinite(values)
    sums = np.add.reduceat(np.where(present, values, 0).astype(np.float64), edges[:-1], axis=1)
    counts = np.add.reduceat(present, edges[:-1], axis=1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums / counts).astype(np.float32)
    labels = tuple(
        f"{fmt.count(steps[a])} – {fmt.count(steps[b - 1])}" if b - a > 1 else fmt.count(steps[a])
        for a, b in pairwise(edges)
    )
    return Columns(means, labels)


def scaled(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return log10 of values, NaN where there is none, and the ends of the colour scale.

    Zeros have no logarithm: they take the scale's lower end; the hover tells that they are zero.
    """
    wide = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(np.isfinite(wide), np.log10(wide), np.nan)
    known = shown[np.isfinite(shown)]
    low, high = map(float, np.percentile(known, _CLIPPED) if known.size else (-1.0, 0.0))
    if high - low < 0.02:
        low, high = low - 0.5, high + 0.5
    return np.where(np.isneginf(shown), low, shown).astype(np.float32), low, high


def linear(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return values as they are, and the ends of a scale that begins at zero."""
    known = values[np.isfinite(values)]
    return values, 0.0, float(known.max()) if known.size else 1.0


def colorbar(text: str, low: float, high: float, room: int, *, is_linear: bool = False) -> dict[str, Any]:
    """Return the scale beside the cells, with round values between its ends."""
    ticks = linear_scale_ticks(low, high) if is_linear else log_scale_ticks(low, high)
    place = {"lenmode": "pixels", "len": min(_LONGEST_COLORBAR, room), "y": 1, "yanchor": "top", "ypad": 0}
    return colour_bar(text, ticks, side="right", **place)


def _told(table: Sensitivity, values: NDArray[np.float32], statistic: str, relative: str) -> str:
    """Return what a hover tells of a cell, in a format for the smallest and the largest of the values."""
    metric = METRICS[table.metric]
    if relative == "share":
        return "share = %{customdata:.3~%}"
    known = np.abs(values[np.isfinite(values) & (values != 0)])
    form = fmt.d3_format((float(known.min()), float(known.max())) if known.size else ())
    word = "times" if relative == "times" else f"{statistic} {metric.symbol}"
    return f"{fmt.html(word)} = %{{customdata:{form}}}"


def _row_category(row: Row) -> str:
    """Return a row's identity, which is also the head of its hover: full name, what it is, its shape."""
    if row.shape is None:
        extent = f"{fmt.counted(row.n_tensors, 'tensor')}, {fmt.count(row.numel)} values"
    else:
        extent = fmt.shape(row.shape)
    kind = f"{row.layer_type} · " if row.layer_type and row.layer_type != row.name else ""
    return f"<b>{fmt.html(row.name)}</b><br>{fmt.html(kind)}{extent}"


def row_labels(names: Sequence[str]) -> list[str]:
    """Return short labels: without the modules that all names share, and without a long middle.

    Examples
    --------
    >>> row_labels(["net.layers.0.fc.weight", "net.layers.1.fc.weight", "net.head"])
    ['layers.0.fc.weight', 'layers.1.fc.weight', 'head']
    """
    parts = [name.split(".") for name in names]
    shared = 0
    while len(parts) > 1 and all(len(part) > shared + 1 for part in parts):
        if len({part[shared] for part in parts}) > 1:
            break
        shared += 1
    return fmt.elided_all([".".join(part[shared:]) for part in parts], _NAME_WIDTH)


def take(table: Sensitivity, places: Sequence[int]) -> Sensitivity:
    """Return some rows of a table."""
    index = np.asarray(places, dtype=np.int64)
    return dataclasses.replace(
        table,
        rows=tuple(table.rows[i] for i in places),
        values={name: values[index] for name, values in table.values.items()},
        sizes=None if table.sizes is None else table.sizes[index],
    )


def aggregate(table: Sensitivity, groups: Sequence[Node], exact: Sensitivity | None = None) -> Sensitivity:
    """Return a table with a row for each group.

    Parameters
    ----------
    table
        By tensor.
    groups
        Of its rows.
    exact
        The same metric by block or layer type: rows of the same name and extent are taken from it, medians
        and percentiles included. For all others these are means over tensors, weighted by their size.
    """
    rows = tuple(_row_of(table, group) for group in groups)
    members = np.asarray([i for group in groups for i in group.members], np.int64)
    starts = np.cumsum([0, *(len(group.members) for group in groups)])[:-1]
    numel = np.asarray([row.numel for row in table.rows], np.float64).reshape(-1, 1)
    alone = [place for place, group in enumerate(groups) if len(group.members) == 1]
    same = _same(rows, () if exact is None else exact.rows)

    def summed(each: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.add.reduceat(each[members], starts, axis=0)
        return sums

    values = {}
    for name, measured in table.values.items():
        known = np.isfinite(measured)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = summed(np.where(known, measured, 0.0) * numel) / summed(np.where(known, numel, 0.0))
        values[name] = means.astype(np.float32)
        if exact is not None:
            values[name][list(same)] = exact.values[name][list(same.values())]
        values[name][alone] = measured[members[starts[alone]]]
    sizes = summed(np.where(np.isfinite(table.values["mean"]), table.extents(), 0.0))
    return dataclasses.replace(table, by="block", rows=rows, values=values, sizes=sizes)


def _same(rows: Sequence[Row], others: Sequence[Row]) -> dict[int, int]:
    """Return the places of rows, and those of the others that have the same name and extent."""
    known = {(row.name, row.n_tensors): i for i, row in enumerate(others)}
    told = ((place, known.get((row.name, row.n_tensors))) for place, row in enumerate(rows))
    return {place: at for place, at in told if at is not None}


def _row_of(table: Sensitivity, group: Node) -> Row:
    """Describe a group; one of a single tensor looks like that tensor."""
    members = [table.rows[i] for i in group.members]
    if len(members) == 1:
        return members[0]._replace(name=group.name)
    sizes: dict[str, int] = {}
    for member in members:
        sizes[member.layer_type] = sizes.get(member.layer_type, 0) + member.numel
    layer = max(sizes, key=sizes.__getitem__, default="")
    return members[0]._replace(
        name=group.name,
        block=group.name,
        layer_type=layer,
        n_tensors=len(members),
        numel=sum(member.numel for member in members),
        shape=None,
    )


_LABEL_WIDTH, _FEW_ROWS = 30, 40
_MAX_STEP_LABELS = 6
"""Beside the panel there is little room on a small screen."""

_CURVE_HEIGHT, _CURVE_GAP = 74, 10
"""Pixels of a training metric above the cells, and of the room between."""

_CURVE_NAME_WIDTH = 12
_DECADES = 100
"""A metric that falls further than this is drawn on a logarithmic axis."""

_NO_VALUE = "%{y}<br>step %{x}<br>no value at this step<extra></extra>"


def column_of(place: int, n_steps: int, limit: int = MAX_COLUMNS) -> int:
    """Return the column that holds a step, by the step's place."""
    return int(np.searchsorted(column_edges(n_steps, limit), place, side="right")) - 1


def heatmap_figure(
    table: Sensitivity,
    statistic: str,
    *,
    relative: str = "plain",
    curves: Sequence[tuple[str, Sequence[tuple[int, float]]]] = (),
    tree: Sequence[tuple[str, str]] = (),
) -> go.Figure:
    """Draw rows by steps, colour by the logarithm of the value.

    Parameters
    ----------
    table
        What to draw.
    statistic
        A key of its values.
    relative
        What the values are relative to (`arranging.NORMALISED`), or ``times`` where they are quotients.
    curves
        Training metrics by name, and their values by step, drawn above on the same axis.
    tree
        Of each row its label, as it stands in the tree of modules, and its shape; by default names alone.
    """
    columns = bucket_steps(table.values[statistic], table.steps)
    values = columns.values
    metric = METRICS[table.metric]
    is_linear = table.metric == "bits"
    colours, low, high = linear(values) if is_linear else scaled(values)
    if relative == "times":  # red below 1 and blue above
        reach = max(abs(high), abs(low), 1e-3)
        low, high = -reach, reach
    rows = [_row_category(row) for row in table.rows]
    row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if len(rows) <= most)
    height = TOOLBAR + max(220, len(rows) * row_pixels + 62)
    about = f"{metric.label}: {_RELATIVE[relative].format(symbol=metric.symbol, unit=metric.unit)}"
    bar = colorbar(about, low, high, height - TOOLBAR - 82, is_linear=is_linear)
    told = _told(table, values, statistic, relative)
    figure = go.Figure(gaps(colours, columns.labels, rows, _NO_VALUE))
    figure.add_trace(
        go.Heatmap(
            z=colours,
            x=columns.labels,
            y=rows,
            customdata=columns.values,
            hoverongaps=False,
            xgap=1 if len(columns.labels) <= MOST_APART else 0,
            ygap=1 if len(rows) <= MOST_APART else 0,
            hovertemplate=f"%{{y}}<br>step %{{x}}<br>{told}<extra></extra>",
            zmin=low,
            zmax=high,
            colorscale=DIVERGING if relative == "times" else SEQUENTIAL,
            colorbar=bar,
        )
    )
    tree = tree or [(label, "") for label in row_labels([row.name for row in table.rows])]
    labels = [
        (fmt.html(fmt.elided(label, _LABEL_WIDTH)), fmt.html(shape) if shape else "") for label, shape in tree
    ]
    # Where margins do not hold the labels, the browser draws everything once more.
    longest = max((len(f"{label}  {shape}") for label, shape in labels), default=0)
    figure.update_layout(
        height=height,
        margin={
            "l": _ROOM_OF_ROWS + _LETTER_PIXELS * longest,
            "r": _ROOM_OF_COLORBAR + _LETTER_PIXELS * max(map(len, bar["ticktext"]), default=0),
            "t": TOOLBAR,
            "b": ROOM_OF_STEPS,
        },
        dragmode="zoom",
        hovermode="closest",
        showlegend=False,
        hoverlabel={"align": "left"},
    )
    _name_rows(figure, labels)
    shown = few_ticks(columns.labels, columns.labels, _MAX_STEP_LABELS)
    figure.update_xaxes(range=[-0.5, len(columns.labels) - 0.5], **(columns_axis(columns.labels) | shown))
    figure.update_yaxes(
        type="category", range=[len(rows) - 0.5, -0.5], showgrid=False, showticklabels=False, ticks=""
    )
    known = [(name, by_column(series, table.steps)) for name, series in curves]
    known = [(name, column) for name, column in known if _any(column)]
    if known:  # One cursor for all: a line at the step, through the curves and the cells.
        figure.update_xaxes(
            showspikes=True, spikemode="across", spikesnap="data", spikethickness=1, spikecolor=GAP
        )
        _add_curves(figure, known, columns.labels)
    return figure


def _name_rows(figure: go.Figure, labels: Sequence[tuple[str, str]]) -> None:
    """Write names and shapes beside the rows: names to the left, as a tree stands, and they can be clicked.

    The first annotations are the names, one a row as long as all can be read; further ones are not clicked.
    """
    stride = -(-len(labels) // MAX_ROW_LABELS)
    size = 12 if len(labels) <= _FEW_ROWS else 10
    look = {"xref": "paper", "x": 0, "yref": "y", "showarrow": False, "yanchor": "middle", "borderpad": 0}
    left = -figure.layout.margin.l + _ROOM_OF_BOXES
    named = [
        {**look, "y": row, "text": label, "xanchor": "left", "xshift": left, "font": {"size": size}}
        | {"captureevents": stride == 1, "align": "left"}
        for row, (label, _) in enumerate(labels)
        if row % stride == 0
    ]
    shapes = [
        {**look, "y": row, "text": shape, "xanchor": "right", "xshift": -4}
        | {"font": {"size": size - 1, "color": GAP}}
        for row, (_, shape) in enumerate(labels)
        if shape and row % stride == 0
    ]
    figure.update_layout(annotations=[*named, *shapes])


def training_loss(log: Mapping[str, Sequence[tuple[int, float]]]) -> str | None:
    """Return which of the logged metrics is the loss that training minimised; None where none is.

    Examples
    --------
    >>> training_loss({"eval_loss": (), "lr": (), "train/loss": ()}), training_loss({"lr": ()})
    ('train/loss', None)
    """
    named = [name for name in log if "loss" in name.casefold()]
    held_out = ("eval", "val", "test", "dev")
    own = [name for name in named if not any(word in name.casefold() for word in held_out)]
    return min(own or named, key=len, default=None)


def by_column(series: Sequence[tuple[int, float]], steps: Sequence[int]) -> list[float]:
    """Return the newest finite value logged up to each column's last step, since the column before it.

    Parameters
    ----------
    series
        Step and value, in any order.
    steps
        Of the checkpoints, ascending.

    Examples
    --------
    >>> by_column([(1, 3.0), (9, 2.0), (10, 1.0)], (5, 10, 20))
    [3.0, 1.0, nan]
    """
    edges = column_edges(len(steps))
    ends = [steps[int(edge) - 1] for edge in edges[1:]]
    found = [math.nan] * len(ends)
    for step, value in sorted((step, value) for step, value in series if math.isfinite(value)):
        place = bisect.bisect_left(ends, step)
        if place < len(ends):
            found[place] = value
    return found


def _any(values: Sequence[float]) -> bool:
    return any(map(math.isfinite, values))


def _add_curves(
    figure: go.Figure, curves: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str]
) -> None:
    """Draw training metrics above the cells, and give them room."""
    inner = figure.layout.height - TOOLBAR - ROOM_OF_STEPS
    every = inner + len(curves) * (_CURVE_HEIGHT + _CURVE_GAP)
    figure.update_layout(height=every + TOOLBAR + ROOM_OF_STEPS, yaxis={"domain": [0, inner / every]})
    for place, (name, values) in enumerate(curves):
        axis = f"y{place + 2}"
        figure.add_trace(
            go.Scatter(
                x=list(labels),
                y=np.asarray(values, np.float64),
                yaxis=axis,
                mode="lines+markers" if len(labels) <= MOST_APART else "lines",
                connectgaps=True,
                line={"color": CATEGORICAL[0], "width": 2},
                marker={"size": 4},
                hovertemplate=f"{fmt.html(name)} %{{y:{fmt.d3_format(values)}}}"
                "<br>step %{x}<extra></extra>",
                showlegend=False,
            )
        )
        known = [value for value in values if math.isfinite(value)]
        look: dict[str, Any] = {"nticks": 3, "tickformat": "~g"}
        if min(known) > 0 and max(known) / min(known) > _DECADES:
            look = {"type": "log", **log_ticks([min(known), max(known)])}
            look |= {key: one[:: max(1, len(one) // 2)] for key, one in look.items() if key != "type"}
        top = every - place * (_CURVE_HEIGHT + _CURVE_GAP)
        heading = title(fmt.html(fmt.elided(name, _CURVE_NAME_WIDTH)))
        domain = [(top - _CURVE_HEIGHT) / every, top / every]
        more = {"title": heading, "fixedrange": True, "zeroline": False, "domain": domain}
        figure.update_layout({f"yaxis{place + 2}": look | more})
    figure.data[1].colorbar.y = inner / every
