"""Changes of a metric between two steps, or between two runs: tables in, tables out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.pages.sensitivity.heatmap import bucket_steps, row_labels
from inshrink_app.theme import CATEGORICAL, DIVERGING, GAP
from inshrink_app.widgets.figures import log_ticks, steps_axis, thinned, title
from inshrink_app.widgets.formatting import html_text, value_text
from inshrink_app.widgets.tables import Sensitivity
from numpy.typing import NDArray

__all__ = ["Changes", "Line", "between_runs", "between_steps", "changes_figure", "octaves", "overlay_figure"]


class Changes(NamedTuple):
    """Changes in octaves, the largest at the end first.

    Parameters
    ----------
    names, layers
        Of each row.
    steps
        Of each column.
    values
        float64 ``[rows, steps]``; NaN where one of the two has no value.
    first, second
        What each row is compared by: the values at both steps, or of both runs at the last common step.
    only_first, only_second
        Tensors that only one of the two has.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()


def octaves(before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the base-2 logarithm of a quotient; NaN where one of the two is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> octaves(np.array([1.0, 0.0]), np.array([4.0, 1.0])).tolist()
    [2.0, nan]
    """
    first, second = np.broadcast_arrays(before.astype(np.float64), after.astype(np.float64))
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    quotient = np.divide(second, first, out=np.ones(first.shape), where=sound)
    return np.where(sound, np.log2(quotient), np.nan)


def between_steps(table: Sensitivity, statistic: str, first: int, second: int) -> Changes:
    """Return how rows changed from one step to every step up to another.

    Parameters
    ----------
    table
        One metric.
    statistic
        A key of its values.
    first, second
        Any two steps of it, in any order.
    """
    values = table.values[statistic]
    a, b = table.steps.index(first), table.steps.index(second)
    columns = slice(min(a, b), max(a, b) + 1)
    before, after = values[:, a], values[:, b]
    order = _largest_first(octaves(before, after))
    has_first, has_second = np.isfinite(before), np.isfinite(after)
    return Changes(
        names=tuple(table.rows[i].name for i in order),
        layers=tuple(table.rows[i].layer for i in order),
        steps=table.steps[columns],
        values=octaves(before[order, None], values[order, columns]),
        first=before[order].astype(np.float64),
        second=after[order].astype(np.float64),
        only_first=_named(table, has_first & ~has_second),
        only_second=_named(table, has_second & ~has_first),
    )


def between_runs(mine: Sensitivity, other: Sensitivity, statistic: str) -> Changes:
    """Return how rows of one run differ from those of the same name in another, at their common steps."""
    places = {row.name: i for i, row in enumerate(other.rows)}
    common = [(i, places[row.name]) for i, row in enumerate(mine.rows) if row.name in places]
    steps = tuple(step for step in mine.steps if step in set(other.steps))
    rows, others = (np.asarray([pair[k] for pair in common], np.int64) for k in (0, 1))
    at, there = ([table.steps.index(step) for step in steps] for table in (mine, other))
    first = mine.values[statistic][rows][:, at].reshape(len(common), len(steps))
    second = other.values[statistic][others][:, there].reshape(len(common), len(steps))
    change = octaves(first, second)
    last = change[:, -1] if steps else np.full(len(common), np.nan)
    order = _largest_first(last)
    mine_names = {row.name for row in mine.rows}
    ends = [
        (values[order, -1] if steps else np.full(len(order), np.nan)).astype(np.float64)
        for values in (first, second)
    ]
    return Changes(
        names=tuple(mine.rows[rows[i]].name for i in order),
        layers=tuple(mine.rows[rows[i]].layer for i in order),
        steps=steps,
        values=change[order],
        first=ends[0],
        second=ends[1],
        only_first=tuple(row.name for row in mine.rows if row.name not in places),
        only_second=tuple(row.name for row in other.rows if row.name not in mine_names),
    )


def _largest_first(change: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the order by falling change, in either direction; what cannot be told comes last."""
    size = np.where(np.isfinite(change), -np.abs(change), np.inf)
    return np.argsort(size, kind="stable")


def _named(table: Sensitivity, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(row.name for row, chosen in zip(table.rows, which, strict=True) if chosen)


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
