"""Figures of one tensor: its values by part, and their distribution over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.pages.run.heatmap import StepAxis
from inshrink_app.theme import CATEGORICAL, GAP, MARK, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import count_ticks, few_ticks, lay_out, steps_axis, title
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy

_HEIGHT = 180

_PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "pruned": (CATEGORICAL[5], "x"),
    "quantized": (CATEGORICAL[0], ""),
    "protected": (CATEGORICAL[1], "/"),
}
"""Colour and hatching of each part, so that colour alone carries no meaning."""

_MAX_LINES = 300
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
    if seen.level_kind == "lattice" and seen.step_size and (high - low) / seen.step_size <= _MAX_LINES:
        first = math.ceil(low / seen.step_size)
        return np.arange(first, math.floor(high / seen.step_size) + 1, dtype=np.float64) * seen.step_size
    return np.empty(0)


def histogram_figure(seen: Anatomy) -> go.Figure:
    """Draw a histogram of values, stacked by their coded part, with a line at every level."""
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
        figure.add_trace(
            go.Scatter(  # A thin line at every level, all of them as one trace.
                x=np.repeat(lines, 3),
                y=np.tile([0.0, top, np.nan], lines.size),
                name=f"{fmt.count(lines.size)} levels",
                mode="lines",
                line={"color": GAP, "width": 1},
                opacity=0.75,
                hoverinfo="skip",
            )
        )
    lay_out(figure, _HEIGHT, legend=True)
    figure.update_layout(barmode="stack", bargap=0, hovermode="closest")
    figure.update_xaxes(title=title("Value"), showgrid=False, nticks=7)
    figure.update_yaxes(
        title=title("Values in a bin"), range=[0, top * 1.08], automargin=True, **count_ticks(top)
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
