"""Original against restored: metric, drop, divergence and rehearsals as figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from inshrink_app.services import Bound
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import lay_out, log_ticks, steps_axis, title

from inshrink_core.verbs.shared.measured import Known

_NAME_WIDTH = 30
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
_HEIGHT = 220
_ROOM = 0.12
_LEFT_ALONE = CATEGORICAL[0]
_BOUND = CATEGORICAL[5]


def metric_figure(found: Sequence[Known], colours: Mapping[str, str]) -> go.Figure:
    """Draw the metric by step: as trained, and as restored from each archive."""
    figure = go.Figure()
    originals = {row.step: row for one in found for row in one.comparison.steps}
    rows = [originals[step] for step in sorted(originals)]
    known = {step: error for one in found for step, error in one.standard_errors.items()}
    errors = [known.get(row.step) for row in rows]
    metric = fmt.html(found[0].comparison.metric) if found else ""
    drawn = {row.step: row.original for row in rows}
    told = f"original, step %{{x:,}}<br>{metric} %{{y:.5g}}"
    original = _curve(drawn, "Original", told, {"color": GAP, "width": 3}, {"size": 7})
    if errors and None not in errors:
        original.error_y = {"type": "data", "array": errors, "thickness": 1, "width": 2}
    figure.add_trace(original)
    for one in found:
        restored = [row.restored for row in one.comparison.steps]
        figure.add_trace(_line(one, restored, colours, metric, ".5g"))
    _lay_out(figure, metric)
    return figure


def share_figure(
    found: Sequence[Known], figure_of: str, colours: Mapping[str, str], bound: float | None = None
) -> go.Figure:
    """Draw drop or restore cost by step in percent, its bound, and the previous checkpoint.

    The axis is that of the archives and the bound: a previous checkpoint that is far worse leaves it.

    Parameters
    ----------
    found
        The comparisons.
    figure_of
        ``drop`` or ``restore_cost``.
    colours
        Of each archive, by its path.
    bound
        What is allowed, as a fraction.
    """
    figure, what = go.Figure(), figure_of.replace("_", " ")
    stale = {
        row.step: 100 * value
        for one in found
        for row in one.comparison.steps
        if (value := getattr(row, f"stale_{figure_of}")) is not None
    }
    _stale(figure, stale, f"previous checkpoint, step %{{x:,}}<br>%{{y:{fmt.d3_format(stale.values())}}} %")
    drawn = [] if bound is None else [100 * bound]
    for one in found:
        known = [getattr(row, figure_of) for row in one.comparison.steps]
        values = [math.nan if value is None else 100 * value for value in known]
        figure.add_trace(_line(one, values, colours, what, fmt.d3_format(values), " %"))
        drawn += [value for value in values if math.isfinite(value)]
    if bound is not None:
        _bound(figure, 100 * bound, fmt.percent(bound))
    _lay_out(figure, f"{what.capitalize()}, %")
    least, most = min([0.0, *drawn]), max(drawn, default=0.0)
    if most > least and max(stale.values(), default=0.0) > most:
        room = _ROOM * (most - least)
        figure.update_yaxes(range=[least - room, most + room])
    return figure


def _bound(figure: go.Figure, y: float, text: str) -> None:
    """Draw a bound across a figure."""
    figure.add_hline(
        y=y,
        line={"color": _BOUND, "width": 1.5, "dash": "dash"},
        annotation={"text": f"Bound {text}", "font": {"size": 12}, "yshift": 2},
        annotation_position="top left",
    )


def size_figure(
    found: Sequence[Known], sizes: Mapping[str, int], colours: Mapping[str, str], kind: str, bound: Bound
) -> go.Figure:
    """Draw the largest restore cost, drop or divergence of each archive against its size."""
    figure, what = go.Figure(), kind.replace("_", " ")
    scale, unit = (1, " nats") if kind == "divergence" else (100, " %")
    for one in found:
        value = getattr(one.comparison, f"max_{kind}")
        if value is not None and one.archive in sizes:
            mark = _line(one, [scale * value], colours, what, fmt.d3_format([scale * value]), unit)
            name = fmt.html(fmt.elided(one.name, _NAME_WIDTH))
            told = f"{name}<br>%{{x:.4s}}B, {what} %{{y:.3g}}{unit}<extra></extra>"
            mark.update(x=[sizes[one.archive]], hovertemplate=told, mode="markers")
            figure.add_trace(mark.update(marker={"size": 12}))
    if bound.kind == kind:
        _bound(figure, scale * bound.value, bound.text.rpartition("≤ ")[2])
    _lay_out(figure, f"Largest {what},{unit}")
    return figure.update_xaxes(title=title("Size of the archive, bytes"), tickformat="~s", rangemode="tozero")


def divergence_figure(
    found: Sequence[Known], colours: Mapping[str, str], bound: float | None = None
) -> go.Figure:
    """Draw the divergence of the predictions by step, on a logarithmic axis; zero is not on it."""
    figure = go.Figure()
    rows = [row for one in found for row in one.comparison.steps]
    stale = {row.step: row.stale_divergence for row in rows if row.stale_divergence}
    _stale(
        figure, stale, f"previous checkpoint, step %{{x:,}}<br>%{{y:{fmt.d3_format(stale.values())}}} nats"
    )
    for one in found:
        values = [row.divergence or math.nan for row in one.comparison.steps]
        figure.add_trace(_line(one, values, colours, "divergence", fmt.d3_format(values), " nats"))
    if bound:
        figure.add_hline(y=bound, line={"color": _BOUND, "width": 1.5, "dash": "dash"})
    _lay_out(figure, "Divergence, nats")
    drawn = [row.divergence or 0.0 for row in rows]
    figure.update_yaxes(type="log", **log_ticks([*drawn, *stale.values()]))
    return figure


def _line(
    one: Known, values: Sequence[float], colours: Mapping[str, str], what: str, form: str, unit: str = ""
) -> go.Scatter:
    """Draw one archive, told apart by colour, mark and name."""
    name = fmt.html(fmt.elided(one.name, _NAME_WIDTH))
    line = {"color": colours.get(one.archive, CATEGORICAL[1]), "width": 2}
    place = list(colours).index(one.archive) if one.archive in colours else 0
    marker = {"size": 7, "symbol": _SYMBOLS[place % len(_SYMBOLS)]}
    told = f"{name}, step %{{x:,}}<br>{what} %{{y:{form}}}{unit}"
    steps = [row.step for row in one.comparison.steps]
    return _curve(dict(zip(steps, values, strict=False)), name, told, line, marker)


def _curve(
    values: Mapping[int, float],
    name: str,
    told: str,
    line: Mapping[str, Any],
    marker: Mapping[str, Any] | None = None,
) -> go.Scatter:
    """Draw values by step; `told` is what a hover says."""
    return go.Scatter(
        x=list(values),
        y=np.asarray(list(values.values()), dtype=np.float64),
        name=name,
        mode="lines+markers" if marker else "lines",
        line=line,
        marker=marker,
        hovertemplate=f"{told}<extra></extra>",
    )


def _stale(figure: go.Figure, values: dict[int, float], hover: str) -> None:
    """Draw what no archive at all would have reached: the checkpoint before in this one's place."""
    if values:
        line = {"color": GAP, "width": 1.5, "dash": "dash"}
        figure.add_trace(_curve(dict(sorted(values.items())), "Previous checkpoint", hover, line))


def _lay_out(figure: go.Figure, y: str, height: int = _HEIGHT) -> None:
    lay_out(figure, height, legend=sum(trace.showlegend is not False for trace in figure.data) > 1)
    figure.update_xaxes(**steps_axis(8))
    figure.update_yaxes(title=title(y), automargin=True, nticks=6)


def rehearsal_figure(found: Mapping[str, Any]) -> go.Figure:
    """Draw trainings with failures against the range of those without: the noise of the seeds."""
    figure = go.Figure()
    curves = found["curves"]
    steps = list(curves[0]["steps"]) if curves else []
    calm = np.asarray([curve["uninterrupted"] for curve in curves], dtype=np.float64)
    failed = np.asarray([curve["restored"] for curve in curves], dtype=np.float64)
    metric = fmt.html(str(found["metric"]))
    if calm.size:
        band = {"x": steps, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        if len(curves) > 1:
            figure.add_trace(go.Scatter(y=calm.max(axis=0), showlegend=False, **band))
            figure.add_trace(
                go.Scatter(
                    y=calm.min(axis=0),
                    fill="tonexty",
                    fillcolor="rgba(0, 114, 178, 0.22)",
                    name=f"Range of {len(curves)} seeds, uninterrupted",
                    **band,
                )
            )
        for values, name, colour, dash in (
            (calm, "Uninterrupted, mean", _LEFT_ALONE, "solid"),
            (failed, "Restored after failures, mean", _BOUND, "dash"),
        ):
            told = f"{name}, step %{{x:,}}<br>{metric} %{{y:.5g}}"
            line = {"color": colour, "width": 2, "dash": dash}
            mean = dict(zip(steps, values.mean(axis=0), strict=True))
            figure.add_trace(_curve(mean, name, told, line, {"size": 6}))
    for step in found["restored_at"]:
        figure.add_vline(x=step, line={"color": GAP, "width": 1, "dash": "dot"})
    _lay_out(figure, metric, 310)
    if calm.size and min(calm.min(), failed.min()) > 0 and calm.max() / calm.min() > 20:
        figure.update_yaxes(type="log", **log_ticks([*calm.ravel(), *failed.ravel()]))
    return figure
