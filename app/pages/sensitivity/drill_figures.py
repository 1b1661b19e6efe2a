"""One tensor's figures: its values by part, its sensitivity against its magnitude, its course over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL, GAP, MARK, SEQUENTIAL
from inshrink_app.widgets.figures import log_ticks, steps_axis, title
from inshrink_app.widgets.formatting import count_text, html_text, power_text, value_text
from inshrink_app.widgets.tables import METRICS
from numpy.typing import NDArray
from plotly.subplots import make_subplots

__all__ = [
    "HEIGHT",
    "Course",
    "DrillDown",
    "Moved",
    "MovedRow",
    "PartRow",
    "ScoreMap",
    "course_figure",
    "histogram_figure",
    "level_lines",
    "map_figure",
]


class PartRow(NamedTuple):
    """The values that were pruned, quantized or protected: how many, and the range of their magnitudes."""

    name: str
    n: int
    share: float
    smallest: float | None
    largest: float | None


class ScoreMap(NamedTuple):
    """Sensitivity against magnitude: edges in decimal logarithms, and counts magnitude by sensitivity."""

    metric: str
    source: str | None
    log_magnitude: NDArray[np.float64]
    log_sensitivity: NDArray[np.float64]
    counts: NDArray[np.int64]
    n_zero: int
    correlation: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrillDown:
    """One tensor of one step.

    Parameters
    ----------
    name, step, dtype, shape, numel
        Which tensor. Its name is untrusted text.
    codec, config
        What it was stored with, or would be.
    estimated
        Whether the codec was only tried on this tensor alone.
    restored
        Whether the values are those an archive restores.
    kind
        ``keyframe`` or ``delta``.
    edges, counts, parts
        Histogram of the values, by what became of them.
    n_nonfinite, rms
        Values that are NaN or infinite; root mean square of the others.
    level_kind, points, spacing
        The levels: what kind, those that occur where they are few, and their distance where it is even.
    entropy, bits_per_weight, nbytes, keyframe_nbytes
        What it costs.
    sensitivity
        None where the checkpoint does not tell one.
    document
        All of it as JSON values.
    """

    name: str
    step: int
    dtype: str
    shape: tuple[int, ...]
    numel: int
    codec: str
    config: Mapping[str, Any]
    estimated: bool
    restored: bool
    kind: str
    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    parts: tuple[PartRow, ...]
    n_nonfinite: int
    rms: float
    level_kind: str
    points: NDArray[np.float64]
    spacing: float | None
    entropy: float | None
    bits_per_weight: float | None
    nbytes: int
    keyframe_nbytes: int | None
    sensitivity: ScoreMap | None
    document: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Course:
    """One tensor over steps; float64 ``[steps]``, NaN where there is no value.

    `n_left_out` steps are not among them, to read less.
    """

    steps: tuple[int, ...]
    rms: NDArray[np.float64]
    movement: NDArray[np.float64]
    relative_movement: NDArray[np.float64]
    bits_per_weight: NDArray[np.float64]
    n_left_out: int = 0


class MovedRow(NamedTuple):
    """How far one tensor moved from one step to another."""

    name: str
    layer: str
    shape: tuple[int, ...]
    relative: float | None
    rms: float
    max_abs: float
    cosine: float | None
    changed: float


class Moved(NamedTuple):
    """What moved between two steps, the most first, and what only one of them has."""

    rows: tuple[MovedRow, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]


HEIGHT = 300

_PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "pruned": (CATEGORICAL[5], "x"),
    "quantized": (CATEGORICAL[0], ""),
    "protected": (CATEGORICAL[1], "/"),
}
"""Colour and hatching of each part: no meaning by colour alone."""

_MOST_LINES = 300
"""Lattice points closer than this many across the values would be a grey surface."""

_MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}


def level_lines(seen: DrillDown) -> NDArray[np.float64]:
    """Return the levels that are drawn: those of the codebook, or the lattice where it is coarse enough.

    Returns
    -------
    ndarray
        Ascending; empty where there are none, or too many to tell apart.
    """
    if seen.edges.size == 0:
        return np.empty(0)
    low, high = float(seen.edges[0]), float(seen.edges[-1])
    if seen.points.size:
        return seen.points[(seen.points >= low) & (seen.points <= high)]
    if seen.level_kind == "lattice" and seen.spacing and (high - low) / seen.spacing <= _MOST_LINES:
        first = math.ceil(low / seen.spacing)
        return np.arange(first, math.floor(high / seen.spacing) + 1) * seen.spacing
    return np.empty(0)


def histogram_figure(seen: DrillDown, *, log: bool) -> go.Figure:
    """Draw how often values occur, stacked by what became of them, with a line at every level.

    Parameters
    ----------
    seen
        One tensor.
    log
        Counts on a logarithmic axis.
    """
    figure = go.Figure()
    middles = (seen.edges[:-1] + seen.edges[1:]) / 2
    for part, counts in zip(seen.parts, seen.counts, strict=True):
        if part.n == 0:
            continue
        colour, hatch = _PART_LOOKS[part.name]
        figure.add_trace(
            go.Bar(
                x=middles.astype(np.float32),
                y=counts.astype(np.float32),
                name=part.name,
                marker={
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {
                        "shape": hatch,
                        "size": 5,
                        "solidity": 0.3,
                        "bgcolor": colour,
                        "fgcolor": "#FFFFFF",
                    },
                },
                hovertemplate=f"%{{y:,}} {part.name} values near %{{x:.3~g}}<extra></extra>",
            )
        )
    top = float(seen.counts.sum(axis=0).max(initial=1))
    lines = level_lines(seen)
    if lines.size:
        figure.add_trace(_lines(lines, top, log))
    figure.update_layout(
        height=HEIGHT,
        margin=_MARGIN,
        barmode="stack",
        bargap=0,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        hovermode="closest",
        showlegend=True,
    )
    figure.update_xaxes(title=title("Value"), showgrid=False, nticks=7)
    figure.update_yaxes(
        title=title("Values in a bin"),
        type="log" if log else "linear",
        tickformat=",d",
        range=[math.log10(0.5), math.log10(top * 1.6)] if log else [0, top * 1.08],
        automargin=True,
        nticks=5,
    )
    return figure


def _lines(levels: NDArray[np.float64], top: float, log: bool) -> go.Scattergl | go.Scatter:
    """Draw a thin line at every level, all of them one trace."""
    x = np.repeat(levels, 3)
    y = np.tile([0.5 if log else 0.0, top, np.nan], levels.size)
    return go.Scatter(
        x=x,
        y=y,
        name=f"{count_text(levels.size)} levels",
        mode="lines",
        line={"color": GAP, "width": 1},
        opacity=0.75,
        hoverinfo="skip",
    )


def map_figure(told: ScoreMap) -> go.Figure:
    """Draw how many values have which magnitude and which sensitivity, all axes logarithmic."""
    with np.errstate(divide="ignore"):
        logs = np.log10(told.counts.T.astype(np.float64))
    shown = np.where(told.counts.T > 0, logs, np.nan).astype(np.float32)
    most = max(1.0, float(np.nanmax(shown, initial=1.0)))
    ticks = list(range(math.floor(most) + 1))
    symbol = METRICS[told.metric].symbol
    x, y = ((edges[:-1] + edges[1:]) / 2 for edges in (told.log_magnitude, told.log_sensitivity))
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            x=x.astype(np.float32),
            y=y.astype(np.float32),
            customdata=told.counts.T.astype(np.float32),
            zmin=0,
            zmax=most,
            colorscale=SEQUENTIAL,
            hoverongaps=False,
            hovertemplate="%{customdata:,} values<extra></extra>",
            colorbar={
                "title": {"text": "Values", "side": "top"},
                "tickvals": ticks,
                "ticktext": [count_text(10**tick) for tick in ticks],
                "thickness": 12,
                "outlinewidth": 0,
                "xpad": 8,
            },
        )
    )
    figure.update_layout(height=HEIGHT, margin=_MARGIN)
    figure.update_xaxes(title=title("|w|"), showgrid=False, **_decades(told.log_magnitude))
    figure.update_yaxes(
        title=title(html_text(symbol)),
        showgrid=False,
        automargin=True,
        **_decades(told.log_sensitivity),
    )
    return figure


def _decades(edges: NDArray[np.float64]) -> dict[str, object]:
    """Label an axis of decimal logarithms with powers of ten, or with three values where it spans less."""
    low, high = float(edges[0]), float(edges[-1])
    first, last = math.ceil(low), math.floor(high)
    if last - first >= 1:
        stride = math.ceil((last - first + 1) / 6)
        places = [float(k) for k in range(first, last + 1, stride)]
        return {"tickvals": places, "ticktext": [power_text(int(k)) for k in places]}
    places = [low, (low + high) / 2, high]
    return {"tickvals": places, "ticktext": [value_text(10**k) for k in places]}


def course_figure(course: Course, step: int) -> go.Figure:
    """Draw size, movement and, where an archive tells them, bits over the steps, side by side.

    Parameters
    ----------
    course
        One tensor.
    step
        Where a mark stands.
    """
    panels = [
        ("Size (rms)", course.rms, "linear"),
        ("Relative movement", course.relative_movement, "log"),
        ("Bits per weight in the archive", course.bits_per_weight, "linear"),
    ]
    panels = [panel for panel in panels if np.isfinite(panel[1]).any()]
    figure = make_subplots(
        rows=1,
        cols=max(1, len(panels)),
        subplot_titles=[panel[0] for panel in panels],
        horizontal_spacing=0.08,
    )
    steps = np.asarray(course.steps, np.int64)
    for place, (name, values, scale) in enumerate(panels, start=1):
        shown = np.where(values > 0, values, np.nan) if scale == "log" else values
        figure.add_trace(
            go.Scatter(
                x=steps,
                y=shown,
                mode="lines+markers",
                line={"color": CATEGORICAL[0], "width": 2},
                marker={"size": 4},
                hovertemplate=f"step %{{x:,}}<br>{name.lower()} %{{y:.4~g}}<extra></extra>",
            ),
            row=1,
            col=place,
        )
        at = np.flatnonzero(steps == step)
        if at.size and np.isfinite(shown[at[0]]):
            figure.add_trace(
                go.Scatter(
                    x=[step],
                    y=[float(shown[at[0]])],
                    mode="markers",
                    marker={"size": 11, "color": MARK, "symbol": "circle-open", "line": {"width": 3}},
                    hoverinfo="skip",
                ),
                row=1,
                col=place,
            )
        figure.update_yaxes(
            type=scale,
            automargin=True,
            row=1,
            col=place,
            **(log_ticks(shown) if scale == "log" else {"nticks": 5, "rangemode": "tozero"}),
        )
    figure.update_layout(height=240, margin={"l": 8, "r": 8, "t": 30, "b": 8}, showlegend=False)
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(**steps_axis(5))
    return figure
