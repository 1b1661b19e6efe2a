"""What differs between two steps or two runs: a diverging heatmap, and curves laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.axes import log_ticks, steps_axis, title
from inshrink_app.figures import thinned
from inshrink_app.formatting import html_text, value_text
from inshrink_app.heat_columns import bucket_steps
from inshrink_app.heatmap import row_labels
from inshrink_app.theme import CATEGORICAL, DIVERGING, GAP
from numpy.typing import NDArray

__all__ = ["Line", "changes_figure", "overlay_figure"]

_ROW_PIXELS = 19
_MAX_COLUMN_LABELS = 13
_SMALLEST_END = 0.05
"""A scale narrower than this would blow noise up to full colour: 2^0.05 is four percent."""


class Line(NamedTuple):
    """One curve: its name, steps and values; NaN where there is none."""

    name: str
    steps: Sequence[int]
    values: NDArray[np.float32]


def changes_figure(
    names: Sequence[str], steps: Sequence[int], changes: NDArray[np.float64], what: str
) -> go.Figure:
    """Draw changes in octaves, red for less and blue for more, white for none.

    Parameters
    ----------
    names, steps
        Rows and columns.
    changes
        ``[rows, steps]``, base-2 logarithms of quotients; NaN where there is none.
    what
        Names the colour scale.
    """
    columns = bucket_steps(changes.astype(np.float32), steps)
    finite = np.abs(columns.values[np.isfinite(columns.values)])
    end = max(_SMALLEST_END, float(np.percentile(finite, 99)) if finite.size else 1.0)
    rows = [f"<b>{html_text(name)}</b>" for name in names]
    figure = go.Figure()
    figure.add_trace(
        go.Heatmap(
            z=np.where(np.isfinite(columns.values), np.float32("nan"), np.float32(0)),
            x=columns.labels,
            y=rows,
            colorscale=[[0, GAP], [1, GAP]],
            opacity=0.35,
            showscale=False,
            hoverongaps=False,
            hovertemplate="%{y}<br>step %{x}<br>no value in one of the two<extra></extra>",
        )
    )
    figure.add_trace(
        go.Heatmap(
            z=columns.values,
            x=columns.labels,
            y=rows,
            customdata=np.exp2(columns.values),
            zmin=-end,
            zmax=end,
            zmid=0,
            colorscale=DIVERGING,
            hoverongaps=False,
            xgap=1 if len(columns.labels) <= 60 else 0,
            ygap=1,
            hovertemplate="%{y}<br>step %{x}<br>times %{customdata:.3~g}<extra></extra>",
            colorbar=_octaves(end, what),
        )
    )
    height = max(200, len(names) * _ROW_PIXELS + 70)
    figure.update_layout(height=height, margin={"l": 8, "r": 8, "t": 8, "b": 8}, hoverlabel={"align": "left"})
    figure.update_xaxes(
        type="category",
        title=title("Step"),
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
        tickvals=rows,
        ticktext=row_labels(names),
    )
    return figure


def _octaves(end: float, what: str) -> dict[str, object]:
    """Label the scale with quotients."""
    places = [-end, -end / 2, 0.0, end / 2, end]
    return {
        "title": {"text": html_text(what), "side": "top"},
        "tickvals": places,
        "ticktext": [f"× {value_text(2.0**place)}" for place in places],
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 8,
    }


def overlay_figure(lines: Sequence[Line], unit: str, *, log: bool) -> go.Figure:
    """Draw curves over each other, each with a dash and a colour of its own.

    Parameters
    ----------
    lines
        At most four.
    unit
        What the vertical axis shows.
    log
        A logarithmic one.
    """
    dashes = ("solid", "dash", "dot", "dashdot")
    symbols = ("circle", "square", "diamond", "x")
    figure = go.Figure()
    for place, line in enumerate(lines):
        values = line.values.astype(np.float64)
        figure.add_trace(
            go.Scatter(
                x=np.asarray(line.steps, np.int64),
                y=np.where(values > 0, values, np.nan) if log else values,
                name=html_text(line.name),
                mode="lines+markers",
                line={"color": CATEGORICAL[place], "width": 2, "dash": dashes[place]},
                marker={"size": 5, "symbol": symbols[place]},
                hovertemplate=f"{html_text(line.name)}<br>step %{{x:,}}: %{{y:.4~g}}<extra></extra>",
            )
        )
    figure.update_layout(
        height=280,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        showlegend=True,
    )
    figure.update_xaxes(**steps_axis(8))
    figure.update_yaxes(
        title=title(html_text(unit)),
        type="log" if log else "linear",
        automargin=True,
        **(log_ticks(value for line in lines for value in line.values) if log else {}),
    )
    return figure
