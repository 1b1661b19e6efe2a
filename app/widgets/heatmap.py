"""Sensitivities as pictures: rows by steps, of any kind of row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.model.sensitivity import METRICS, Sensitivity
from inshrink_app.theme import DIVERGING, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import (
    TOOLBAR,
    colour_bar,
    columns_axis,
    gaps,
    linear_scale_ticks,
    log_scale_ticks,
)
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import Row

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""

_CLIPPED = (1.0, 99.0)
"""Percentiles between which colours spread: outliers take the colour of the ends."""

_LONGEST_COLORBAR = 420

_ROW_HEIGHTS = ((24, 24), (60, 17), (120, 10), (250, 5), (700, 3), (10**9, 1))
"""Pixels of a row by how many there are: (at most so many rows, pixels)."""

_LETTER_PIXELS = 5.8
"""Width of a letter of a label, rather more than less; a margin too narrow grows by itself."""

_ROOM_OF_ROWS, _ROOM_OF_COLORBAR, ROOM_OF_STEPS = 33, 70, 66
"""Pixels beside the letters: ticks, paddings, the bar itself; below, the labels of steps and their title."""

_NAME_WIDTH = 34
MAX_ROW_LABELS = 60

MOST_APART = 60
"""With more rows or columns there is no line between them."""

_RELATIVE = {
    "plain": "{symbol} per weight, {unit}",
    "first": "{symbol}, times the row's first step",
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


def linear_scale(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return the values, and the ends of the colour scale."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size == 0:
        return values, 0.0, 1.0
    low, high = (float(end) for end in np.percentile(finite, _CLIPPED))
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-30):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    return np.where(np.isfinite(values), values, np.float32("nan")), low, high


def log_scale(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return log10 of the values, NaN where there is none, and the ends of the colour scale.

    Zeros have no logarithm: they take the scale's lower end; the hover tells that they are zero.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size == 0:
        return np.where(np.isfinite(values), np.float32(0), np.float32("nan")), -1.0, 0.0
    logs_of_positive = np.log10(positive.astype(np.float64))
    ends = np.percentile(logs_of_positive, _CLIPPED)
    low, high = float(ends[0]), float(ends[1])
    if high - low < 0.02:
        middle = (low + high) / 2
        low, high = middle - 0.5, middle + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values.astype(np.float64))
    logs = np.where(np.isneginf(logs), low, logs)
    return np.where(np.isfinite(values), logs, np.nan).astype(np.float32), low, high


def colorbar(text: str, low: float, high: float, room: int, scale: str = "log") -> dict[str, Any]:
    """Return the scale beside the cells, with round values between its ends."""
    ticks = log_scale_ticks(low, high) if scale == "log" else linear_scale_ticks(low, high)
    place = {"lenmode": "pixels", "len": min(_LONGEST_COLORBAR, room), "y": 1, "yanchor": "top", "ypad": 0}
    return colour_bar(text, ticks, side="right", **place)


class Drawn(NamedTuple):
    """How values of a metric are drawn: their colours, the rows' identities, and what is told of a cell."""

    colours: NDArray[np.float32]
    rows: list[str]
    height: float
    hover: str
    told: str
    symbol: str
    look: dict[str, Any]

    @classmethod
    def of(
        cls,
        table: Sensitivity,
        values: NDArray[np.float32],
        statistic: str,
        relative: str = "plain",
    ) -> Drawn:
        """Choose colours for values ``[rows, columns]`` of a table."""
        metric = METRICS[table.metric]
        scale = "log" if relative == "times" else metric.scale
        colours, low, high = (log_scale if scale == "log" else linear_scale)(values)
        both_ways = is_both_ways(table, relative)
        if both_ways:
            low, high = _around(0.0 if scale == "log" else 1.0, low, high)
        row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if len(table.rows) <= most)
        height = TOOLBAR + max(220, len(table.rows) * row_pixels + 62)
        symbol = {"share": "share", "times": "times"}.get(relative, metric.symbol)
        told = "{unit}" if metric.pooled and relative == "plain" else _RELATIVE[relative]
        bar = f"{metric.label}: {told.format(symbol=metric.symbol, unit=metric.unit)}"
        word = "" if metric.pooled or relative in ("share", "times") else f"{statistic} "
        look = {
            "zmin": low,
            "zmax": high,
            "colorscale": DIVERGING if both_ways else SEQUENTIAL,
            "colorbar": colorbar(bar, low, high, height - TOOLBAR - 82, scale),
        }
        return cls(
            colours=colours,
            rows=[_row_category(row) for row in table.rows],
            height=height,
            hover=f"%{{y}}<br>step %{{x}}<br>{word}{fmt.html(symbol)} = ",
            told="%{customdata:.3~%}" if relative == "share" else f"%{{customdata:{_told_as(values)}}}",
            symbol=symbol,
            look=look,
        )

    def lay_out(self, figure: go.Figure, labels: Sequence[str]) -> None:
        """Give a figure its height, and margins that hold the labels of its rows."""
        figure.update_layout(
            height=self.height,
            margin=_margin(labels, self.look["colorbar"]["ticktext"]),
            dragmode="zoom",
            hovermode="closest",
            showlegend=False,
        )


def is_both_ways(table: Sensitivity, relative: str) -> bool:
    """Whether colours go both ways from 1: red below it and blue above."""
    return relative in ("first", "times") or table.metric == "gain"


def _told_as(values: NDArray[np.float32]) -> str:
    """Return the format of all of them, by the smallest and the largest."""
    known = np.abs(values[np.isfinite(values) & (values != 0)])
    return fmt.d3_format((float(known.min()), float(known.max())) if known.size else ())


def _around(middle: float, low: float, high: float) -> tuple[float, float]:
    """Return ends that are equally far from the middle."""
    reach = max(abs(high - middle), abs(middle - low), 1e-3)
    return middle - reach, middle + reach


def cells(
    columns: Columns, rows: Sequence[str], told: NDArray[Any], hover: str, *, missing: str, **look: object
) -> go.Figure:
    """Draw rows by columns, the first row on top.

    Parameters
    ----------
    columns
        What the colours mean; NaN is drawn grey.
    rows
        What each row is.
    told
        What `hover` tells of a cell, as ``customdata``.
    hover, missing
        Of a cell, and of one without a value.
    **look
        For `go.Heatmap`: its colours and their ends.
    """
    figure = go.Figure(gaps(columns.values, columns.labels, rows, missing))
    figure.add_trace(
        go.Heatmap(
            z=columns.values,
            x=columns.labels,
            y=rows,
            customdata=told,
            hoverongaps=False,
            xgap=1 if len(columns.labels) <= MOST_APART else 0,
            ygap=1 if len(rows) <= MOST_APART else 0,
            hovertemplate=hover,
            **look,
        )
    )
    figure.update_layout(hoverlabel={"align": "left"})
    figure.update_xaxes(**columns_axis(columns.labels))
    figure.update_yaxes(
        type="category", autorange="reversed", showgrid=False, automargin=True, ticklabelstandoff=4
    )
    return figure


def _margin(rows: Sequence[str], bar: Sequence[str]) -> dict[str, float]:
    """Return margins that hold the labels: where they do not, the browser draws everything once more."""
    return {
        "l": _ROOM_OF_ROWS + _LETTER_PIXELS * max(map(len, rows), default=0),
        "r": _ROOM_OF_COLORBAR + _LETTER_PIXELS * max(map(len, bar), default=0),
        "t": TOOLBAR,
        "b": ROOM_OF_STEPS,
    }


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
    known = {row.name: i for i, row in enumerate(exact.rows)} if exact is not None else {}
    rows, columns = [], {name: np.empty((len(groups), len(table.steps)), np.float32) for name in table.values}
    measured = np.where(np.isfinite(table.values["mean"]), table.extents(), 0.0)
    sizes = np.empty((len(groups), len(table.steps)))
    for place, group in enumerate(groups):
        row = _row_of(table, group)
        rows.append(row)
        sizes[place] = measured[list(group.members)].sum(axis=0)
        at = known.get(group.name)
        same = exact is not None and at is not None and exact.rows[at].n_tensors == row.n_tensors
        for name, column in columns.items():
            if len(group.members) == 1:
                column[place] = table.values[name][group.members[0]]
            elif same and exact is not None and at is not None:
                column[place] = exact.values[name][at]
            else:
                column[place] = _mean(table, name, group)
    return dataclasses.replace(table, by="block", rows=tuple(rows), values=columns, sizes=sizes)


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


def _mean(table: Sensitivity, name: str, group: Node) -> NDArray[np.float32]:
    """Return the mean over a group's tensors, of those that have a value."""
    index = np.asarray(group.members, dtype=np.int64)
    values = table.values[name][index].astype(np.float64)
    sizes = np.asarray([[table.rows[i].numel] for i in group.members], np.float64)
    weights = np.where(np.isfinite(values), sizes, 0.0)
    total = weights.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (np.where(np.isfinite(values), values, 0.0) * weights).sum(axis=0) / total
    return np.where(total > 0, means, np.nan).astype(np.float32)
