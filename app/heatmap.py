"""The heatmap of sensitivities: rows by steps, in logarithmic colours. No Streamlit here, as in `figures`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.figures import thinned
from inshrink_app.formatting import count_text, elide, html_text, power_text, shape_text, value_text
from inshrink_app.tables import METRICS, HeatRow, Sensitivity
from inshrink_app.theme import GAP, SEQUENTIAL
from numpy.typing import NDArray

__all__ = ["MAX_COLUMNS", "Columns", "bucket_steps", "heatmap_figure", "row_labels"]

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""

_ROW_HEIGHTS = ((24, 24), (60, 17), (120, 10), (250, 5), (10**9, 3))
"""Pixels of a row by how many there are: (at most so many rows, pixels)."""

_NAME_WIDTH = 34
_LONGEST_COLORBAR = 420
_MAX_ROW_LABELS = 60
_MAX_COLUMN_LABELS = 13
_CLIPPED = (1.0, 99.0)
"""Percentiles between which colours spread when outliers are clipped."""


class Columns(NamedTuple):
    """The columns of a heatmap: values ``[rows, columns]``, a label each, and the most steps in one."""

    values: NDArray[np.float32]
    labels: tuple[str, ...]
    steps_per_column: int


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
    edges = np.linspace(0, n_steps, limit + 1).round().astype(int)
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


def heatmap_figure(table: Sensitivity, statistic: str, *, clip: bool) -> go.Figure:
    """Draw rows by steps, colour by the logarithm of the value.

    Parameters
    ----------
    table
        What to draw.
    statistic
        A key of its values.
    clip
        Spread colours between the 1st and 99th percentile instead of the extremes.
    """
    columns = bucket_steps(table.values[statistic], table.steps)
    logs, low, high = _log_scale(columns.values, clip)
    names = [_row_category(row) for row in table.rows]
    row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if len(names) <= most)
    height = max(220, len(names) * row_pixels + 70)
    figure = go.Figure()
    figure.add_trace(_gaps(columns, names))
    figure.add_trace(
        go.Heatmap(
            z=logs,
            x=columns.labels,
            y=names,
            customdata=columns.values,
            zmin=low,
            zmax=high,
            colorscale=SEQUENTIAL,
            colorbar=_colorbar(METRICS[table.metric].symbol, low, high, height - 90),
            hoverongaps=False,
            xgap=1 if len(columns.labels) <= 60 else 0,
            ygap=1 if len(names) <= 60 else 0,
            hovertemplate=(
                f"%{{y}}<br>step %{{x}}<br>{statistic} {html_text(METRICS[table.metric].symbol)}"
                " = %{customdata:.3~g}<extra></extra>"
            ),
        )
    )
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hoverlabel={"align": "left"},
        dragmode="zoom",
    )
    figure.update_xaxes(
        type="category",
        title={"text": "Step", "standoff": 8},
        showgrid=False,
        tickangle=0,
        **thinned(columns.labels, columns.labels, _MAX_COLUMN_LABELS),
    )
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        showgrid=False,
        automargin=True,
        ticklabelstandoff=4,
        **thinned(names, row_labels([row.name for row in table.rows]), _MAX_ROW_LABELS),
    )
    return figure


def _log_scale(values: NDArray[np.float32], clip: bool) -> tuple[NDArray[np.float32], float, float]:
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


def _gaps(columns: Columns, names: Sequence[str]) -> go.Heatmap:
    """Draw grey where there is no value, with a hover that says so."""
    absent = np.where(np.isfinite(columns.values), np.float32("nan"), np.float32(0))
    return go.Heatmap(
        z=absent,
        x=columns.labels,
        y=names,
        colorscale=[[0, GAP], [1, GAP]],
        opacity=0.35,
        showscale=False,
        hoverongaps=False,
        hovertemplate="%{y}<br>step %{x}<br>no value at this step<extra></extra>",
    )


def _row_category(row: HeatRow) -> str:
    """Return a row's identity, which is also the head of its hover: full name, what it is, its shape."""
    if row.shape is None:
        extent = f"{row.n_tensors} tensor{'s' * (row.n_tensors != 1)}, {count_text(row.numel)} values"
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
    return [html_text(elide(".".join(part[shared:]), _NAME_WIDTH)) for part in parts]


def _colorbar(symbol: str, low: float, high: float, room: int) -> dict[str, object]:
    """Label a logarithmic scale with real values: decades, or 1-2-5 where it spans few of them."""
    first, last = math.ceil(low), math.floor(high)
    if last - first >= 2:
        stride = math.ceil((last - first + 1) / 8)
        ticks = [(float(e), power_text(e)) for e in range(first, last + 1, stride)]
    else:
        candidates = [
            (math.log10(m) + e, m * 10.0**e)
            for e in range(first - 2, last + 2)
            for m in ((1, 2, 5) if high - low > 0.6 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
        ]
        ticks = [(position, value_text(value)) for position, value in candidates if low <= position <= high]
    return {
        "title": {"text": html_text(symbol), "side": "top"},
        "tickvals": [position for position, _ in ticks],
        "ticktext": [text for _, text in ticks],
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 8,
        "lenmode": "pixels",
        "len": min(_LONGEST_COLORBAR, room),
        "y": 1,
        "yanchor": "top",
        "ypad": 0,
    }
