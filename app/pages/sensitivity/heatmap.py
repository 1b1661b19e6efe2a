"""The heatmap of sensitivities: rows by steps, in logarithmic or linear colours. No Streamlit here."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL, DIVERGING, SEQUENTIAL
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
from inshrink_app.widgets.formatting import count_text, counted, elide, elide_all, html_text, shape_text
from inshrink_app.widgets.tables import METRICS, HeatRow, Sensitivity
from numpy.typing import NDArray

__all__ = [
    "MAX_COLUMNS",
    "Columns",
    "Drawn",
    "bucket_steps",
    "cells",
    "colorbar",
    "column_edges",
    "column_of",
    "heatmap_figure",
    "linear_scale",
    "log_scale",
    "loss_by_column",
    "row_labels",
    "training_loss",
]

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""

_CLIPPED = (1.0, 99.0)
"""Percentiles between which colours spread when outliers are clipped."""

_LONGEST_COLORBAR = 420

_ROW_HEIGHTS = ((24, 24), (60, 17), (120, 10), (250, 5), (700, 3), (10**9, 1))
"""Pixels of a row by how many there are: (at most so many rows, pixels)."""

_LETTER_PIXELS = 5.8
"""Width of a letter of a label, rather more than less; a margin too narrow grows by itself."""

_ROOM_OF_ROWS, _ROOM_OF_COLORBAR, _ROOM_OF_STEPS = 33, 50, 66
"""Pixels beside the letters: ticks, paddings, the bar itself; below, the labels of steps and their title."""

_NAME_WIDTH = 34
_MAX_ROW_LABELS = 60
_MAX_STEP_LABELS = 6
"""Beside the panel there is little room on a small screen."""

_MOST_APART = 60
"""With more rows or columns there is no line between them."""

_LOSS_HEIGHT, _LOSS_GAP = 74, 10
"""Pixels of the training loss above the cells, and of the room between."""

_LOSS_NAME_WIDTH = 12
_LOSS_DECADES = 100
"""A loss that falls further than this is drawn on a logarithmic axis."""

_RELATIVE = {"plain": "", "first": " / first", "share": ", share"}
"""What stands behind the symbol of a metric that was made relative."""

_NO_VALUE = "%{y}<br>step %{x}<br>no value at this step<extra></extra>"


class Columns(NamedTuple):
    """The columns of a heatmap: values ``[rows, columns]``, a label each, and the most steps in one."""

    values: NDArray[np.float32]
    labels: tuple[str, ...]
    steps_per_column: int


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
        return Columns(values, tuple(count_text(step) for step in steps), 1)
    edges = column_edges(n_steps, limit)
    present = np.isfinite(values)
    sums = np.add.reduceat(np.where(present, values, 0).astype(np.float64), edges[:-1], axis=1)
    counts = np.add.reduceat(present, edges[:-1], axis=1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums / counts).astype(np.float32)
    labels = tuple(
        f"{count_text(steps[a])} – {count_text(steps[b - 1])}" if b - a > 1 else count_text(steps[a])
        for a, b in pairwise(edges)
    )
    return Columns(means, labels, int(np.diff(edges).max()))


def column_of(place: int, n_steps: int, limit: int = MAX_COLUMNS) -> int:
    """Return the column that holds a step, by the step's place."""
    return int(np.searchsorted(column_edges(n_steps, limit), place, side="right")) - 1


def linear_scale(values: NDArray[np.float32], clip: bool) -> tuple[NDArray[np.float32], float, float]:
    """Return the values, and the ends of the colour scale."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size == 0:
        return values, 0.0, 1.0
    low, high = (float(end) for end in np.percentile(finite, _CLIPPED if clip else (0, 100)))
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-30):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    return np.where(np.isfinite(values), values, np.float32("nan")), low, high


def log_scale(values: NDArray[np.float32], clip: bool) -> tuple[NDArray[np.float32], float, float]:
    """Return log10 of the values, NaN where there is none, and the ends of the colour scale.

    Zeros have no logarithm: they take the scale's lower end; the hover tells that they are zero.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size == 0:
        return np.where(np.isfinite(values), np.float32(0), np.float32("nan")), -1.0, 0.0
    logs_of_positive = np.log10(positive.astype(np.float64))
    ends = np.percentile(logs_of_positive, _CLIPPED if clip else (0, 100))
    low, high = float(ends[0]), float(ends[1])
    if high - low < 0.02:
        middle = (low + high) / 2
        low, high = middle - 0.5, middle + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values.astype(np.float64))
    logs = np.where(np.isneginf(logs), low, logs)
    return np.where(np.isfinite(values), logs, np.nan).astype(np.float32), low, high


def colorbar(symbol: str, low: float, high: float, room: int, scale: str = "log") -> dict[str, Any]:
    """Return the scale beside the cells, with round values between its ends."""
    ticks = log_scale_ticks(low, high) if scale == "log" else linear_scale_ticks(low, high)
    place = {"lenmode": "pixels", "len": min(_LONGEST_COLORBAR, room), "y": 1, "yanchor": "top", "ypad": 0}
    return colour_bar(symbol, ticks, **place)


def heatmap_figure(
    table: Sensitivity,
    statistic: str,
    *,
    clip: bool,
    scale: str = "log",
    relative: str = "plain",
    loss: tuple[str, Sequence[tuple[int, float]]] | None = None,
) -> go.Figure:
    """Draw rows by steps, colour by the value or its logarithm.

    Parameters
    ----------
    table
        What to draw.
    statistic
        A key of its values.
    clip
        Spread colours between the 1st and 99th percentile instead of the extremes.
    scale
        ``log`` or ``linear``.
    relative
        What the values are relative to (`arranging.NORMALISED`). Relative to a row's first step, and of a
        restore gain, colours go both ways from 1.
    loss
        The name of a training metric and its values by step, drawn above on the same axis.
    """
    columns = bucket_steps(table.values[statistic], table.steps)
    drawn = Drawn.of(table, columns.values, statistic, clip=clip, scale=scale, relative=relative)
    figure = cells(
        columns._replace(values=drawn.colours),
        drawn.rows,
        columns.values,
        f"{drawn.hover}{drawn.told}<extra></extra>",
        missing=_NO_VALUE,
        **drawn.look,
    )
    ticks = few_ticks(drawn.rows, row_labels([row.name for row in table.rows]), _MAX_ROW_LABELS)
    drawn.lay_out(figure, ticks["ticktext"])
    shown = few_ticks(columns.labels, columns.labels, _MAX_STEP_LABELS)
    figure.update_xaxes(range=[-0.5, len(columns.labels) - 0.5], **shown)
    figure.update_yaxes(autorange=None, range=[len(drawn.rows) - 0.5, -0.5], **ticks)
    if loss is not None:
        _add_loss(figure, loss, table.steps, columns.labels)
    return figure


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
        *,
        clip: bool = True,
        scale: str | None = None,
        relative: str = "plain",
    ) -> Drawn:
        """Choose colours for values ``[rows, columns]`` of a table; by default on the metric's own scale."""
        metric = METRICS[table.metric]
        scale = scale or metric.scale
        colours, low, high = (log_scale if scale == "log" else linear_scale)(values, clip)
        both_ways = relative == "first" or table.metric == "gain"
        if both_ways:
            low, high = _around(0.0 if scale == "log" else 1.0, low, high)
        row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if len(table.rows) <= most)
        height = TOOLBAR + max(220, len(table.rows) * row_pixels + 62)
        symbol = metric.symbol + _RELATIVE[relative]
        word = "" if metric.pooled or relative == "share" else f"{statistic} "
        look = {
            "zmin": low,
            "zmax": high,
            "colorscale": DIVERGING if both_ways else SEQUENTIAL,
            "colorbar": colorbar(symbol, low, high, height - TOOLBAR - 82, scale),
        }
        return cls(
            colours=colours,
            rows=[_row_category(row) for row in table.rows],
            height=height,
            hover=f"%{{y}}<br>step %{{x}}<br>{word}{html_text(symbol)} = ",
            told="%{customdata:.3~%}" if relative == "share" else "%{customdata:.3~g}",
            symbol=symbol,
            look=look,
        )

    def lay_out(self, figure: go.Figure, labels: Sequence[str]) -> None:
        """Give a figure its height, and margins that hold the labels of its rows."""
        figure.update_layout(
            height=self.height,
            margin=_margin(labels, [self.symbol, *self.look["colorbar"]["ticktext"]]),
            dragmode="zoom",
            hovermode="closest",
            showlegend=False,
        )


def _around(middle: float, low: float, high: float) -> tuple[float, float]:
    """Return ends that are equally far from the middle."""
    reach = max(abs(high - middle), abs(middle - low), 1e-3)
    return middle - reach, middle + reach


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


def loss_by_column(series: Sequence[tuple[int, float]], steps: Sequence[int]) -> list[float]:
    """Return the newest finite value logged up to each column's last step, since the column before it.

    Parameters
    ----------
    series
        Step and value, in any order.
    steps
        Of the checkpoints, ascending.

    Examples
    --------
    >>> loss_by_column([(1, 3.0), (9, 2.0), (10, 1.0)], (5, 10, 20))
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


def _add_loss(
    figure: go.Figure,
    loss: tuple[str, Sequence[tuple[int, float]]],
    steps: Sequence[int],
    labels: Sequence[str],
) -> None:
    """Draw a training metric above the cells, and give it room."""
    name, series = loss
    values = loss_by_column(series, steps)
    if not any(map(math.isfinite, values)):
        return
    inner = figure.layout.height - TOOLBAR - _ROOM_OF_STEPS
    share = inner / (inner + _LOSS_HEIGHT + _LOSS_GAP)
    figure.add_trace(
        go.Scatter(
            x=list(labels),
            y=np.asarray(values, np.float64),
            yaxis="y2",
            mode="lines+markers" if len(labels) <= _MOST_APART else "lines",
            connectgaps=True,
            line={"color": CATEGORICAL[0], "width": 2},
            marker={"size": 4},
            hovertemplate=f"{html_text(name)} %{{y:.4~g}}<br>step %{{x}}<extra></extra>",
            showlegend=False,
        )
    )
    known = [value for value in values if math.isfinite(value)]
    axis: dict[str, Any] = {"nticks": 3, "tickformat": "~g"}
    if min(known) > 0 and max(known) / min(known) > _LOSS_DECADES:
        axis = {"type": "log", **log_ticks([min(known), max(known)])}
        axis |= {key: one[:: max(1, len(one) // 2)] for key, one in axis.items() if key != "type"}
    figure.update_layout(
        height=figure.layout.height + _LOSS_HEIGHT + _LOSS_GAP,
        yaxis={"domain": [0, share]},
        yaxis2={
            "domain": [1 - (1 - share) * _LOSS_HEIGHT / (_LOSS_HEIGHT + _LOSS_GAP), 1],
            "title": title(html_text(elide(name, _LOSS_NAME_WIDTH))),
            "fixedrange": True,
            "zeroline": False,
            **axis,
        },
    )
    figure.data[1].colorbar.y = share


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
            xgap=1 if len(columns.labels) <= _MOST_APART else 0,
            ygap=1 if len(rows) <= _MOST_APART else 0,
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
        "b": _ROOM_OF_STEPS,
    }


def _row_category(row: HeatRow) -> str:
    """Return a row's identity, which is also the head of its hover: full name, what it is, its shape."""
    if row.shape is None:
        extent = f"{counted(row.n_tensors, 'tensor')}, {count_text(row.numel)} values"
    else:
        extent = shape_text(row.shape)
    kind = f"{row.layer} · " if row.layer and row.layer != row.name else ""
    return f"<b>{html_text(row.name)}</b><br>{html_text(kind)}{extent}"


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
    return [html_text(label) for label in elide_all([".".join(part[shared:]) for part in parts], _NAME_WIDTH)]
