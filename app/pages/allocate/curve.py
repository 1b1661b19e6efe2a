"""Size against quality on one curve: estimated from fine to coarse, with what was measured, and the bound.

No Streamlit here. The point that is edited moves, so nothing is selected in this figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from inshrink_app.pages.allocate.figure import BEYOND, draw_bound
from inshrink_app.services import SearchPoint
from inshrink_app.theme import CATEGORICAL, GAP, MARK
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import lay_out, log_ticks, title

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates


_HEIGHT = 340
_LABEL_WIDTH = 50


def curve_figure(
    rates: Rates,
    predicted: Predicted,
    points: Sequence[SearchPoint],
    figure: str,
    limit: float | None,
    raw_nbytes: float,
    n_steps: int,
) -> go.Figure:
    """Draw the curve.

    Parameters
    ----------
    rates, predicted
        What levels do, and what the allocation that is edited does.
    points
        Trials and baselines; estimates among them are passed over, for the curve is made of them, and so are
        those of `given_up`, which tell neither the size nor the worst of all steps.
    figure
        ``drop``, in percent, or ``divergence``, in nats; both on a logarithmic axis.
    limit
        The bound; None for none.
    raw_nbytes
        Of the whole run: sizes are that over ratios.
    n_steps
        Of the run: what was measured on fewer of them is marked.
    """
    drawn = go.Figure()
    scale = 100.0 if figure == "drop" else 1.0
    x, y = _sized(rates.ratios_total, raw_nbytes), _positive(rates.course(figure) * scale)
    drawn.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name="All layers alike, estimated",
            line={"color": CATEGORICAL[0], "width": 2, "dash": "dot"},
            marker={"symbol": "diamond-open", "size": 8},
            customdata=[
                [f"{level:g}", fmt.ratio(ratio)]
                for level, ratio in zip(rates.levels, rates.ratios_total, strict=True)
            ],
            hovertemplate="coarseness %{customdata[0]}<br>%{customdata[1]} of everything"
            "<br>estimated %{y:.3~g}<extra></extra>",
        )
    )
    kinds: dict[tuple[str, str, str], list[SearchPoint]] = {}
    for point in points:
        if not point.is_estimated and point.whole and point.figure(figure) is not None:
            kinds.setdefault(_kind(point, n_steps), []).append(point)
    for kind, chosen in sorted(kinds.items()):
        drawn.add_trace(_measured(rates, chosen, figure, scale, raw_nbytes, kind))
    value = predicted.drop if figure == "drop" else predicted.divergence
    here = _positive(np.array([math.nan if value is None else value * scale]))
    at = _sized(np.array([predicted.ratio_total or math.nan]), raw_nbytes)
    is_beyond = value is not None and limit is not None and value > limit
    drawn.add_trace(
        go.Scatter(
            x=at,
            y=here,
            mode="markers",
            name="This allocation, beyond the bound" if is_beyond else "This allocation",
            marker={
                "symbol": "x" if is_beyond else "circle",
                "size": 15,
                "color": BEYOND if is_beyond else MARK,
                "line": {"width": 2, "color": "#FFFFFF"},
            },
            hovertemplate="this allocation, estimated %{y:.3~g}<extra></extra>",
        )
    )
    values = [one for trace in drawn.data for one in np.asarray(trace.y, float) if math.isfinite(one)]
    if limit is not None:
        values.append(limit * scale)
        draw_bound(drawn, limit * scale, figure, "right", beyond_to=3 * max(values))
    if values:
        drawn.update_yaxes(range=[math.log10(min(values)) - 0.15, math.log10(3 * max(values))])
    lay_out(drawn, _HEIGHT, legend=True)
    sizes = [one for trace in drawn.data for one in np.asarray(trace.x, float)]
    drawn.update_layout(hovermode="closest", dragmode="pan")
    drawn.update_xaxes(
        title=title("Size of all steps, logarithmic"),
        type="log",
        automargin=True,
        tickangle=0,
        nticks=6,
        **_thin(log_ticks(sizes, fmt.size), 6),
    )
    label = "Worst drop, %, logarithmic" if figure == "drop" else "Largest divergence, nats"
    drawn.update_yaxes(
        title=title(label), type="log", automargin=True, zerolinecolor=GAP, **log_ticks(values)
    )
    return drawn


def given_up(points: Sequence[SearchPoint]) -> list[SearchPoint]:
    """Return the trials that are not of their whole chain: no curve of all steps has a place for them."""
    return [point for point in points if not point.is_estimated and not point.whole]


def steps_text(points: Sequence[SearchPoint]) -> str:
    """Say on how many steps some points were measured."""
    few, many = min(one.n_steps for one in points), max(one.n_steps for one in points)
    return fmt.counted(many, "step") if few == many else f"{fmt.count(few)} to {fmt.counted(many, 'step')}"


def _kind(point: SearchPoint, n_steps: int) -> tuple[str, str, str]:
    """Return name, symbol and colour of what was measured; hollow where that was on some of the steps."""
    name, symbol, colour = (
        ("Baselines, measured", "square", CATEGORICAL[3])
        if point.baseline
        else ("Measured", "circle", CATEGORICAL[2])
    )
    if point.n_steps >= n_steps:
        return name, symbol, colour
    return f"{name} on {point.n_steps:,} of {n_steps:,} steps", f"{symbol}-open", colour


def _thin(ticks: dict[str, list[object]], most: int) -> dict[str, list[object]]:
    """Return at most so many of some ticks."""
    return {name: line[:: math.ceil(len(line) / most)] for name, line in ticks.items() if line}


def _sized(ratios: np.ndarray, raw_nbytes: float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ratios > 0, raw_nbytes / ratios, np.nan)


def _positive(values: np.ndarray) -> np.ndarray:
    """Return what a logarithmic axis can show; NaN for the rest."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _measured(
    rates: Rates,
    points: Sequence[SearchPoint],
    figure: str,
    scale: float,
    raw_nbytes: float,
    kind: tuple[str, str, str],
) -> go.Scatter:
    """Draw what was measured; the size of what is not weights is as the levels have it."""
    name, symbol, colour = kind
    ratios = np.array([rates.ratio_total_of(point.ratio) for point in points])
    values = np.array([scale * (point.figure(figure) or 0.0) for point in points])
    said = [
        [
            fmt.html(fmt.elided(point.label, _LABEL_WIDTH)),
            fmt.ratio(point.ratio),
            fmt.counted(point.n_steps, "step"),
            _worst(point, figure),
        ]
        for point in points
    ]
    return go.Scatter(
        x=_sized(ratios, raw_nbytes),
        y=_positive(values),
        mode="markers",
        name=name,
        marker={"symbol": symbol, "size": 10, "color": colour},
        customdata=said,
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} of the weights, measured on %{customdata[2]}"
        "<br>%{customdata[3]}<extra></extra>",
    )


def _worst(point: SearchPoint, figure: str) -> str:
    value = point.figure(figure)
    return fmt.percent(value) if figure == "drop" else f"{'–' if value is None else fmt.value(value)} nats"
