"""Common parts of figures: layout, axes, ticks, and curves. No Streamlit here.

A figure is a function of its data only, never of a selection. Text and background follow Streamlit's theme,
so one figure serves light and dark mode. Its colours come from `theme`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from numpy.typing import NDArray

from inshrink_core.analysis.thinning import thinned

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

_MOST_TICKS = 8
_LARGEST_POWER = 307
"""Largest power of ten that a float represents with all digits, in both directions."""


def lay_out(figure: go.Figure, height: float, *, legend: bool = False, titles: bool = False) -> None:
    """Give a figure its height and its margins, with room above for the buttons.

    Parameters
    ----------
    figure
        Changed in place.
    height
        Pixels, without the lines above the axes.
    legend, titles
        Whether to reserve a line above the axes for legends, or for titles of panels.
    """
    above = TOOLBAR + (_LEGEND if legend or titles else 0)
    figure.update_layout(
        height=height + above, margin={"l": 8, "r": 8, "t": above, "b": 8}, showlegend=legend
    )
    if legend:
        figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0})
    if titles:
        figure.update_annotations(font={"size": 13})


def title(text: str) -> dict[str, Any]:
    """Return the title of an axis, at a distance from its labels."""
    return {"text": text, "standoff": _STANDOFF}


def few_ticks(values: Sequence[str], texts: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Label every k-th position, so that labels never overlap, and always the last one.

    Examples
    --------
    >>> few_ticks("abcdefg", "ABCDEFG", 4)["ticktext"], few_ticks("abcdef", "ABCDEF", 4)["ticktext"]
    (['A', 'C', 'E', 'G'], ['A', 'C', 'F'])
    """
    stride = max(1, math.ceil(len(values) / limit))
    places = list(range(0, len(values), stride))
    if places and places[-1] != len(values) - 1:
        places[-1 if len(places) > 1 else len(places) :] = [len(values) - 1]
    return {"tickvals": [values[i] for i in places], "ticktext": [texts[i] for i in places]}


def steps_axis(n_ticks: int) -> dict[str, Any]:
    """Return an axis of steps: whole numbers with thousands separators, never rotated."""
    return {
        "title": title("Step"),
        "tickformat": ",d",
        "nticks": n_ticks,
        "tickangle": 0,
        "automargin": True,
    }


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


def colour_bar(
    text: str, ticks: Mapping[str, Sequence[object]], *, side: str = "top", **more: object
) -> dict[str, Any]:
    """Return the scale beside a heatmap."""
    # The distance is in pixels; one in widths would need a margin that depends on the screen.
    place = {"x": 1, "xpad": 12, "thickness": 12, "outlinewidth": 0}
    return {"title": {"text": fmt.html(text), "side": side}, **place, **ticks, **more}


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
            return values[:: math.ceil(len(values) / _MOST_TICKS)] if mantissas == (1,) else values
    return _round_values(low, high)


def _texts(values: Sequence[float], text: Callable[[float, int], str]) -> list[str]:
    """Format values with three digits, or as many as make them distinct."""
    for digits in range(3, 15):
        texts = [text(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def byte_ticks(largest: float) -> dict[str, list[object]]:
    """Return about four round ticks of an axis of bytes, formatted as sizes."""
    ticks = _round_values(0, 1.1 * max(1.0, largest), 4)
    return {"tickvals": [*ticks], "ticktext": [fmt.size(tick) for tick in ticks]}


def count_ticks(largest: float, *, log: bool) -> dict[str, list[object]]:
    """Return about five ticks of an axis of counts: distinct whole numbers.

    Examples
    --------
    >>> count_ticks(2, log=False)["ticktext"], count_ticks(1500, log=True)["ticktext"]
    (['0', '1', '2'], ['1', '10', '100', '1,000'])
    """
    if log:
        ticks = [10.0**power for power in range(math.floor(math.log10(max(1.0, largest))) + 1)]
    else:
        ticks = [tick for tick in _round_values(0, max(1.0, largest)) if float(tick).is_integer()]
    return {"tickvals": [*ticks], "ticktext": [fmt.count(tick) for tick in ticks]}


def linear_scale_ticks(low: float, high: float) -> dict[str, list[object]]:
    """Return about five round ticks between two values."""
    ticks = _round_values(low, high)
    return {"tickvals": [*ticks], "ticktext": [*_texts(ticks, fmt.tick)]}


def log_scale_ticks(low: float, high: float) -> dict[str, list[object]]:
    """Return ticks between two decimal logarithms, positioned at logarithms."""
    ends = [10.0 ** max(-_LARGEST_POWER, min(_LARGEST_POWER, end)) for end in (low, high)]
    values = _log_values(*ends)
    return {
        "tickvals": [min(high, max(low, math.log10(value))) for value in values],
        "ticktext": [*_texts(values, fmt.tick)],
    }


def log_ticks(values: Iterable[float], text: Callable[[float], str] | None = None) -> dict[str, list[object]]:
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
    low, high = min(finite), max(finite)
    first, last = (max(-_LARGEST_POWER, min(_LARGEST_POWER, math.log10(end))) for end in (low, high))
    beyond = min(1.0, max(0.02, 0.05 * (last - first)))  # The axis extends a little beyond its values.
    powers = {10.0 ** math.floor(first), 10.0 ** math.ceil(last)} if last - first < _MOST_TICKS else set()
    ticks = sorted({*_log_values(10.0 ** (first - beyond), 10.0 ** (last + beyond)), *powers})
    return {"tickvals": [*ticks], "ticktext": [*(map(text, ticks) if text else _texts(ticks, fmt.tick))]}


CURVE_PARTS = 1_000
"""Number of parts of a long curve; each part shows its smallest and largest value."""

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
_PANEL_HEIGHT = 150
_NAME_WIDTH = 34


def smoothed(values: Sequence[float], weight: float) -> NDArray[np.float64]:
    """Return a bias-corrected exponential moving average; gaps stay gaps.

    Parameters
    ----------
    values
        In order.
    weight
        Weight of earlier values, in [0, 1).

    Examples
    --------
    >>> smoothed([1.0, 3.0], 0.5).round(2).tolist()
    [1.0, 2.33]
    """
    found = np.asarray(values, np.float64).copy()
    mean, share = 0.0, 0.0
    for place, value in enumerate(found.tolist()):
        if math.isfinite(value):
            mean, share = weight * mean + (1 - weight) * value, weight * share + 1 - weight
            found[place] = mean / share
    return found


def stack(figure: go.Figure, titles: Sequence[str], height: float) -> None:
    """Arrange panels below each other on one axis of steps, with a common cursor.

    Parameters
    ----------
    figure
        Its traces have the vertical axes ``y``, ``y2``, …, the topmost first.
    titles
        Title of each panel.
    height
        Pixels of a panel.
    """
    n, gap = len(titles), 0.3 / max(1, len(titles))
    for place in range(n):
        top = 1 - place * (1 + gap / n) / n
        axis = "yaxis" + (str(place + 1) if place else "")
        figure.update_layout({axis: {"domain": [max(0.0, top - (1 - gap) / n), top], "automargin": True}})
        heading = {"text": titles[place], "xref": "paper", "x": 0, "xanchor": "left", "showarrow": False}
        figure.add_annotation(**heading, yref="paper", y=top, yanchor="bottom", font={"size": 13})
    lay_out(figure, height * n + 34, titles=True)
    figure.update_layout(hovermode="x unified", hoversubplots="axis")
    last = "y" + (str(n) if n > 1 else "")
    figure.update_xaxes(**steps_axis(8), anchor=last, showspikes=True, spikethickness=1, spikecolor=GAP)


_OF_DATA: Final = re.compile(
    r"^(train(ing)?|val(id(ation)?)?|eval(uation)?|test|dev)[/_.-]|[/_.-](train|val(id)?|eval|test|dev)$"
)
"""Parts of a metric's name that name its data."""


def log_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Group metrics that differ only in their data, by their names without the part that names the data.

    Examples
    --------
    >>> log_groups(["loss", "eval_loss", "val/accuracy", "grad_norm"])
    {'loss': ['loss', 'eval_loss'], 'val/accuracy': ['val/accuracy'], 'grad_norm': ['grad_norm']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_OF_DATA.sub("", name) or name, []).append(name)
    return {group if len(same) > 1 else same[0]: same for group, same in groups.items()}


def log_figure(
    log: Mapping[str, Sequence[tuple[int, float]]],
    groups: Mapping[str, Sequence[str]],
    *,
    smoothing: float = 0.0,
    legends: bool = True,
) -> go.Figure:
    """Draw training metrics by step, one panel per group; titles serve as legends.

    Parameters
    ----------
    log
        Values by step of each metric; long curves are reduced to what is visible.
    groups
        The metrics of a panel, by its name.
    smoothing
        Weight of earlier values in a moving average; the logged values are faint behind it.
    legends
        Whether titles list the metrics of a panel; else they are its name.
    """
    figure, titles = go.Figure(), []
    for place, (group, members) in enumerate(groups.items()):
        titles.append(_legend(members) if legends else fmt.html(fmt.elided(group, _NAME_WIDTH)))
        for position, name in enumerate(members):
            steps, values = zip(*log[name], strict=True) if log[name] else ((), ())
            lines: list[tuple[Sequence[float], float]] = [(values, 0.3 if smoothing else 1.0)]
            if smoothing:
                lines.append((smoothed(values, smoothing).tolist(), 1.0))
            for line, opacity in lines:
                series = thinned(list(zip(steps, line, strict=True)), CURVE_PARTS)
                form = fmt.d3_format(value for _, value in series)
                figure.add_trace(
                    go.Scatter(
                        x=np.asarray([step for step, _ in series], dtype=np.int64),
                        y=np.asarray([value for _, value in series], dtype=np.float64),
                        yaxis=f"y{place + 1}" if place else "y",
                        name=fmt.html(name),
                        mode="lines+markers" if len(series) < 3 else "lines",
                        opacity=opacity,
                        line={
                            "color": CATEGORICAL[position % len(CATEGORICAL)],
                            "width": 2,
                            "dash": _DASHES[position % len(_DASHES)],
                        },
                        hoverinfo="skip" if opacity < 1 else None,
                        hovertemplate=None
                        if opacity < 1
                        else f"{fmt.html(name)} = %{{y:{form}}}<extra></extra>",
                    )
                )
    stack(figure, titles, _PANEL_HEIGHT)
    figure.update_xaxes(rangemode="tozero")
    for place, members in enumerate(groups.values()):
        known = [value for name in members for _, value in log[name] if math.isfinite(value)]
        if known:
            figure.update_yaxes(linear_scale_ticks(min(known), max(known)), selector=place)
    return figure


def _legend(members: Sequence[str]) -> str:
    """Return a panel's title: each metric's name after a sign in its colour and dash."""
    return "   ".join(
        f"<span style='color:{CATEGORICAL[i]}'><b>{_DASH_SIGNS[i]}</b></span> "
        f"{fmt.html(fmt.elided(name, _NAME_WIDTH))}"
        for i, name in enumerate(members[:_MAX_IN_TITLE])
    )
