"""Figures of one tensor: its values by part, its distribution over time, its course over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.pages.run.heatmap import StepAxis
from inshrink_app.theme import CATEGORICAL, GAP, MARK, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import (
    count_ticks,
    few_ticks,
    lay_out,
    log_figure,
    log_ticks,
    steps_axis,
    title,
)
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy, ValueHistogram
from inshrink_core.analysis.trajectory import Trajectory

_HEIGHT = 210
_MOVEMENT = "Relative movement"

_PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "pruned": (CATEGORICAL[5], "x"),
    "quantized": (CATEGORICAL[0], ""),
    "protected": (CATEGORICAL[1], "/"),
}
"""Colour and hatching of each part, so that colour alone carries no meaning."""

_MOST_LINES = 300
"""Largest number of drawn lattice levels; more would merge into a grey area."""


def level_lines(seen: Anatomy) -> NDArray[np.float64]:
    """Return the drawn levels: those of the codebook, or of a sufficiently coarse lattice.

    Returns
    -------
    ndarray
        Ascending; empty if there are none, or too many to distinguish.
    """
    edges = seen.histogram.edges
    if edges.size == 0:
        return np.empty(0)
    low, high = float(edges[0]), float(edges[-1])
    if seen.points.size:
        return seen.points[(seen.points >= low) & (seen.points <= high)]
    if seen.level_kind == "lattice" and seen.spacing and (high - low) / seen.spacing <= _MOST_LINES:
        first = math.ceil(low / seen.spacing)
        return np.arange(first, math.floor(high / seen.spacing) + 1, dtype=np.float64) * seen.spacing
    return np.empty(0)


def histogram_figure(
    seen: Anatomy, *, log: bool, other: tuple[int, ValueHistogram] | None = None
) -> go.Figure:
    """Draw a histogram of values, stacked by their coded part, with a line at every level.

    Parameters
    ----------
    seen
        One tensor.
    log
        Whether counts have a logarithmic axis.
    other
        Another step and the tensor's values there, drawn as a line over the bars and scaled to bins of the
        same width.
    """
    figure = go.Figure()
    values = seen.histogram
    middles = (values.edges[:-1] + values.edges[1:]) / 2
    near = fmt.d3_format(np.abs(values.edges[[0, -1]]) / 10 if values.edges.size else ())
    for part, counts in zip(values.parts, values.counts, strict=True):
        if part.n == 0:
            continue
        colour, hatch = _PART_LOOKS[part.name]
        hatching = {"bgcolor": colour, "fgcolor": "#FFFFFF"}
        figure.add_trace(
            go.Bar(
                x=middles.astype(np.float32),
                y=counts.astype(np.float32),
                name=part.name,
                marker={
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {"shape": hatch, "size": 5, "solidity": 0.3} | hatching,
                },
                hovertemplate=f"%{{y:,}} {part.name} values near %{{x:{near}}}<extra></extra>",
            )
        )
    top = float(values.counts.sum(axis=0).max(initial=1))
    lines = level_lines(seen)
    if lines.size:
        figure.add_trace(_lines(lines, top, log))
    if other is not None and other[1].edges.size > 1 and values.edges.size > 1:
        figure.add_trace(_outline(*other, float(values.edges[1] - values.edges[0])))
        top = max(top, float(np.nanmax(figure.data[-1].y, initial=1.0)))
    lay_out(figure, _HEIGHT, legend=True)
    figure.update_layout(barmode="stack", bargap=0, hovermode="closest")
    figure.update_xaxes(title=title("Value"), showgrid=False, nticks=7)
    figure.update_yaxes(
        title=title("Values in a bin"),
        type="log" if log else "linear",
        range=[math.log10(0.5), math.log10(top * 1.6)] if log else [0, top * 1.08],
        automargin=True,
        **count_ticks(top, log=log),
    )
    return figure


def over_time_figure(
    steps: Sequence[int], edges: NDArray[np.float64], shares: NDArray[np.float64], step: int
) -> go.Figure:
    """Draw the distribution of the values at every step: one column per step, darker for more values.

    Parameters
    ----------
    steps, edges, shares
        As `services.values_over_time` returns them.
    step
        The marked step.
    """
    axis = StepAxis.of(steps)
    figure = go.Figure(
        go.Heatmap(
            z=np.where(shares > 0, np.sqrt(shares), np.nan).astype(np.float32),  # Keeps tails visible.
            x=axis.edges,
            y=((edges[:-1] + edges[1:]) / 2).astype(np.float32),
            customdata=np.stack(
                [100 * shares, np.broadcast_to(np.asarray(steps, np.float64), shares.shape)], axis=2
            ),
            colorscale=SEQUENTIAL,
            showscale=False,
            hoverongaps=False,
            hovertemplate="step %{customdata[1]:,d}<br>%{customdata[0]:.3r} % of the values near %{y:.3r}"
            "<extra></extra>",
        )
    )
    lay_out(figure, _HEIGHT)
    ticks = {} if axis.is_numeric else few_ticks(axis.centres.tolist(), list(map(fmt.count, steps)), 6)
    figure.update_xaxes(**steps_axis(6) | ticks, showgrid=False)
    figure.update_yaxes(title=title("Value"), showgrid=False, automargin=True, nticks=6)
    if step in steps:
        left, right = axis.edges[[list(steps).index(step), list(steps).index(step) + 1]]
        look = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": MARK, "width": 2}}
        figure.add_shape(**look, x0=left, x1=right)
    return figure


def _lines(levels: NDArray[np.float64], top: float, log: bool) -> go.Scatter:
    """Draw a thin line at every level, all of them as one trace."""
    x = np.repeat(levels, 3)
    y = np.tile([0.5 if log else 0.0, top, np.nan], levels.size)
    return go.Scatter(
        x=x,
        y=y,
        name=f"{fmt.count(levels.size)} levels",
        mode="lines",
        line={"color": GAP, "width": 1},
        opacity=0.75,
        hoverinfo="skip",
    )


def _outline(step: int, values: ValueHistogram, width: float) -> go.Scatter:
    """Draw another step's values as a line, scaled to the same bin width."""
    counts = values.counts.sum(axis=0) * (width / float(values.edges[1] - values.edges[0]))
    return go.Scatter(
        x=((values.edges[:-1] + values.edges[1:]) / 2).astype(np.float32),
        y=counts.astype(np.float32),
        name=f"step {fmt.count(step)}",
        mode="lines",
        line={"color": MARK, "width": 2, "shape": "hvh"},
        hovertemplate=f"%{{y:,.0f}} values near %{{x:.2e}} at step {fmt.count(step)}<extra></extra>",
    )


def course_figure(course: Trajectory, step: int) -> go.Figure:
    """Draw size, movement and, for an archive, bits over the steps, one below the other.

    Parameters
    ----------
    course
        One tensor.
    step
        The marked step.
    """
    moved = np.where(course.relative_movement > 0, course.relative_movement, np.nan)
    figures = {
        "Size (rms)": course.rms,
        _MOVEMENT: moved,
        "Bits per weight in the archive": course.bits_per_weight,
    }
    curves = {
        name: list(zip(course.steps, values.tolist(), strict=True))
        for name, values in figures.items()
        if np.isfinite(values).any()
    }
    figure = log_figure(curves, {name: [name] for name in curves}, legends=False)
    figure.update_traces(mode="lines+markers", marker={"size": 4})
    if _MOVEMENT in curves:
        figure.update_yaxes({"type": "log", **log_ticks(moved)}, selector=list(curves).index(_MOVEMENT))
    figure.add_shape(
        type="line", x0=step, x1=step, yref="paper", y0=0, y1=1, line={"color": MARK, "width": 2}
    )
    return figure
