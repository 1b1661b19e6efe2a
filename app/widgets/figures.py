"""Common parts of figures: layout, axes, ticks, and curves. No Streamlit here.

A figure is a function of its data only, never of a selection. Text and background follow Streamlit's theme,
so one figure serves light and dark mode. Its colours come from `theme`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from inshrink_core.text import spread

CONFIG: Mapping[str, object] = {
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Plotly's buttons, without logo; the wheel scrolls the page instead of zooming."""

TOOLBAR = 28
"""Pixels above a figure for Plotly's buttons, which touch screens always show."""

_LEGEND = 26
"""Pixels of a line of legends or titles above the axes."""

_STANDOFF = 10
"""Pixels between the labels of an axis and its title."""

MAX_APART = 60
"""With more columns, rows or points, nothing separates them."""

_MAX_TICKS = 8
_LARGEST_POWER = 307
"""Largest power of ten that a float represents with all digits, in both directions."""


def lay_out(figure: go.Figure, height: float, *, legend: int = 0, titles: bool = False) -> None:
    """Give a figure its height and its margins, with room above for the buttons.

    Parameters
    ----------
    figure
        Changed in place.
    height
        Pixels, without the lines above the axes.
    legend
        Number of names on each line of the legend above the axes; 0 for no legend.
    titles
        Whether to reserve a line above the axes for titles of panels.
    """
    above = TOOLBAR + _LEGEND * (math.ceil(n_named(figure) / legend) if legend else titles)
    figure.update_layout(height=height + above, margin={"l": 8, "r": 8, "t": above, "b": 8})
    figure.update_layout(showlegend=legend > 0)
    if legend:
        figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0})
    if titles:
        figure.update_annotations(font={"size": 13})


def n_named(figure: go.Figure) -> int:
    """Return the number of names in the legend of a figure."""
    return sum(trace.showlegend is not False for trace in figure.data)


def title(text: str) -> dict[str, Any]:
    """Return the title of an axis, at a distance from its labels."""
    return {"text": text, "standoff": _STANDOFF}


def few_ticks(values: Sequence[float], texts: Sequence[str], most: int) -> dict[str, list[Any]]:
    """Label evenly spread positions, the first and the last among them, so that labels never overlap."""
    places = spread(range(len(values)), most)
    return {"tickvals": [values[i] for i in places], "ticktext": [texts[i] for i in places]}


def steps_axis(n_ticks: int) -> dict[str, Any]:
    """Return an axis of steps: whole numbers with thousands separators, never rotated."""
    return {"title": title("Step"), "tickformat": ",d", "nticks": n_ticks, "tickangle": 0, "automargin": True}


def gaps(values: NDArray[Any], columns: Sequence[str], rows: Sequence[str], hover: str) -> go.Heatmap:
    """Draw grey for missing values of a heatmap, with a hover text."""
    present = np.isfinite(values)
    if present.all():
        return go.Heatmap(visible=False)
    return go.Heatmap(
        z=np.where(present, np.float32("nan"), np.float32(0)),
        x=columns,
        y=rows,
        colorscale=[[0, GAP], [1, GAP]],
        opacity=0.35,
        showscale=False,
        hoverongaps=False,
        hovertemplate=hover,
    )


def _round_values(low: float, high: float, most: int = 5) -> list[float]:
    """Return about `most` multiples of 1, 2 or 5 times a power of ten between two values."""
    rough = max((high - low) / most, 1e-9 * max(abs(low), abs(high)), 10.0**-_LARGEST_POWER)
    decade = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * decade for m in (1, 2, 5, 10, 20) if m * decade >= rough)
    return [k * stride for k in range(math.ceil(low / stride), math.floor(high / stride) + 1)]


def _log_values(low: float, high: float) -> list[float]:
    """Return round values between two positive ones: powers of ten, or more if those are few."""
    first = max(-_LARGEST_POWER, math.floor(math.log10(low)))
    powers = range(first, min(_LARGEST_POWER, math.ceil(math.log10(high))) + 1)
    for mantissas in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        values = [round(m * 10.0**power, 12 - power) for power in powers for m in mantissas]
        values = [value for value in values if low <= value <= high]
        if len(values) > 2:
            return values[:: math.ceil(len(values) / _MAX_TICKS)] if mantissas == (1,) else values
    return _round_values(low, high)


def _labelled(values: Sequence[float], text: Callable[[float], str] | None = None) -> dict[str, list[Any]]:
    """Return ticks with their texts: by default three digits, or as many as make them distinct."""
    for digits in range(3, 15):
        texts = [text(value) if text else fmt.tick(value, digits) for value in values]
        if text or len(set(texts)) == len(texts):
            break
    return {"tickvals": [*values], "ticktext": texts}


def byte_ticks(largest: float) -> dict[str, list[Any]]:
    """Return about four round ticks of an axis of bytes, formatted as sizes."""
    return _labelled(_round_values(0, 1.1 * max(1.0, largest), 4), fmt.size)


def count_ticks(largest: float) -> dict[str, list[Any]]:
    """Return about five ticks of an axis of counts: distinct whole numbers.

    Examples
    --------
    >>> count_ticks(2)["ticktext"], count_ticks(1500)["ticktext"]
    (['0', '1', '2'], ['0', '500', '1,000', '1,500'])
    """
    return _labelled([tick for tick in _round_values(0, max(1.0, largest)) if tick.is_integer()], fmt.count)


def linear_ticks(low: float, high: float) -> dict[str, list[Any]]:
    """Return about five round ticks between two values."""
    return _labelled(_round_values(low, high))


def log_scale_ticks(low: float, high: float) -> dict[str, list[Any]]:
    """Return ticks between two decimal logarithms, positioned at logarithms."""
    ends = (10.0 ** max(-_LARGEST_POWER, min(_LARGEST_POWER, end)) for end in (low, high))
    ticks = _labelled(_log_values(*ends))
    return ticks | {"tickvals": [min(high, max(low, math.log10(tick))) for tick in ticks["tickvals"]]}


def log_ticks(values: Iterable[float], text: Callable[[float], str] | None = None) -> dict[str, list[Any]]:
    """Return ticks of a logarithmic axis: powers of ten, or more within a few decades.

    Parameters
    ----------
    values
        The drawn values; those that a logarithmic axis cannot show are ignored.
    text
        Formats a tick; by default as `fmt.tick`.

    Returns
    -------
    dict
        For `update_xaxes` or `update_yaxes`; empty without values.
    """
    finite = [float(value) for value in values if 0 < value < math.inf]
    if not finite:
        return {}
    ends = math.log10(min(finite)), math.log10(max(finite))
    first, last = (max(-_LARGEST_POWER, min(_LARGEST_POWER, end)) for end in ends)
    beyond = min(1.0, max(0.02, 0.05 * (last - first)))  # The axis extends a little beyond its values.
    powers = {10.0 ** math.floor(first), 10.0 ** math.ceil(last)} if last - first < _MAX_TICKS else set()
    inner = _log_values(10.0 ** (first - beyond), 10.0 ** (last + beyond))
    return _labelled(sorted({*inner, *powers}), text)


def curve(
    steps: Sequence[float] | NDArray[Any],
    values: Iterable[float],
    name: str,
    hover: str,
    colour: str,
    *,
    dash: str = "solid",
    width: float = 2,
    **more: Any,
) -> go.Scatter:
    """Draw a line over steps, with a mark at each of a few; `more` overrides."""
    line = {"color": colour, "width": width, "dash": dash}
    look = {"mode": "lines+markers" if len(steps) <= MAX_APART else "lines", "marker": {"size": 4}}
    y = np.fromiter(values, np.float64)
    return go.Scatter(
        x=steps, y=y, name=name, line=line, hovertemplate=f"{hover}<extra></extra>", **look | more
    )


CURVE_PARTS = 1_000
"""Number of parts of a long curve; each part shows its smallest and largest value."""

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
_OF_VALIDATION = {"eval", "val", "valid", "validation", "test", "dev"}
_OF_AVERAGE = {"ema", "swa", "avg", "average", "averaged"}
"""Words in the name of a metric."""

_PANEL_HEIGHT = 150
_NAME_WIDTH = 34


def log_figure(
    log: Mapping[str, Sequence[tuple[int, float]]], groups: Mapping[str, Sequence[str]]
) -> go.Figure:
    """Draw training metrics by step, panels below each other with a common axis.

    The title of a panel of several metrics is their legend.

    Parameters
    ----------
    log
        Values by step of each metric; long curves are reduced to what is visible.
    groups
        The metrics of a panel, by its name.
    """
    titles = [
        _legend(members) if len(members) > 1 else fmt.html(fmt.clipped(group, _NAME_WIDTH))
        for group, members in groups.items()
    ]
    n = max(1, len(titles))
    figure = make_subplots(n, 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.3 / n**1.5)
    for row, members in enumerate(groups.values(), 1):
        for place, name in enumerate(members):
            series = thinned(list(log[name]), CURVE_PARTS)
            values = [value for _, value in series]
            hover = f"{fmt.html(name)} = %{{y:{fmt.d3_format(values)}}}"
            colour, dash = CATEGORICAL[place % len(CATEGORICAL)], _DASHES[place % len(_DASHES)]
            line = curve([step for step, _ in series], values, fmt.html(name), hover, colour, dash=dash)
            figure.add_trace(line, row, 1)
    lay_out(figure, _PANEL_HEIGHT * n + 34, titles=True)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(**steps_axis(8), showspikes=True, spikethickness=1, spikecolor=GAP)
    figure.update_xaxes(title=None, selector=lambda axis: axis.showticklabels is False)
    return figure.update_yaxes(automargin=True, nticks=5)


def main_curve(log: Mapping[str, Sequence[object]]) -> str | None:
    """Return the name of the logged loss that matters most: of validation, and of the model itself.

    Examples
    --------
    >>> main_curve({"ema_loss": [0], "train_loss": [0], "val_loss": [0]}), main_curve({"lr": [0]})
    ('val_loss', None)
    """

    def rank(name: str) -> tuple[bool, bool, int]:
        words = set(re.split("[^a-z]+", name.casefold()))
        return bool(words & _OF_AVERAGE), not words & _OF_VALIDATION, len(name)

    losses = (name for name, series in log.items() if series and "loss" in name.casefold())
    return min(losses, key=rank, default=None)


def _legend(members: Sequence[str]) -> str:
    """Return a panel's title: each metric's name after a sign in its colour and dash."""
    return "   ".join(
        f"<span style='color:{CATEGORICAL[i]}'><b>{_DASH_SIGNS[i]}</b></span> "
        f"{fmt.html(fmt.clipped(name, _NAME_WIDTH))}"
        for i, name in enumerate(members[:_MAX_IN_TITLE])
    )


def thinned(series: Sequence[tuple[float, float]], n_parts: int) -> list[tuple[float, float]]:
    """Return a curve with only the smallest and the largest value of each part.

    Parameters
    ----------
    series
        Pairs of a step and a value, by ascending step.
    n_parts
        Number of parts of equal width, at least 1.

    Returns
    -------
    list
        `series` itself if it has at most two values per part. Otherwise the extremes of each part, its first
        value that is not finite, so that gaps stay visible, and the first and the last value of all.

    Notes
    -----
    O(n).

    Examples
    --------
    >>> thinned([(0, 1.0), (1, 9.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.5)], 1)
    [(0, 1.0), (1, 9.0), (5, 2.5)]
    """
    if len(series) <= 2 * n_parts:
        return list(series)
    steps, values = np.array(series, np.float64).T
    edges = np.searchsorted(steps, np.linspace(steps[0], steps[-1], n_parts + 1)[1:-1])
    places = {0, len(series) - 1}
    for begin, end in itertools.pairwise([0, *edges.tolist(), len(series)]):
        part = values[begin:end]
        finite = np.flatnonzero(np.isfinite(part))
        if finite.size:
            places |= {begin + int(finite[pick(part[finite])]) for pick in (np.argmin, np.argmax)}
        if finite.size < part.size:
            places.add(begin + int(np.argmin(np.isfinite(part))))
    return [series[place] for place in sorted(places)]
