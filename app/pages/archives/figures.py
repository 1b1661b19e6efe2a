"""Figures of archives: original against restored, and bytes of frames. No Streamlit here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from inshrink_app.services import Bound
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import byte_ticks, curve, lay_out, log_ticks, steps_axis, title
from inshrink_app.widgets.quality import COSTS

from inshrink_core.chain.report import ChainFrame
from inshrink_core.verbs.shared.measured import Known

_NAME_WIDTH = 30
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
_HEIGHT = 220
_ROOM = 0.12
_BOUND = CATEGORICAL[5]
_KINDS = {"keyframe": "Keyframe", "delta": "Delta frame"}


def metric_figure(known: Sequence[Known], colours: Mapping[str, str]) -> go.Figure:
    """Draw a metric by step: original, and restored from each archive."""
    rows = {row.step: row for found in known for row in found.comparison.steps}
    errors = {step: error for found in known for step, error in found.standard_errors.items()}
    metric, steps = fmt.html(known[0].comparison.metric), sorted(rows)
    hover = f"original, step %{{x:,}}<br>{metric} %{{y:.5g}}"
    original = curve(steps, [rows[step].original for step in steps], "Original", hover, GAP, width=3)
    if rows.keys() <= errors.keys():
        original.error_y = {"array": [errors[step] for step in steps], "thickness": 1, "width": 2}
    figure = go.Figure(original)
    for found in known:
        restored = [row.restored for row in found.comparison.steps]
        figure.add_trace(_archive(found, restored, colours, metric, ".5g"))
    return _lay_out(figure, metric)


def cost_figure(
    known: Sequence[Known], name: str, colours: Mapping[str, str], bound: Bound | None = None
) -> go.Figure:
    """Draw a figure of the comparison by step, its bound, and the previous-checkpoint baseline.

    The axis covers the archives and the bound; a far worse baseline runs out of it.

    Parameters
    ----------
    known
        The comparisons.
    name
        ``restore_cost``, ``drop`` or ``divergence``; the divergence has a logarithmic axis.
    colours
        Colour of each archive, by its path.
    bound
        The quality bound.
    """
    figure, cost = go.Figure(), COSTS[name]
    rows = [row for found in known for row in found.comparison.steps]
    baseline = {row.step: value for row in rows if (value := getattr(row, f"previous_{name}")) is not None}
    if baseline:
        steps = sorted(baseline)
        values = [cost.scale * baseline[step] for step in steps]
        hover = f"previous checkpoint, step %{{x:,}}<br>%{{y:{fmt.d3_format(values)}}} {cost.unit}"
        look: dict[str, Any] = {"dash": "dash", "mode": "lines"}
        figure.add_trace(curve(steps, values, "Previous checkpoint", hover, GAP, **look))
    drawn: list[float] = []
    for found in known:
        known_values = (getattr(row, name) for row in found.comparison.steps)
        values = [math.nan if value is None else cost.scale * value for value in known_values]
        figure.add_trace(_archive(found, values, colours, cost.word, fmt.d3_format(values), f" {cost.unit}"))
        drawn += filter(math.isfinite, values)
    drawn += _draw_bound(figure, name, bound)
    _lay_out(figure, cost.axis)
    worst = max((cost.scale * value for value in baseline.values()), default=0.0)
    if name == "divergence":
        return figure.update_yaxes(type="log", **log_ticks([*drawn, worst]))
    least, most = min([0.0, *drawn]), max(drawn, default=0.0)
    if most > least and worst > most:
        room = _ROOM * (most - least)
        figure.update_yaxes(range=[least - room, most + room])
    return figure


def size_figure(
    known: Sequence[Known], sizes: Mapping[str, int], colours: Mapping[str, str], name: str, bound: Bound
) -> go.Figure:
    """Draw the largest restore cost, drop or divergence of each archive against its size."""
    figure, cost = go.Figure(), COSTS[name]
    for found in known:
        value = getattr(found.comparison, f"max_{name}")
        if value is not None and found.archive in sizes:
            mark = _archive(found, [cost.scale * value], colours, cost.word, ".3g", f" {cost.unit}")
            hover = f"{mark.name}<br>%{{x:.4s}}B, {cost.word} %{{y:.3g}} {cost.unit}<extra></extra>"
            mark.update(x=[sizes[found.archive]], hovertemplate=hover, mode="markers", marker={"size": 12})
            figure.add_trace(mark)
    _draw_bound(figure, name, bound)
    _lay_out(figure, f"Largest {cost.word}, {cost.unit}")
    ticks = byte_ticks(max(sizes.values(), default=0))
    return figure.update_xaxes(title=title("Size of the archive"), rangemode="tozero", **ticks)


def _draw_bound(figure: go.Figure, name: str, bound: Bound | None) -> list[float]:
    """Draw a bound across a figure; return its position in a list, empty if the figure is not bounded."""
    if bound is None or bound.kind != name:
        return []
    limit = COSTS[name].scale * bound.value
    line = {"color": _BOUND, "width": 1.5, "dash": "dash"}
    text = {"text": f"Bound {fmt.limit(name, bound.value)}", "font": {"size": 12}, "yshift": 2}
    figure.add_hline(y=limit, line=line, annotation=text, annotation_position="top left")
    return [limit]


def _archive(
    known: Known, values: Sequence[float], colours: Mapping[str, str], what: str, form: str, unit: str = ""
) -> go.Scatter:
    """Return the curve of an archive, with its colour, mark and name."""
    name = fmt.html(fmt.clipped(known.name, _NAME_WIDTH))
    place = list(colours).index(known.archive) if known.archive in colours else 0
    hover = f"{name}, step %{{x:,}}<br>{what} %{{y:{form}}}{unit}"
    steps = [row.step for row in known.comparison.steps]
    symbol = _SYMBOLS[(place + place // len(_SYMBOLS)) % len(_SYMBOLS)]
    marker = {"size": 7, "symbol": symbol}
    return curve(steps, values, name, hover, colours.get(known.archive, CATEGORICAL[1]), marker=marker)


def _lay_out(figure: go.Figure, y: str) -> go.Figure:
    lay_out(figure, _HEIGHT, legend=sum(trace.showlegend is not False for trace in figure.data) > 1)
    figure.update_xaxes(**steps_axis(8))
    return figure.update_yaxes(title=title(y), automargin=True, nticks=6)


def frames_figure(frames: Sequence[ChainFrame]) -> go.Figure:
    """Draw the bytes of each frame by step, keyframes and delta frames in different colours."""
    figure = go.Figure()
    for colour, (kind, label) in zip(CATEGORICAL, _KINDS.items(), strict=False):
        rows = [frame for frame in frames if frame.kind == kind]
        about = [(fmt.size(row.nbytes), fmt.ratio(row.ratio_total), row.branch) for row in rows]
        hover = f"{label} of step %{{x:,}}<br>%{{customdata[0]}}, %{{customdata[1]}}"
        hover += "<br>branch %{customdata[2]}"
        bars = {"x": [row.step for row in rows], "y": [row.nbytes for row in rows], "customdata": about}
        bars |= {"name": label, "marker": {"color": colour}, "hovertemplate": f"{hover}<extra></extra>"}
        figure.add_trace(go.Bar(**bars))
    figure.update_layout(barmode="stack")
    _lay_out(figure, "Size of the frame")
    return figure.update_yaxes(**byte_ticks(max((frame.nbytes for frame in frames), default=0)))
