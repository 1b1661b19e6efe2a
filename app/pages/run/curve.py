"""Size against error in one figure: the curve, the edited bits, measurements, and the bound.

No Streamlit here. The edited point moves, so the browser's own marks of a selection are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import plotly.graph_objects as go
from inshrink_app.services import SearchPoint
from inshrink_app.theme import CATEGORICAL, GAP, MARK
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import lay_out, log_ticks, title
from inshrink_app.widgets.quality import COSTS

_HEIGHT = 210
_LABEL_WIDTH, _NAME_WIDTH = 60, 16
_MAX_TICKS = 6
_BEYOND = CATEGORICAL[5]
"""Colour of bounds, and of points beyond them."""

_KINDS = {
    "estimate": ("All layers alike, estimated", "diamond-open", CATEGORICAL[0]),
    "codec": ("Published codecs, measured", "square", CATEGORICAL[3]),
    "trial": ("Measured", "circle", CATEGORICAL[2]),
    "broken": ("Measured, breaks the bound", "circle-x-open", CATEGORICAL[6]),
}
"""Name, symbol and colour of each kind of point; archives have colours of their own."""

_Mark = Callable[..., None]
"""Draws marks, given their name, the marks, and the look of a marker."""

_Here = tuple[float | None, float | None]
"""The ratio of the weights of a configuration, and its figure; None if unknown."""

_Marked = tuple[int, float | None, float | None, str]
"""A mark: the index of its point (reported by a click), its ratio and value, and its hover text."""


def allocation_figure(
    points: Sequence[SearchPoint],
    figure: str,
    raw_nbytes: float,
    *,
    here: _Here = (None, None),
    basis: str = "estimated",
    limit: float | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
) -> go.Figure:
    """Draw the figure.

    Parameters
    ----------
    points
        Trials, archives, published codecs and estimates, all of the same steps. Abandoned trials are omitted,
        since neither their size nor their worst step is known.
    figure
        ``restore_cost`` or ``drop``, in percent, or ``divergence``, in nats; on a logarithmic axis. Values of
        zero or below appear at its lower edge.
    raw_nbytes
        Raw bytes of the weights of all steps; size = raw_nbytes / ratio.
    here, basis
        The edited point: its ratio of the weights and its figure, and whether that is measured or estimated.
    limit
        The bound on the figure; None for none.
    colours
        The colour of each archive, by its name.
    """
    scale = COSTS[figure].scale
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for place, point in enumerate(points):
        if point.is_complete and point.ratio > 0 and point.figure(figure) is not None:
            kinds.setdefault(_kind(point, colours), []).append(place)
    known = [points[place].figure(figure) for members in kinds.values() for place in members]
    candidates = [scale * value for value in (*known, here[1], limit) if value is not None]
    positive = [value for value in candidates if 0 < value < math.inf] or [1e-3]
    drawn, floor = go.Figure(), min(positive) / 2

    def mark(name: str, marked: Sequence[_Marked], marker: dict[str, Any], **more: Any) -> None:
        drawn.add_trace(
            go.Scatter(
                x=[raw_nbytes / ratio if ratio else math.nan for _, ratio, _, _ in marked],
                y=[_height(value, scale, floor) for _, _, value, _ in marked],
                name=name,
                marker=marker,
                customdata=[[place, text] for place, _, _, text in marked],
                hovertemplate="%{customdata[1]}<extra></extra>",
                **{"mode": "markers", **more},
            )
        )

    _mark_points(mark, points, figure, kinds)
    _mark_here(mark, here, figure, limit, basis)
    if limit is not None:
        _draw_bound(drawn, figure, limit, (floor, max(positive)))
    _lay_out(drawn, figure, (floor, max(positive)))
    return drawn


def _height(value: float | None, scale: float, floor: float) -> float:
    is_known = value is not None and math.isfinite(value)
    return max(scale * (value or 0.0), floor) if is_known else math.nan


def _mark_points(
    mark: _Mark, points: Sequence[SearchPoint], figure: str, kinds: Mapping[tuple[str, str, str], list[int]]
) -> None:
    """Mark the points by kind, estimates as a curve, and the best one of the search."""
    named: set[str] = set()
    for (name, symbol, colour), members in sorted(kinds.items()):
        members.sort(key=lambda place: points[place].ratio)
        marks = [
            (place, points[place].ratio, points[place].figure(figure), _hover(points[place]))
            for place in members
        ]
        look: dict[str, Any] = {"line": {"color": colour, "width": 2, "dash": "dot"}}
        if points[members[0]].kind == "estimate":
            mark(name, marks, {"symbol": symbol, "size": 8}, mode="lines+markers", **look)
            continue
        names = [fmt.clipped(points[place].name.removesuffix(".inshrink"), _NAME_WIDTH) for place in members]
        look = {"textposition": "bottom center", "textfont": {"size": 11}}
        look |= {"mode": "markers+text", "text": list(map(fmt.html, names))} if names[0] else {}
        look["showlegend"] = name not in named
        named.add(name)
        mark(name, marks, {"symbol": symbol, "size": 10, "color": colour}, **look)
    best = next((point for point in points if point.is_best and point.is_complete), None)
    if best is not None:
        star = {"symbol": "star-open", "size": 22, "color": _BEYOND, "line": {"width": 2}}
        mark("Best of the search", [(-1, best.ratio, best.figure(figure), "")], star, hoverinfo="skip")


def _mark_here(mark: _Mark, here: _Here, figure: str, limit: float | None, basis: str) -> None:
    """Mark the edited point."""
    is_beyond = limit is not None and here[1] is not None and here[1] > limit
    look = {"symbol": "x", "color": _BEYOND} if is_beyond else {"symbol": "circle", "color": MARK}
    value = "" if here[1] is None else COSTS[figure].text(here[1])
    text = f"these bits, {basis} {value}"
    name = "These bits, beyond the bound" if is_beyond else "These bits"
    mark(name, [(-1, *here, text)], look | {"size": 15, "line": {"width": 2, "color": "#FFFFFF"}})


def _draw_bound(drawn: go.Figure, figure: str, limit: float, ends: tuple[float, float]) -> None:
    """Draw the bound, and colour all beyond it; `ends` are those of the drawn values."""
    scaled = COSTS[figure].scale * limit
    drawn.add_hrect(scaled, 9 * ends[1], fillcolor=_BEYOND, opacity=0.1, line_width=0)
    drawn.add_hline(scaled, line={"color": _BEYOND, "width": 1.5, "dash": "dash"})
    # Plotly positions lines by value, but texts on a logarithmic axis by exponent.
    drawn.add_annotation(
        text=f"Bound {fmt.limit(figure, limit)}",
        font={"size": 12, "color": _BEYOND},
        showarrow=False,
        **{"xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom"},
        y=math.log10(max(scaled, ends[0])),
    )


def _kind(point: SearchPoint, colours: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the name of a point's kind, its symbol and its colour."""
    if point.kind == "archive":
        return "Archives, measured", "hexagon2", colours.get(point.name, CATEGORICAL[1])
    return _KINDS["broken" if point.kind == "trial" and not point.keeps else point.kind]


def _hover(point: SearchPoint) -> str:
    """Return the hover text of a point."""
    names = filter(None, dict.fromkeys([point.name, point.label]))
    lines = [fmt.html(fmt.clipped(name, _LABEL_WIDTH)) for name in names]
    lines.append(
        f"{fmt.ratio(point.ratio)} of the weights, {point.basis}, {fmt.counted(point.n_steps, 'step')}"
    )
    known = {cost: getattr(point, name) for name, cost in COSTS.items()}
    lines += [f"{cost.word} {cost.text(value)}" for cost, value in known.items() if value is not None]
    return "<br>".join(lines)


def _lay_out(drawn: go.Figure, figure: str, ends: tuple[float, float]) -> None:
    lay_out(drawn, _HEIGHT, legend=2)
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
        **{name: line[:: math.ceil(len(line) / _MAX_TICKS)] for name, line in ticks.items() if line},
    )
    low, high = (math.log10(min(max(end, 1e-300), 1e300)) for end in ends)
    drawn.update_yaxes(
        title=title(COSTS[figure].axis),
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
