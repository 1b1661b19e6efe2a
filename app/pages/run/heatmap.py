"""The map as a figure: rows by steps, with training metrics above. No Streamlit here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from inshrink_app.model import METRICS, Sensitivity
from inshrink_app.theme import CATEGORICAL, DIVERGING, GAP, SEQUENTIAL
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import (
    CURVE_PARTS,
    MAX_APART,
    TOOLBAR,
    curve,
    few_ticks,
    gaps,
    linear_ticks,
    log_scale_ticks,
    steps_axis,
    thinned,
    title,
)
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row
from inshrink_core.sensitivity import STATISTICS

MAX_COLUMNS = 100
"""Largest number of columns; narrower ones cannot be told apart on a laptop's screen."""

_CLIPPED = (1.0, 99.0)
"""Percentiles at the ends of the colour scale; outliers take the end colours."""

_LONGEST_COLORBAR = 420

_ROW_HEIGHTS = ((16, 24), (28, 18), (60, 12), (120, 7), (250, 4), (700, 2), (10**9, 1))
"""Pixels of a row by the number of rows: (at most so many rows, pixels)."""

_LETTER_PIXELS = 5.8
"""Width of a letter of a label, estimated generously; a margin that is too narrow grows by itself."""

_ROOM_OF_ROWS, _ROOM_OF_COLORBAR, ROOM_OF_STEPS = 55, 70, 54
"""Pixels beside the letters for boxes, paddings and the bar; and below for labels of steps and their title.
"""

_ROOM_OF_BOXES = 22
"""Pixels before the names, for the boxes that tick rows."""

_NAME_WIDTH = 34
MAX_ROW_LABELS = 60

_LABEL_WIDTH, _FEW_ROWS = 30, 40
_MAX_STEP_LABELS = 8
"""Largest number of step labels; the panel beside the map leaves little room on a small screen."""

_CURVE_HEIGHT, _CURVE_GAP = 74, 10
"""Pixels of a training metric above the cells, and of the gap between."""

_CURVE_NAME_WIDTH = 12
_NO_VALUE = "%{y}<br>no value at this step<extra></extra>"


class StepAxis(NamedTuple):
    """The columns of a map: steps, merged neighbours if they are many, and gaps for missing ones.

    The position of a column is its number.

    Parameters
    ----------
    columns
        First index of each column among the steps, and the index after its last; equal for a gap.
    steps
        The last step of each column.
    since
        For steps at the end of a longer training, of which the others are not known yet, its first step;
        else None.
    """

    columns: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]
    since: int | None = None

    @classmethod
    def of(cls, steps: Sequence[int], missing: Iterable[int] = (), since: int | None = None) -> StepAxis:
        """Arrange ascending steps in at most `MAX_COLUMNS` columns, with missing ones between them."""
        edges = np.linspace(0, len(steps), min(MAX_COLUMNS, len(steps)) + 1).round().astype(int).tolist()
        columns = [(first, end, steps[end - 1]) for first, end in pairwise(edges)]
        if len(steps) <= MAX_COLUMNS:
            columns += [(0, 0, step) for step in missing]
        columns.sort(key=lambda column: column[2])
        ends = tuple(step for _, _, step in columns)
        return cls(tuple((first, end) for first, end, _ in columns), ends, since)

    @property
    def edges(self) -> NDArray[np.float64]:
        """Left edges of the columns, and the right edge of the last one."""
        return np.arange(len(self.columns) + 1, dtype=np.float64) - 0.5

    @property
    def ticks(self) -> dict[str, list[Any]]:
        """Labels of a few columns."""
        return few_ticks(range(len(self.steps)), list(map(fmt.count, self.steps)), 6)

    @property
    def span(self) -> tuple[float, float]:
        """Left and right end of the axis; unknown steps take the place of columns that the map will have."""
        right = len(self.columns) - 0.5
        return (-0.5 if self.since is None else min(-1.5, right - MAX_COLUMNS), right)

    def positions(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the positions of any ascending steps."""
        known, places = [*self.steps], [*map(float, range(len(self.steps)))]
        if self.since is not None:
            known, places = [self.since, *known], [self.span[0], *places]
        return np.asarray(np.interp(steps, known, places), np.float64)

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


def aggregate(
    table: Sensitivity, groups: Sequence[Node], statistics: Collection[str] = STATISTICS
) -> Sensitivity:
    """Return some statistics with a row for each group of rows.

    A mean is that of the tensors, weighted by size. Other statistics of several tensors are unknown.
    """
    members = np.asarray([i for group in groups for i in group.members], np.int64)
    starts = np.cumsum([0, *(len(group.members) for group in groups)])[:-1]

    def summed(each: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.add.reduceat(each[members], starts, axis=0)
        return sums

    means = table.values["mean"]
    known = np.isfinite(means)
    numel = np.asarray([row.numel for row in table.rows], np.float64).reshape(-1, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = summed(np.where(known, means, 0) * numel) / summed(np.where(known, numel, 0.0))
    firsts = [group.members[0] for group in groups]
    is_alone = np.array([[len(group.members) == 1] for group in groups])
    values = {
        name: mean.astype(np.float32)
        if name == "mean"
        else np.where(is_alone, table.values[name][firsts], np.float32("nan"))
        for name in statistics
    }
    sizes = summed(np.where(known, table.extents(), 0.0))
    rows = tuple(_row_of([table.rows[i] for i in group.members], group.name) for group in groups)
    return dataclasses.replace(table, rows=rows, values=values, sizes=sizes)


def _row_of(members: Sequence[Row], name: str) -> Row:
    """Describe a group; a group of one tensor looks like that tensor."""
    if len(members) == 1:
        return members[0]._replace(name=name)
    sizes = Counter[str]()
    for member in members:
        sizes[member.layer_type] += member.numel
    (layer, _), *_ = sizes.most_common(1)
    n, numel = len(members), sizes.total()
    return Row(name, name, layer, members[0].role, n, numel, None)


def heatmap_figure(
    table: Sensitivity,
    statistic: str,
    *,
    is_ratio: bool = False,
    curves: Sequence[tuple[str, Sequence[tuple[int, float]]]] = (),
    tree: Sequence[tuple[str, str]] = (),
    missing: Sequence[int] = (),
    since: int | None = None,
) -> go.Figure:
    """Draw rows by steps, coloured by the logarithm of the value.

    Parameters
    ----------
    table
        The table to draw.
    statistic
        A key of its values.
    is_ratio
        Whether the values are quotients of two values: red below 1 and blue above.
    curves
        Training metrics by name, with values by step, drawn above on the same axis.
    tree
        Label in the tree of modules and shape of each row; by default only names.
    missing
        Steps that the run lacks.
    since
        First step of the training, if the steps before those of the table are not known yet.
    """
    axis = StepAxis.of(table.steps, missing, since=since)
    n_rows = len(table.rows)
    row_pixels = next(pixels for most, pixels in _ROW_HEIGHTS if n_rows <= most)
    figure = go.Figure(layout={"height": TOOLBAR + max(220, n_rows * row_pixels + 62)})
    _add_cells(figure, table, statistic, axis, is_ratio=is_ratio)
    names = fmt.clipped_all([row.name for row in table.rows], _NAME_WIDTH)
    _name_rows(figure, tree or [(label, "") for label in names])
    _add_steps(figure, axis)
    figure.update_layout(dragmode="zoom", hovermode="closest", showlegend=False, hoverlabel={"align": "left"})
    figure.update_yaxes(
        type="category", range=[n_rows - 0.5, -0.5], showgrid=False, showticklabels=False, ticks=""
    )
    _add_curves(figure, curves, axis)
    return figure


def _add_cells(
    figure: go.Figure, table: Sensitivity, statistic: str, axis: StepAxis, *, is_ratio: bool
) -> None:
    """Draw the cells, grey ones where a value is missing, and the scale of their colours."""
    values = axis.merged(table.values[statistic])
    metric, is_linear = METRICS[table.metric], table.metric == "bits"
    known = values[np.isfinite(values)]
    colours, low, high = scaled(values)
    if is_linear:
        colours, low, high = values, 0.0, float(known.max()) if known.size else 1.0
    if is_ratio:
        high = max(abs(high), abs(low), 1e-3)
        low = -high
    about = f"{metric.symbol}{', times' if is_ratio else ' per weight'}"
    word = fmt.html("times" if is_ratio else f"{statistic} {metric.symbol}")
    ticks = linear_ticks(low, high) if is_linear else log_scale_ticks(low, high)
    rows = [_row_category(row) for row in table.rows]
    steps = np.broadcast_to(np.asarray(axis.steps, np.float32), values.shape)
    figure.add_trace(gaps(colours, axis.edges.tolist(), rows, _NO_VALUE))
    figure.add_trace(
        go.Heatmap(
            z=colours,
            x=axis.edges,
            y=rows,
            customdata=np.stack([values, steps], axis=2),
            hoverongaps=False,
            xgap=1 if len(axis.columns) <= MAX_APART else 0,
            ygap=1 if len(rows) <= MAX_APART else 0,
            hovertemplate="%{y}<br>step %{customdata[1]:,d}<br>"
            f"{word} = %{{customdata[0]:{fmt.d3_format(known.tolist())}}}<extra></extra>",
            zmin=low,
            zmax=high,
            colorscale=DIVERGING if is_ratio else SEQUENTIAL,
            colorbar={
                "title": {"text": fmt.html(about), "side": "right"},
                **{"x": 1, "y": 1, "yanchor": "top", "xpad": 12, "ypad": 0, "thickness": 12},
                # In pixels; a length in heights would need a margin that depends on the screen.
                **{"lenmode": "pixels", "len": min(_LONGEST_COLORBAR, figure.layout.height - TOOLBAR - 82)},
                **{"outlinewidth": 0, **ticks},
            },
        )
    )
    room = _ROOM_OF_COLORBAR + _LETTER_PIXELS * max(map(len, ticks["ticktext"]), default=0)
    figure.update_layout(margin={"r": room, "t": TOOLBAR, "b": ROOM_OF_STEPS})


def _name_rows(figure: go.Figure, tree: Sequence[tuple[str, str]]) -> None:
    """Write names and shapes beside the rows; names are left-aligned as a tree and can be clicked.

    The first annotations are the names, one per row if all are legible. Later annotations cannot be clicked.
    """
    labels = [(fmt.html(fmt.clipped(label, _LABEL_WIDTH)), fmt.html(shape)) for label, shape in tree]
    # If margins do not fit the labels, the browser draws everything twice.
    longest = max((len(f"{label}  {shape}") for label, shape in labels), default=0)
    figure.update_layout(margin_l=_ROOM_OF_ROWS + _LETTER_PIXELS * longest)
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


def _add_steps(figure: go.Figure, axis: StepAxis) -> None:
    """Label the axis of steps, and write a cross below the columns of missing ones."""
    span = axis.span if axis.columns else None
    figure.update_xaxes(**steps_axis(_MAX_STEP_LABELS) | {"automargin": False}, range=span, showgrid=False)
    figure.update_xaxes(zeroline=False, **axis.ticks)
    look = {"yref": "y domain", "y": 0, "yanchor": "top", "text": "×", "showarrow": False, "borderpad": 0}
    for column in axis.gaps:
        figure.add_annotation(**look, x=column, hovertext="No readable checkpoint")


def _add_curves(
    figure: go.Figure, logged: Sequence[tuple[str, Sequence[tuple[int, float]]]], axis: StepAxis
) -> None:
    """Draw training metrics above the cells, and make room for them."""
    first, last = (axis.steps[0], axis.steps[-1]) if axis.steps else (0, -1)
    first = first if axis.since is None else axis.since
    curves = []
    for name, series in logged:
        inside = [row for row in series if first <= row[0] <= last and math.isfinite(row[1])]
        if inside:
            curves.append((name, thinned(sorted(inside), CURVE_PARTS)))
    if not curves:
        return
    # One cursor for all: a line at the step, through the curves and the cells.
    cursor = {"showspikes": True, "spikemode": "across", "spikesnap": "data", "spikethickness": 1}
    figure.update_xaxes(**cursor, spikecolor=GAP)
    inner = figure.layout.height - TOOLBAR - ROOM_OF_STEPS
    total = inner + len(curves) * (_CURVE_HEIGHT + _CURVE_GAP)
    figure.update_layout(height=total + TOOLBAR + ROOM_OF_STEPS, yaxis={"domain": [0, inner / total]})
    for place, (name, parts) in enumerate(curves):
        steps, values = (np.asarray(part, np.float64) for part in zip(*parts, strict=True))
        hover = f"{fmt.html(name)} %{{y:{fmt.d3_format(values)}}}<br>step %{{customdata:,d}}"
        at = axis.positions(steps)
        more: dict[str, Any] = {"yaxis": f"y{place + 2}", "customdata": steps, "showlegend": False}
        figure.add_trace(curve(at, values, fmt.html(name), hover, CATEGORICAL[0], **more))
        top = total - place * (_CURVE_HEIGHT + _CURVE_GAP)
        heading = title(fmt.html(fmt.clipped(name, _CURVE_NAME_WIDTH)))
        domain = [(top - _CURVE_HEIGHT) / total, top / total]
        look = {"title": heading, "fixedrange": True, "zeroline": False, "domain": domain}
        figure.update_layout({f"yaxis{place + 2}": look | {"nticks": 3, "tickformat": "~g"}})
    figure.data[1].colorbar.y = inner / total
