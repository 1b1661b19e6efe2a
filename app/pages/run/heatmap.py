"""The map as a figure: rows by steps, with training metrics above. No Streamlit here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.model import METRICS, Sensitivity
from inshrink_app.theme import CATEGORICAL, DIVERGING, GAP, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import (
    CURVE_PARTS,
    TOOLBAR,
    colour_bar,
    few_ticks,
    gaps,
    linear_scale_ticks,
    log_scale_ticks,
    log_ticks,
    steps_axis,
    title,
)
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row
from inshrink_core.analysis.thinning import thinned

MAX_COLUMNS = 100
"""Largest number of columns; narrower ones cannot be told apart on a laptop's screen."""

_CLIPPED = (1.0, 99.0)
"""Percentiles at the ends of the colour scale; outliers take the end colours."""

_LONGEST_COLORBAR = 420

_ROW_HEIGHTS = ((16, 24), (28, 18), (60, 12), (120, 7), (250, 4), (700, 2), (10**9, 1))
"""Pixels of a row by the number of rows: (at most so many rows, pixels)."""

_LETTER_PIXELS = 5.8
"""Width of a letter of a label, estimated generously; a margin that is too narrow grows by itself."""

_ROOM_OF_ROWS, _ROOM_OF_COLORBAR, ROOM_OF_STEPS = 55, 70, 66
"""Pixels beside the letters for boxes, paddings and the bar; and below for labels of steps and their title.
"""

_ROOM_OF_BOXES = 22
"""Pixels before the names, for the boxes that tick rows."""

_NAME_WIDTH = 34
MAX_ROW_LABELS = 60

MOST_APART = 60
"""With more rows or columns, no line separates them."""

_NARROWEST = 4
"""If the closest steps were narrower than a column by more than this factor, the axis counts columns."""

_RELATIVE = {
    "plain": "{symbol} per weight, {unit}",
    "share": "share of the total",
    "times": "{symbol}, times",
}
"""Suffix of a metric's name, by the reference of its values."""


class StepAxis(NamedTuple):
    """The columns of a map: steps, merged neighbours if they are many, and gaps for missing ones.

    Parameters
    ----------
    columns
        First index of each column among the steps, and the index after its last; equal for a gap.
    centres
        Position of each column: its step if steps are spread evenly enough, else its number.
    steps
        The last step of each column.
    is_numeric
        Whether positions are steps.
    """

    columns: tuple[tuple[int, int], ...]
    centres: NDArray[np.float64]
    steps: tuple[int, ...]
    is_numeric: bool

    @classmethod
    def of(cls, steps: Sequence[int], missing: Iterable[int] = (), limit: int = MAX_COLUMNS) -> StepAxis:
        """Arrange ascending steps in at most `limit` columns, with missing ones between them."""
        edges = np.linspace(0, len(steps), min(limit, len(steps)) + 1).round().astype(int).tolist()
        columns = [(first, end, steps[end - 1]) for first, end in pairwise(edges)]
        if len(steps) <= limit:
            columns += [(0, 0, step) for step in missing]
        columns.sort(key=lambda column: column[2])
        ends = tuple(step for _, _, step in columns)
        closest = min((after - before for before, after in pairwise(ends)), default=1)
        is_numeric = not ends or _NARROWEST * closest * len(ends) >= ends[-1] - ends[0]
        centres = np.asarray(ends if is_numeric else range(len(ends)), np.float64)
        return cls(tuple((first, end) for first, end, _ in columns), centres, ends, is_numeric)

    @property
    def edges(self) -> NDArray[np.float64]:
        """Left edges of the columns, and the right edge of the last one."""
        middles = (self.centres[1:] + self.centres[:-1]) / 2
        if not middles.size:
            return np.asarray([centre + side for centre in self.centres for side in (-0.5, 0.5)])
        ends = 2 * self.centres[[0, -1]] - middles[[0, -1]]
        return np.concatenate([ends[:1], middles, ends[1:]])

    @property
    def gaps(self) -> tuple[int, ...]:
        """Columns of missing steps."""
        return tuple(column for column, (first, end) in enumerate(self.columns) if first == end)

    def column_of(self, place: int) -> int:
        """Return the column of a step, by the step's index."""
        return next(column for column, (first, end) in enumerate(self.columns) if first <= place < end)

    def place_of(self, column: int) -> int | None:
        """Return the index of a column's last step; None for a gap."""
        first, end = self.columns[column]
        return end - 1 if end > first else None

    def merged(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return values by column: the mean of finite values, NaN without any."""
        if len(self.columns) == values.shape[1]:
            return values
        present = np.isfinite(values)
        totals, counts = (
            np.pad(np.cumsum(part, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
            for part in (np.where(present, values, 0), present)
        )
        firsts, ends = np.asarray(self.columns).T
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (totals[:, ends] - totals[:, firsts]) / (counts[:, ends] - counts[:, firsts])
        single = ends - firsts == 1
        means[:, single] = values[:, firsts[single]]
        return means.astype(np.float32)


def missing_steps(steps: Sequence[int], unreadable: Iterable[str] = ()) -> tuple[int, ...]:
    """Return the missing steps of a run: gaps in a regular spacing, and unreadable steps.

    Parameters
    ----------
    steps
        Ascending steps.
    unreadable
        Names of checkpoints. The last number of each is its step, if it is near the others.

    Examples
    --------
    >>> missing_steps((10, 20, 40, 50), ["step_60.pt"]), missing_steps((1, 2, 4, 8))
    ((30, 60), ())
    """
    intervals = Counter(after - before for before, after in pairwise(steps))
    stride, n = intervals.most_common(1)[0] if intervals else (0, 0)
    missing = {
        step
        for before, after in pairwise(steps)
        if 2 * n > intervals.total() and (after - before) % stride == 0
        for step in range(before + stride, after, stride)
    }
    missing = missing if len(missing) <= len(steps) else set()
    numbers = (int(number) for name in unreadable for number in re.findall(r"\d{1,18}", name)[-1:])
    missing |= {step for step in numbers if steps and steps[0] <= step <= steps[-1] + stride}
    return tuple(sorted(missing.difference(steps)))


def scaled(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return log10 of values (NaN where undefined) and the ends of the colour scale.

    Zeros have no logarithm and take the scale's lower end; their hover shows zero.
    """
    wide = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.where(np.isfinite(wide), np.log10(wide), np.nan)
    known = shown[np.isfinite(shown)]
    low, high = map(float, np.percentile(known, _CLIPPED) if known.size else (-1.0, 0.0))
    if high - low < 0.02:
        low, high = low - 0.5, high + 0.5
    return np.where(np.isneginf(shown), low, shown).astype(np.float32), low, high


def linear(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """Return values unchanged, and the ends of a scale that starts at zero."""
    known = values[np.isfinite(values)]
    return values, 0.0, float(known.max()) if known.size else 1.0


def colorbar(text: str, low: float, high: float, room: int, *, is_linear: bool = False) -> dict[str, Any]:
    """Return the scale beside the cells, with round values between its ends."""
    ticks = linear_scale_ticks(low, high) if is_linear else log_scale_ticks(low, high)
    place = {"lenmode": "pixels", "len": min(_LONGEST_COLORBAR, room), "y": 1, "yanchor": "top", "ypad": 0}
    return colour_bar(text, ticks, side="right", **place)


def _hover(table: Sensitivity, values: NDArray[np.float32], statistic: str, relative: str) -> str:
    """Return the hover text of a cell, in a format for the range of the values."""
    metric = METRICS[table.metric]
    if relative == "share":
        return "share = %{customdata[0]:.3~%}"
    known = np.abs(values[np.isfinite(values) & (values != 0)])
    form = fmt.d3_format((float(known.min()), float(known.max())) if known.size else ())
    word = "times" if relative == "times" else f"{statistic} {metric.symbol}"
    return f"{fmt.html(word)} = %{{customdata[0]:{form}}}"


def _row_category(row: Row) -> str:
    """Return a row's identity, which is also the head of its hover: full name, kind, shape."""
    if row.shape is None:
        extent = f"{fmt.counted(row.n_tensors, 'tensor')}, {fmt.count(row.numel)} values"
    else:
        extent = fmt.shape(row.shape)
    kind = f"{row.layer_type} · " if row.layer_type and row.layer_type != row.name else ""
    return f"<b>{fmt.html(row.name)}</b><br>{fmt.html(kind)}{extent}"


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
        A metric by tensor.
    groups
        Groups of its rows.
    exact
        The same metric by block or layer type. Rows of the same name and extent come from it, medians and
        percentiles included. All other rows are means over tensors, weighted by size.
    """
    rows = tuple(_row_of(table, group) for group in groups)
    members = np.asarray([i for group in groups for i in group.members], np.int64)
    starts = np.cumsum([0, *(len(group.members) for group in groups)])[:-1]
    numel = np.asarray([row.numel for row in table.rows], np.float64).reshape(-1, 1)
    alone = [place for place, group in enumerate(groups) if len(group.members) == 1]
    same = _same(rows, () if exact is None else exact.rows)

    def summed(each: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.add.reduceat(each[members], starts, axis=0)
        return sums

    values = {}
    for name, measured in table.values.items():
        known = np.isfinite(measured)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = summed(np.where(known, measured, 0.0) * numel) / summed(np.where(known, numel, 0.0))
        values[name] = means.astype(np.float32)
        if exact is not None:
            values[name][list(same)] = exact.values[name][list(same.values())]
        values[name][alone] = measured[members[starts[alone]]]
    sizes = summed(np.where(np.isfinite(table.values["mean"]), table.extents(), 0.0))
    return dataclasses.replace(table, by="block", rows=rows, values=values, sizes=sizes)


def _same(rows: Sequence[Row], others: Sequence[Row]) -> dict[int, int]:
    """Map the index of each row to that of the other row with the same name and extent, if any."""
    known = {(row.name, row.n_tensors): i for i, row in enumerate(others)}
    places = ((place, known.get((row.name, row.n_tensors))) for place, row in enumerate(rows))
    return {place: at for place, at in places if at is not None}


def _row_of(table: Sensitivity, group: Node) -> Row:
    """Describe a group; a group of one tensor looks like that tensor."""
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


_LABEL_WIDTH, _FEW_ROWS = 30, 40
_MAX_STEP_LABELS = 8
"""Largest number of step labels; the panel beside the map leaves little room on a small screen."""

_CURVE_HEIGHT, _CURVE_GAP = 74, 10
"""Pixels of a training metric above the cells, and of the gap between."""

_CURVE_NAME_WIDTH = 12
_DECADES = 100
"""A metric that falls by more than this factor has a logarithmic axis."""

_NO_VALUE = "%{y}<br>no value at this step<extra></extra>"


def heatmap_figure(
    table: Sensitivity,
    statistic: str,
    *,
    relative: str = "plain",
    curves: Sequence[tuple[str, Sequence[tuple[int, float]]]] = (),
    tree: Sequence[tuple[str, str]] = (),
    missing: Sequence[int] = (),
) -> go.Figure:
    """Draw rows by steps, coloured by the logarithm of the value.

    Parameters
    ----------
    table
        The table to draw.
    statistic
        A key of its values.
    relative
        Reference of the values (`rows.NORMALISED`), or ``times`` for quotients.
    curves
        Training metrics by name, with values by step, drawn above on the same axis.
    tree
        Label in the tree of modules and shape of each row; by default only names.
    missing
        Steps that the run lacks.
    """
    axis = StepAxis.of(table.steps, missing)
    values = axis.merged(table.values[statistic])
    metric = METRICS[table.metric]
    is_linear = table.metric == "bits"
    colours, low, high = linear(values) if is_linear else scaled(values)
    if relative == "times":  # red below 1 and blue above
        reach = max(abs(high), abs(low), 1e-3)
        low, high = -reach, reach
    rows = [_row_category(row) for row in table.rows]
    row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if len(rows) <= most)
    height = TOOLBAR + max(220, len(rows) * row_pixels + 62)
    about = f"{metric.label}: {_RELATIVE[relative].format(symbol=metric.symbol, unit=metric.unit)}"
    bar = colorbar(about, low, high, height - TOOLBAR - 82, is_linear=is_linear)
    steps = np.broadcast_to(np.asarray(axis.steps, np.float32), values.shape)
    figure = go.Figure(gaps(colours, axis.edges.tolist(), rows, _NO_VALUE))
    figure.add_trace(
        go.Heatmap(
            z=colours,
            x=axis.edges,
            y=rows,
            customdata=np.stack([values, steps], axis=2),
            hoverongaps=False,
            xgap=1 if len(axis.columns) <= MOST_APART else 0,
            ygap=1 if len(rows) <= MOST_APART else 0,
            hovertemplate="%{y}<br>step %{customdata[1]:,d}<br>"
            f"{_hover(table, values, statistic, relative)}<extra></extra>",
            zmin=low,
            zmax=high,
            colorscale=DIVERGING if relative == "times" else SEQUENTIAL,
            colorbar=bar,
        )
    )
    names = fmt.elided_all([row.name for row in table.rows], _NAME_WIDTH)
    tree = tree or [(label, "") for label in names]
    labels = [
        (fmt.html(fmt.elided(label, _LABEL_WIDTH)), fmt.html(shape) if shape else "") for label, shape in tree
    ]
    # If margins do not fit the labels, the browser draws everything twice.
    longest = max((len(f"{label}  {shape}") for label, shape in labels), default=0)
    figure.update_layout(
        height=height,
        margin={
            "l": _ROOM_OF_ROWS + _LETTER_PIXELS * longest,
            "r": _ROOM_OF_COLORBAR + _LETTER_PIXELS * max(map(len, bar["ticktext"]), default=0),
            "t": TOOLBAR,
            "b": ROOM_OF_STEPS,
        },
        dragmode="zoom",
        hovermode="closest",
        showlegend=False,
        hoverlabel={"align": "left"},
    )
    _name_rows(figure, labels)
    _mark_gaps(figure, axis)
    ticks = {} if axis.is_numeric else few_ticks(axis.centres.tolist(), list(map(fmt.count, axis.steps)), 6)
    span = [axis.edges[0], axis.edges[-1]] if axis.columns else None
    figure.update_xaxes(**steps_axis(_MAX_STEP_LABELS) | {"automargin": False}, range=span, showgrid=False)
    figure.update_xaxes(zeroline=False, **ticks)
    figure.update_yaxes(
        type="category", range=[len(rows) - 0.5, -0.5], showgrid=False, showticklabels=False, ticks=""
    )
    drawn = [(name, curve) for name, series in curves if (curve := _course(series, axis))]
    if drawn:  # One cursor for all: a line at the step, through the curves and the cells.
        figure.update_xaxes(
            showspikes=True, spikemode="across", spikesnap="data", spikethickness=1, spikecolor=GAP
        )
        _add_curves(figure, drawn, axis)
    return figure


def _name_rows(figure: go.Figure, labels: Sequence[tuple[str, str]]) -> None:
    """Write names and shapes beside the rows; names are left-aligned as a tree and can be clicked.

    The first annotations are the names, one per row if all are legible. Later annotations cannot be clicked.
    """
    stride = -(-len(labels) // MAX_ROW_LABELS)
    size = 12 if len(labels) <= _FEW_ROWS else 10
    look = {"xref": "paper", "x": 0, "yref": "y", "showarrow": False, "yanchor": "middle", "borderpad": 0}
    left = -figure.layout.margin.l + _ROOM_OF_BOXES
    names = [
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
    figure.update_layout(annotations=[*names, *shapes])


def _mark_gaps(figure: go.Figure, axis: StepAxis) -> None:
    """Write a cross below the columns of missing steps."""
    look = {"yref": "y domain", "y": 0, "yanchor": "top", "text": "×", "showarrow": False, "borderpad": 0}
    for column in axis.gaps:
        figure.add_annotation(**look, x=axis.centres[column], hovertext="No readable checkpoint")


def training_loss(log: Mapping[str, Sequence[tuple[int, float]]]) -> str | None:
    """Return the name of the logged training loss; None without one.

    Examples
    --------
    >>> training_loss({"eval_loss": (), "lr": (), "train/loss": ()}), training_loss({"lr": ()})
    ('train/loss', None)
    """
    losses = [name for name in log if "loss" in name.casefold()]
    validation = ("eval", "val", "test", "dev")
    training = [name for name in losses if not any(word in name.casefold() for word in validation)]
    return min(training or losses, key=len, default=None)


def _course(series: Sequence[tuple[int, float]], axis: StepAxis) -> list[tuple[float, float]]:
    """Return the finite values of a metric at the steps of the map, as many as are visible."""
    first, last = (axis.steps[0], axis.steps[-1]) if axis.steps else (0, -1)
    return thinned(
        sorted((step, value) for step, value in series if first <= step <= last and math.isfinite(value)),
        CURVE_PARTS,
    )


def _add_curves(
    figure: go.Figure, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]], axis: StepAxis
) -> None:
    """Draw training metrics above the cells, and make room for them."""
    inner = figure.layout.height - TOOLBAR - ROOM_OF_STEPS
    total = inner + len(curves) * (_CURVE_HEIGHT + _CURVE_GAP)
    figure.update_layout(height=total + TOOLBAR + ROOM_OF_STEPS, yaxis={"domain": [0, inner / total]})
    for place, (name, series) in enumerate(curves):
        steps, values = (np.asarray(part, np.float64) for part in zip(*series, strict=True))
        figure.add_trace(
            go.Scatter(
                x=np.interp(steps, axis.steps, axis.centres),
                y=values,
                yaxis=f"y{place + 2}",
                mode="lines+markers" if len(series) <= MOST_APART else "lines",
                line={"color": CATEGORICAL[0], "width": 2},
                marker={"size": 4},
                customdata=steps,
                hovertemplate=f"{fmt.html(name)} %{{y:{fmt.d3_format(values.tolist())}}}"
                "<br>step %{customdata:,d}<extra></extra>",
                showlegend=False,
            )
        )
        low, high = float(values.min()), float(values.max())
        look: dict[str, Any] = {"nticks": 3, "tickformat": "~g"}
        if low > 0 and high / low > _DECADES:
            look = {"type": "log", **log_ticks([low, high])}
            look |= {key: ticks[:: max(1, len(ticks) // 2)] for key, ticks in look.items() if key != "type"}
        top = total - place * (_CURVE_HEIGHT + _CURVE_GAP)
        heading = title(fmt.html(fmt.elided(name, _CURVE_NAME_WIDTH)))
        domain = [(top - _CURVE_HEIGHT) / total, top / total]
        more = {"title": heading, "fixedrange": True, "zeroline": False, "domain": domain}
        figure.update_layout({f"yaxis{place + 2}": look | more})
    figure.data[1].colorbar.y = inner / total
