"""Tables to Plotly figures. No Streamlit here, and no colours of its own but the maps of `theme`.

A figure is a function of its data alone, never of what is selected in it, and leaves text and background
to Streamlit's theme, so that one figure serves light and dark. The heatmap has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets.formatting import (
    bytes_text,
    count_text,
    elide,
    html_text,
    power_text,
    ratio_text,
    share_text,
)
from inshrink_app.widgets.tables import FrameRow
from plotly.subplots import make_subplots

__all__ = [
    "CONFIG",
    "byte_ticks",
    "frames_figure",
    "log_figure",
    "log_groups",
    "log_ticks",
    "sizes_figure",
    "steps_axis",
    "thinned",
    "tick_text",
    "title",
]

CONFIG: Mapping[str, object] = {
    "displaylogo": False,
    "scrollZoom": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
"""Plotly's own buttons: no logo, no wheel that takes the page's scrolling away."""

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
_NAME_WIDTH = 34
_MAX_FRAME_LABELS = 13


def thinned(values: Sequence[str], texts: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Label every k-th position, so that labels never overlap."""
    stride = max(1, math.ceil(len(values) / limit))
    return {"tickvals": list(values[::stride]), "ticktext": list(texts[::stride])}


def sizes_figure(sizes: Mapping[str, int], colour: int = 0) -> go.Figure:
    """Draw bytes by kind as bars, largest first, each with its size written out."""
    # Reversed first, so that of equal sizes the one that comes first in the file stands on top.
    ordered = sorted(reversed(list(sizes.items())), key=lambda item: item[1])
    total = sum(sizes.values()) or 1
    labels = [html_text(name) for name, _ in ordered]
    figure = go.Figure(
        go.Bar(
            x=[size for _, size in ordered],
            y=labels,
            orientation="h",
            marker_color=CATEGORICAL[colour],
            text=[f"{bytes_text(size)} · {share_text(size / total)}" for _, size in ordered],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(
        height=34 * max(2, len(ordered)) + 16, margin={"l": 8, "r": 8, "t": 4, "b": 4}, bargap=0.35
    )
    largest = max(sizes.values(), default=1) or 1
    # Room for the text beside the longest bar, which lies outside of it.
    figure.update_xaxes(visible=False, range=[0, largest * 1.6], fixedrange=True)
    figure.update_yaxes(showgrid=False, automargin=True, fixedrange=True, ticklabelstandoff=4)
    return figure


def log_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Group training metrics that share a scale by the last word of their names.

    Examples
    --------
    >>> log_groups(["loss", "eval_loss", "lr", "val/accuracy"])
    {'loss': ['loss', 'eval_loss'], 'lr': ['lr'], 'accuracy': ['val/accuracy']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        last = name.replace("/", "_").replace(".", "_").replace("-", "_").rsplit("_", 1)[-1]
        groups.setdefault(last or name, []).append(name)
    return groups


def log_figure(log: Mapping[str, Sequence[tuple[int, float]]], groups: Mapping[str, list[str]]) -> go.Figure:
    """Draw training metrics by step, one panel per group, side by side; titles serve as legends."""
    figure = make_subplots(
        rows=1,
        cols=max(1, len(groups)),
        subplot_titles=[_legend(members) for members in groups.values()],
        horizontal_spacing=0.075,
    )
    for column, members in enumerate(groups.values(), start=1):
        for position, name in enumerate(members):
            series = log[name]
            figure.add_trace(
                go.Scatter(
                    x=np.asarray([step for step, _ in series], dtype=np.int64),
                    y=np.asarray([value for _, value in series], dtype=np.float64),
                    name=html_text(name),
                    mode="lines+markers" if len(series) < 3 else "lines",
                    line={
                        "color": CATEGORICAL[position % len(CATEGORICAL)],
                        "width": 2,
                        "dash": _DASHES[position % len(_DASHES)],
                    },
                    hovertemplate=f"{html_text(name)} = %{{y:.4~g}}<br>step %{{x:,}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
    figure.update_layout(height=250, margin={"l": 8, "r": 8, "t": 34, "b": 8}, showlegend=False)
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(rangemode="tozero", **steps_axis(5))
    figure.update_yaxes(automargin=True, nticks=6)
    return figure


def _legend(members: Sequence[str]) -> str:
    """Return a panel's title: each metric's name behind a sign in its colour and its dash."""
    return "   ".join(
        f"<span style='color:{CATEGORICAL[i]}'><b>{_DASH_SIGNS[i]}</b></span> "
        f"{html_text(elide(name, _NAME_WIDTH))}"
        for i, name in enumerate(members[:_MAX_IN_TITLE])
    )


def frames_figure(frames: Sequence[FrameRow]) -> go.Figure:
    """Draw the bytes of each frame of an archive, keyframes apart from delta frames."""
    figure = go.Figure()
    for position, (kind, label) in enumerate((("keyframe", "Keyframe"), ("delta", "Delta frame"))):
        rows = [row for row in frames if (row.kind == "keyframe") == (kind == "keyframe")]
        figure.add_trace(
            go.Bar(
                x=[count_text(row.step) for row in rows],
                y=np.asarray([row.nbytes for row in rows], dtype=np.float64),
                name=label,
                marker_color=CATEGORICAL[position],
                customdata=[
                    [
                        bytes_text(row.nbytes),
                        ratio_text(row.ratio_total),
                    ]
                    for row in rows
                ],
                hovertemplate=(
                    f"{label} of step %{{x}}<br>%{{customdata[0]}}, %{{customdata[1]}} in all<extra></extra>"
                ),
            )
        )
    labels = [count_text(row.step) for row in frames]
    figure.update_layout(
        height=280,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        bargap=0.15,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
    )
    figure.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickangle=0,
        title=title("Step"),
        **thinned(labels, labels, _MAX_FRAME_LABELS),
    )
    figure.update_yaxes(
        rangemode="tozero", automargin=True, **byte_ticks(max((r.nbytes for r in frames), default=1))
    )
    return figure


def byte_ticks(largest: int) -> dict[str, list[object]]:
    """Return about four round ticks of an axis of bytes, written as sizes."""
    rough = max(1.0, largest / 4)
    decade = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * decade for m in (1, 2, 5, 10) if m * decade >= rough)
    ticks = [i * stride for i in range(int(largest / stride) + 2)]
    return {"tickvals": list(ticks), "ticktext": [bytes_text(tick) for tick in ticks]}


_STANDOFF = 10
"""Pixels between the labels of an axis and its title."""

_FEW_DECADES = 2.5
_MOST_DECADES = 7
_SMALLEST_IN_FULL, _LARGEST_IN_FULL = 1e-3, 1e4


def title(text: str) -> dict[str, Any]:
    """Return the title of an axis, clear of its labels."""
    return {"text": text, "standoff": _STANDOFF}


def steps_axis(n_ticks: int) -> dict[str, Any]:
    """Return an axis of steps: whole numbers, thousands apart, never turned."""
    return {
        "title": title("Step"),
        "tickformat": ",d",
        "nticks": n_ticks,
        "tickangle": 0,
        "automargin": True,
    }


def tick_text(value: float) -> str:
    """Return a round positive value as the label of a tick.

    Examples
    --------
    >>> tick_text(0.003), tick_text(0.001), tick_text(2), tick_text(1e5)
    ('3·10⁻³', '10⁻³', '2', '10⁵')
    """
    if 1 <= value <= 10:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = f"{value / 10.0**exponent:.3g}"
    return power_text(exponent) if mantissa == "1" else f"{mantissa}·{power_text(exponent)}"


def log_ticks(values: Iterable[float], text: Callable[[float], str] | None = None) -> dict[str, list[object]]:
    """Return ticks of a logarithmic axis: within a few decades more than powers of ten, all written out.

    Parameters
    ----------
    values
        What is drawn; those that a logarithmic axis cannot show do not count.
    text
        How a tick is labelled; by default in full where that takes few zeros, else by powers of ten.

    Returns
    -------
    dict
        For `update_xaxes` or `update_yaxes`; empty where nothing can be drawn.
    """
    finite = [value for value in values if 0 < value < math.inf]
    if not finite:
        return {}
    first, last = math.floor(math.log10(min(finite))) - 1, math.ceil(math.log10(max(finite))) + 1
    decades = math.log10(max(finite) / min(finite))
    mantissas = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < _FEW_DECADES else (1,)
    stride = max(1, math.ceil(decades / _MOST_DECADES))
    exponents = range(first, last, stride)
    ticks = [round(m * 10.0**exponent, 12 - exponent) for exponent in exponents for m in mantissas]
    if text is None:
        in_full = min(finite) >= _SMALLEST_IN_FULL and max(finite) < _LARGEST_IN_FULL
        text = "{:g}".format if in_full else tick_text
    return {"tickvals": list(ticks), "ticktext": [text(tick) for tick in ticks]}
