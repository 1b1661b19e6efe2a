"""The heatmap of a run: its cells with the training loss above them. No Streamlit here."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import TOOLBAR, few_ticks, log_ticks, title
from inshrink_app.widgets.heatmap import (
    MAX_COLUMNS,
    MAX_ROW_LABELS,
    MOST_APART,
    ROOM_OF_STEPS,
    Drawn,
    bucket_steps,
    cells,
    column_edges,
    row_labels,
)

_LABEL_WIDTH, _FEW_ROWS = 30, 40
_MAX_STEP_LABELS = 6
"""Beside the panel there is little room on a small screen."""

_LOSS_HEIGHT, _LOSS_GAP = 74, 10
"""Pixels of the training loss above the cells, and of the room between."""

_LOSS_NAME_WIDTH = 12
_LOSS_DECADES = 100
"""A loss that falls further than this is drawn on a logarithmic axis."""

_NO_VALUE = "%{y}<br>step %{x}<br>no value at this step<extra></extra>"


def column_of(place: int, n_steps: int, limit: int = MAX_COLUMNS) -> int:
    """Return the column that holds a step, by the step's place."""
    return int(np.searchsorted(column_edges(n_steps, limit), place, side="right")) - 1


def heatmap_figure(
    table: Sensitivity,
    statistic: str,
    *,
    relative: str = "plain",
    loss: tuple[str, Sequence[tuple[int, float]]] | None = None,
    tree: Sequence[tuple[str, str]] = (),
    beside: Sensitivity | None = None,
) -> go.Figure:
    """Draw rows by steps, colour by the value or, where the metric spans decades, its logarithm.

    Parameters
    ----------
    table
        What to draw.
    statistic
        A key of its values.
    relative
        What the values are relative to (`arranging.NORMALISED`), or ``times`` where they are quotients.
    loss
        The name of a training metric and its values by step, drawn above on the same axis.
    tree
        Of each row its label, as it stands in the tree of modules, and its shape; by default names alone.
    beside
        Another table of the same rows, which is to have the same colours.
    """
    columns = bucket_steps(table.values[statistic], table.steps)
    values = columns.values
    if beside is not None:
        values = np.concatenate([values, bucket_steps(beside.values[statistic], beside.steps).values], axis=1)
    drawn = Drawn.of(table, values, statistic, relative)
    figure = cells(
        columns._replace(values=drawn.colours[:, : len(columns.labels)]),
        drawn.rows,
        columns.values,
        f"{drawn.hover}{drawn.told}<extra></extra>",
        missing=_NO_VALUE,
        **drawn.look,
    )
    tree = tree or [(label, "") for label in row_labels([row.name for row in table.rows])]
    labels = [
        (fmt.html(fmt.elided(label, _LABEL_WIDTH)), fmt.html(shape) if shape else "") for label, shape in tree
    ]
    drawn.lay_out(figure, [f"{label}  {shape}" for label, shape in labels])
    _name_rows(figure, labels)
    shown = few_ticks(columns.labels, columns.labels, _MAX_STEP_LABELS)
    figure.update_xaxes(range=[-0.5, len(columns.labels) - 0.5], **shown)
    figure.update_yaxes(autorange=None, range=[len(drawn.rows) - 0.5, -0.5], showticklabels=False, ticks="")
    if loss is not None:  # One cursor for both: a line at the step, through the curve and the cells.
        figure.update_xaxes(
            showspikes=True, spikemode="across", spikesnap="data", spikethickness=1, spikecolor=GAP
        )
        _add_loss(figure, loss, table.steps, columns.labels)
    return figure


def _name_rows(figure: go.Figure, labels: Sequence[tuple[str, str]]) -> None:
    """Write names and shapes beside the rows: names to the left, as a tree stands, and they can be clicked.

    The first annotations are the names, one a row as long as all can be read; further ones are not clicked.
    """
    stride = -(-len(labels) // MAX_ROW_LABELS)
    size = 12 if len(labels) <= _FEW_ROWS else 10
    look = {"xref": "paper", "x": 0, "yref": "y", "showarrow": False, "yanchor": "middle", "borderpad": 0}
    left = -figure.layout.margin.l + 4
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
    inner = figure.layout.height - TOOLBAR - ROOM_OF_STEPS
    share = inner / (inner + _LOSS_HEIGHT + _LOSS_GAP)
    figure.add_trace(
        go.Scatter(
            x=list(labels),
            y=np.asarray(values, np.float64),
            yaxis="y2",
            mode="lines+markers" if len(labels) <= MOST_APART else "lines",
            connectgaps=True,
            line={"color": CATEGORICAL[0], "width": 2},
            marker={"size": 4},
            hovertemplate=f"{fmt.html(name)} %{{y:{fmt.d3_format(values)}}}<br>step %{{x}}<extra></extra>",
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
            "title": title(fmt.html(fmt.elided(name, _LOSS_NAME_WIDTH))),
            "fixedrange": True,
            "zeroline": False,
            **axis,
        },
    )
    figure.data[1].colorbar.y = share
