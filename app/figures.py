"""Tables to Plotly figures. No Streamlit here, and no colours of its own but the maps of `theme`.

A figure is a function of its data alone, never of what is selected in it, and leaves text and background
to Streamlit's theme, so that one figure serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.formatting import (
    bytes_text,
    count_text,
    elide,
    html_text,
    power_text,
    shape_text,
    share_text,
    value_text,
)
from inshrink_app.tables import METRICS, FrameRow, HeatRow, Sensitivity
from inshrink_app.theme import CATEGORICAL, GAP, SEQUENTIAL
from numpy.typing import NDArray
from plotly.subplots import make_subplots

__all__ = [
    "CONFIG",
    "MAX_COLUMNS",
    "Columns",
    "bucket_steps",
    "frames_figure",
    "heatmap_figure",
    "log_figure",
    "log_groups",
    "sizes_figure",
]

CONFIG: Mapping[str, object] = {
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Plotly's own buttons: no logo, no wheel that takes the page's scrolling away."""

MAX_COLUMNS = 100
"""More columns are thinner than a reader can tell apart on a laptop's screen."""

_ROW_HEIGHTS = ((24, 24), (60, 17), (120, 10), (250, 5), (10**9, 3))
"""Pixels of a row by how many there are: (at most so many rows, pixels)."""

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
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
        **_thinned(columns.labels, columns.labels, _MAX_COLUMN_LABELS),
    )
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        showgrid=False,
        automargin=True,
        ticklabelstandoff=4,
        **_thinned(names, [html_text(elide(row.name, _NAME_WIDTH)) for row in table.rows], _MAX_ROW_LABELS),
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


def _thinned(values: Sequence[str], texts: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Label every k-th position, so that labels never overlap."""
    stride = max(1, math.ceil(len(values) / limit))
    return {"tickvals": list(values[::stride]), "ticktext": list(texts[::stride])}


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


def sizes_figure(sizes: Mapping[str, int], colour: int = 0) -> go.Figure:
    """Draw bytes by kind as bars, largest first, each with its size written out."""
    # Reversed first, so that of equal sizes the one that comes first in the file stands on top.
    ordered = sorted(reversed(list(sizes.items())), key=lambda item: item[1])
    total = sum(sizes.values()) or 1
    labels = [html_text(name) for name, _ in ordered]
    figure = go.Figure(
        go.Bar(
            x=[size for _, size in ordered],
            y=labels,
            orientation="h",
            marker_color=CATEGORICAL[colour],
            text=[f"{bytes_text(size)} · {share_text(size / total)}" for _, size in ordered],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(
        height=34 * max(2, len(ordered)) + 16, margin={"l": 8, "r": 8, "t": 4, "b": 4}, bargap=0.35
    )
    largest = max(sizes.values(), default=1) or 1
    # Room for the text beside the longest bar, which lies outside of it.
    figure.update_xaxes(visible=False, range=[0, largest * 1.6], fixedrange=True)
    figure.update_yaxes(showgrid=False, automargin=True, fixedrange=True, ticklabelstandoff=4)
    return figure


def log_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Group training metrics that share a scale by the last word of their names.

    Examples
    --------
    >>> log_groups(["loss", "eval_loss", "lr", "val/accuracy"])
    {'loss': ['loss', 'eval_loss'], 'lr': ['lr'], 'accuracy': ['val/accuracy']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        last = name.replace("/", "_").replace(".", "_").replace("-", "_").rsplit("_", 1)[-1]
        groups.setdefault(last or name, []).append(name)
    return groups


def log_figure(log: Mapping[str, Sequence[tuple[int, float]]], groups: Mapping[str, list[str]]) -> go.Figure:
    """Draw training metrics by step, one panel per group, side by side; titles serve as legends."""
    figure = make_subplots(
        rows=1,
        cols=max(1, len(groups)),
        subplot_titles=[_legend(members) for members in groups.values()],
        horizontal_spacing=0.075,
    )
    for column, members in enumerate(groups.values(), start=1):
        for position, name in enumerate(members):
            series = log[name]
            figure.add_trace(
                go.Scatter(
                    x=np.asarray([step for step, _ in series], dtype=np.int64),
                    y=np.asarray([value for _, value in series], dtype=np.float64),
                    name=html_text(name),
                    mode="lines+markers" if len(series) < 3 else "lines",
                    line={
                        "color": CATEGORICAL[position % len(CATEGORICAL)],
                        "width": 2,
                        "dash": _DASHES[position % len(_DASHES)],
                    },
                    hovertemplate=f"{html_text(name)} = %{{y:.4~g}}<br>step %{{x:,}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
    figure.update_layout(height=250, margin={"l": 8, "r": 8, "t": 34, "b": 8}, showlegend=False)
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(
        title={"text": "Step", "standoff": 6}, rangemode="tozero", nticks=5, tickangle=0, automargin=True
    )
    figure.update_yaxes(automargin=True, nticks=6)
    return figure


def _legend(members: Sequence[str]) -> str:
    """Return a panel's title: each metric's name behind a sign in its colour and its dash."""
    return "   ".join(
        f"<span style='color:{CATEGORICAL[i]}'><b>{_DASH_SIGNS[i]}</b></span> "
        f"{html_text(elide(name, _NAME_WIDTH))}"
        for i, name in enumerate(members[:_MAX_IN_TITLE])
    )


def frames_figure(frames: Sequence[FrameRow]) -> go.Figure:
    """Draw the bytes of each frame of an archive, keyframes apart from delta frames."""
    figure = go.Figure()
    for position, (kind, label) in enumerate((("keyframe", "Keyframe"), ("delta", "Delta frame"))):
        rows = [row for row in frames if (row.kind == "keyframe") == (kind == "keyframe")]
        figure.add_trace(
            go.Bar(
                x=[count_text(row.step) for row in rows],
                y=np.asarray([row.nbytes for row in rows], dtype=np.float64),
                name=label,
                marker_color=CATEGORICAL[position],
                customdata=[
                    [
                        bytes_text(row.nbytes),
                        "–" if row.ratio_weights is None else f"{row.ratio_weights:.1f}×",
                    ]
                    for row in rows
                ],
                hovertemplate=(
                    f"{label} of step %{{x}}<br>%{{customdata[0]}}, weights %{{customdata[1]}}<extra></extra>"
                ),
            )
        )
    labels = [count_text(row.step) for row in frames]
    figure.update_layout(
        height=280,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        bargap=0.15,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
    )
    figure.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickangle=0,
        title={"text": "Step", "standoff": 8},
        **_thinned(labels, labels, _MAX_COLUMN_LABELS),
    )
    figure.update_yaxes(
        rangemode="tozero", automargin=True, **_byte_ticks(max((r.nbytes for r in frames), default=1))
    )
    return figure


def _byte_ticks(largest: int) -> dict[str, list[object]]:
    """Return about four round ticks of an axis of bytes, written as sizes."""
    rough = max(1.0, largest / 4)
    decade = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * decade for m in (1, 2, 5, 10) if m * decade >= rough)
    ticks = [i * stride for i in range(int(largest / stride) + 2)]
    return {"tickvals": list(ticks), "ticktext": [bytes_text(tick) for tick in ticks]}
