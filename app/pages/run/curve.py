"""Size against error in one figure: the curve, the edited bits, measurements, and the bound.

No Streamlit here. The edited point moves, so the browser's own marks of a selection are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go
from inshrink_app.services import SearchPoint
from inshrink_app.theme import CATEGORICAL, GAP, MARK
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import lay_out, log_ticks, title

if TYPE_CHECKING:
    from inshrink_core.search.rates import Rates

_HEIGHT = 280
_LABEL_WIDTH, _NAME_WIDTH = 60, 16
_MOST_TICKS = 6
_BEYOND = CATEGORICAL[5]
"""Colour of bounds, and of points beyond them."""


AXES = {
    "restore_cost": "Restore cost, %",
    "drop": "Worst drop, %",
    "divergence": "Largest divergence, nats",
}


class Marks(NamedTuple):
    """Lines of the figure.

    Parameters
    ----------
    limit, limit_text
        The bound on the drawn figure, and its label; None for none.
    default_ratio, target_ratio
        Ratios of the weights: with default settings, and as the target of a search.
    """

    limit: float | None = None
    limit_text: str = ""
    default_ratio: float | None = None
    target_ratio: float | None = None


class Here(NamedTuple):
    """The edited point: its ratio of the weights, its figure, and whether that was measured."""

    ratio: float | None
    value: float | None
    is_measured: bool = False


_Marked = tuple[int, float | None, float | None, str]
"""A mark: the index of its point (reported by a click), its ratio and value, and its hover text."""


def allocation_figure(
    points: Sequence[SearchPoint],
    rates: Rates | None,
    here: Here,
    figure: str,
    marks: Marks,
    raw_nbytes: float,
    course: Sequence[float] = (),
) -> go.Figure:
    """Draw the figure.

    Parameters
    ----------
    points
        Trials, archives, published codecs and estimates, all of the same steps. Abandoned trials are omitted,
        since neither their size nor their worst step is known.
    rates
        Calibrated rates, which give the curve. If unknown, the curve passes through the estimates.
    here
        The large point.
    figure
        ``restore_cost`` or ``drop``, in percent, or ``divergence``, in nats; on a logarithmic axis. Values of
        zero or below appear at its lower edge.
    marks
        Lines.
    raw_nbytes
        Raw bytes of the weights of all steps; size = raw_nbytes / ratio.
    course
        The figure along the curve.
    """
    scale = 1.0 if figure == "divergence" else 100.0
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for place, point in enumerate(points):
        is_measured = point.is_complete and not point.is_estimated
        if is_measured and point.ratio > 0 and point.figure(figure) is not None:
            kinds.setdefault(_kind(point), []).append(place)
    ratios, values, places = _curve(points, rates, figure, course)
    measured = [points[place].figure(figure) for members in kinds.values() for place in members]
    candidates = [*values, *measured, here.value, marks.limit]
    positive = [scale * value for value in candidates if value is not None and 0 < value < math.inf] or [1e-3]
    floor = min(positive) / 2

    def at(value: float | None) -> float:
        known = value is not None and math.isfinite(value)
        return max(scale * (value or 0.0), floor) if known else math.nan

    drawn = go.Figure()

    def mark(name: str, marked: Sequence[_Marked], marker: dict[str, Any], **more: Any) -> None:
        drawn.add_trace(
            go.Scatter(
                x=[raw_nbytes / ratio if ratio else math.nan for _, ratio, _, _ in marked],
                y=[at(value) for _, _, value, _ in marked],
                name=name,
                marker=marker,
                customdata=[[place, text] for place, _, _, text in marked],
                hovertemplate="%{customdata[1]}<extra></extra>",
                **{"mode": "markers", **more},
            )
        )

    if len(ratios):
        curve = [
            (
                place,
                ratio,
                value,
                f"{fmt.ratio(ratio)} of the weights<br>estimated {fmt.value(scale * value)}",
            )
            for place, ratio, value in zip(places, ratios, values, strict=True)
        ]
        line = {"color": CATEGORICAL[0], "width": 2, "dash": "dot"}
        look = {"symbol": "diamond-open", "size": 8}
        mark("All layers alike, estimated", curve, look, mode="lines+markers", line=line)
    for (name, symbol, colour), members in sorted(kinds.items()):
        names = [fmt.elided(points[place].name.removesuffix(".inshrink"), _NAME_WIDTH) for place in members]
        mark(
            name,
            [
                (place, points[place].ratio, points[place].figure(figure), _hover(points[place]))
                for place in members
            ],
            {"symbol": symbol, "size": 10, "color": colour},
            mode="markers+text" if names[0] else "markers",
            text=list(map(fmt.html, names)),
            textposition="bottom center",
            textfont={"size": 11},
        )
    best = next((point for point in points if point.is_best and point.is_complete), None)
    if best is not None:
        star = {"symbol": "star-open", "size": 22, "color": _BEYOND, "line": {"width": 2}}
        mark("Best of the search", [(-1, best.ratio, best.figure(figure), "")], star, hoverinfo="skip")
    is_beyond = marks.limit is not None and here.value is not None and here.value > marks.limit
    look = {"symbol": "x", "color": _BEYOND} if is_beyond else {"symbol": "circle", "color": MARK}
    value = fmt.value(math.nan if here.value is None else scale * here.value)
    text = f"these bits, {'measured' if here.is_measured else 'estimated'} {value}"
    name = "These bits, beyond the bound" if is_beyond else "These bits"
    look |= {"size": 15, "line": {"width": 2, "color": "#FFFFFF"}}
    mark(name, [(-1, here.ratio, here.value, text)], look)
    if marks.limit is not None:
        drawn.add_hrect(scale * marks.limit, 9 * max(positive), fillcolor=_BEYOND, opacity=0.1, line_width=0)
        _line_at(drawn, "y", scale * marks.limit, marks.limit_text)
    for ratio, name in ((marks.default_ratio, "Default"), (marks.target_ratio, "Target")):
        if ratio:
            _line_at(drawn, "x", raw_nbytes / ratio, f"{name} {fmt.ratio(ratio)}")
    _lay_out(drawn, figure, (floor, max(positive)))
    return drawn


def _curve(
    points: Sequence[SearchPoint], rates: Rates | None, figure: str, course: Sequence[float]
) -> tuple[list[float], list[float], list[int]]:
    """Return the curve from fine to coarse: ratios, values, and the indices of the estimates on it."""
    estimates = [
        (place, point) for place, point in enumerate(points) if point.is_estimated and point.ratio > 0
    ]
    if rates is None:
        estimates.sort(key=lambda item: item[1].ratio)
        values = [point.figure(figure) or math.nan for _, point in estimates]
        return [point.ratio for _, point in estimates], values, [place for place, _ in estimates]
    of_level = {point.config.get("settings", {}).get(rates.settings[0]): place for place, point in estimates}
    levels = [of_level.get(float(level), -1) for level in rates.levels]
    return rates.ratios_weights.tolist(), list(course), levels


def _kind(point: SearchPoint) -> tuple[str, str, str]:
    """Return the name of a point's kind, its symbol and its colour."""
    if point.baseline:
        return "Published codecs, measured", "square", CATEGORICAL[3]
    if point.archive:
        return "Archives, measured", "hexagon2", CATEGORICAL[1]
    if point.keeps:
        return "Measured", "circle", CATEGORICAL[2]
    return "Measured, breaks the bound", "circle-x-open", CATEGORICAL[6]


def _hover(point: SearchPoint) -> str:
    """Return the hover text of a point."""
    nats = "–" if point.divergence is None else f"{fmt.value(point.divergence)} nats"
    names = filter(None, dict.fromkeys([point.name, point.label]))
    return "<br>".join(
        [
            *(fmt.html(fmt.elided(name, _LABEL_WIDTH)) for name in names),
            f"{fmt.ratio(point.ratio)} of the weights, measured on {fmt.counted(point.n_steps, 'step')}",
            f"worst drop {fmt.percent(point.drop)}",
            f"largest divergence {nats}",
            *([f"restore cost {fmt.percent(point.restore_cost)}"] if point.restore_cost is not None else []),
        ]
    )


def _line_at(drawn: go.Figure, axis: str, value: float, text: str) -> None:
    """Draw a line through the whole figure, with its name at the end.

    Plotly positions lines by value, but texts on a logarithmic axis by exponent.
    """
    other = "y" if axis == "x" else "x"
    drawn.add_shape(
        type="line",
        line={"color": _BEYOND if axis == "y" else GAP, "width": 1.5, "dash": "dash"},
        **{f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": value, f"{axis}1": value},
    )
    drawn.add_annotation(
        text=text,
        font={"size": 12, "color": _BEYOND if axis == "y" else None},
        showarrow=False,
        **{f"{other}ref": "paper", other: 1, axis: math.log10(value)},
        xanchor="right",
        yanchor="top" if axis == "x" else "bottom",
    )


def _lay_out(drawn: go.Figure, figure: str, ends: tuple[float, float]) -> None:
    lay_out(drawn, _HEIGHT, legend=True)
    drawn.update_layout(hovermode="closest", dragmode="pan", uirevision=figure)
    sizes = [nbytes for trace in drawn.data for nbytes in trace.x if math.isfinite(nbytes)]
    if sizes and max(sizes) < 2 * min(sizes):  # A single point gets an octave on either side.
        sizes = [min(sizes) / 2, *sizes, 2 * max(sizes)]
        drawn.update_xaxes(range=[math.log10(sizes[0]), math.log10(sizes[-1])])
    ticks = log_ticks(sizes, fmt.size)
    drawn.update_xaxes(
        title=title("Size of the weights of these steps"),
        type="log",
        automargin=True,
        tickangle=0,
        **{name: line[:: math.ceil(len(line) / _MOST_TICKS)] for name, line in ticks.items() if line},
    )
    low, high = (math.log10(min(max(end, 1e-300), 1e300)) for end in ends)
    drawn.update_yaxes(
        title=title(AXES[figure]),
        type="log",
        automargin=True,
        zerolinecolor=GAP,
        range=[low - 0.08 * (high - low + 1), high + 0.12 * (high - low + 1)],
        **log_ticks(list(ends)),
    )


def clicked_point(points: Sequence[object], n_points: int) -> int | None:
    """Return the index of the clicked point; None without one, or for invalid data from the browser.

    Examples
    --------
    >>> clicked_point([{"customdata": [2, "text"]}], 3), clicked_point([{"customdata": [9]}], 3)
    (2, None)
    """
    for point in points:
        data = point.get("customdata") if isinstance(point, dict) else None
        place = data[0] if isinstance(data, list | tuple) and data else None
        if isinstance(place, int) and 0 <= place < n_points:
            return place
    return None
