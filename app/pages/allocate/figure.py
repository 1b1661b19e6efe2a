"""Trials as a scatter of ratio against drop or divergence, with the front of the best. No Streamlit here.

The figure is a function of the trials alone, never of what is selected in it: the browser marks a click.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.services import Searched, SearchPoint, front
from inshrink_app.theme import CATEGORICAL, GAP, MARK
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import lay_out, log_ticks, title

_LABEL_WIDTH = 60
_HEIGHT = 380
BEYOND = CATEGORICAL[5]
"""Of bounds, and of what breaks them."""

_FRONT = CATEGORICAL[0]
_OTHERS = CATEGORICAL[1:]
_DIM = 0.5


def search_figure(found: Searched, compared: Sequence[SearchPoint], figure: str) -> go.Figure:
    """Draw trials and baselines.

    Parameters
    ----------
    found
        The search.
    compared
        Baselines and estimates.
    figure
        ``drop``, in percent, or ``divergence``, in nats on a logarithmic axis.
    """
    drawn = go.Figure()
    points = (*found.points, *compared)
    best_of = front(points, figure)
    drawn.add_trace(_line([points[i] for i in best_of], figure))
    trials = [(i, p) for i, p in enumerate(points) if not p.baseline and not p.is_estimated]
    guessed = [(i, p) for i, p in enumerate(points) if p.is_estimated]
    beaten = [(i, p) for i, p in trials if p.whole and i not in best_of]
    partial = [(i, p) for i, p in trials if not p.whole]
    front_marker = {"symbol": "circle", "color": _FRONT, "size": 11}
    _add(drawn, found, [(i, p) for i, p in trials if i in best_of], figure, "On the front", front_marker, 1.0)
    _add(drawn, found, beaten, figure, "Dominated", {**front_marker, "size": 9}, _DIM)
    hollow = {"symbol": "circle-open", "color": GAP, "size": 9, "line": {"width": 1.5}}
    _add(drawn, found, partial, figure, "On some of the steps", hollow, 0.9)
    diamond = {"symbol": "diamond-open", "color": _FRONT, "size": 10, "line": {"width": 1.5}}
    _add(drawn, found, guessed, figure, "Estimated", diamond, 0.9)
    for position, point in enumerate(compared):
        if point.is_estimated:
            continue
        colour = _OTHERS[position % len(_OTHERS)]
        marker = {"symbol": _SYMBOLS[position % len(_SYMBOLS)], "color": colour, "size": 10}
        _add(drawn, found, [(len(found.points) + position, point)], figure, point.baseline, marker, 0.9)
    _best(drawn, found, figure)
    _limits(drawn, found, figure)
    _lay_out(drawn, figure, points, found)
    return drawn


_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon", "hexagon2")


def _y(point: SearchPoint, figure: str) -> float:
    """Return where a point lies; a figure that cannot be drawn is NaN, which leaves it out."""
    value = point.figure(figure)
    if value is None or (figure == "divergence" and value <= 0):
        return float("nan")
    return 100 * value if figure == "drop" else value


def _line(points: Sequence[SearchPoint], figure: str) -> go.Scatter:
    """Join the front."""
    return go.Scatter(
        x=np.asarray([point.ratio for point in points], dtype=np.float64),
        y=np.asarray([_y(point, figure) for point in points], dtype=np.float64),
        mode="lines",
        line={"color": _FRONT, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
    )


def _add(
    drawn: go.Figure,
    found: Searched,
    chosen: Sequence[tuple[int, SearchPoint]],
    figure: str,
    name: str,
    marker: Mapping[str, object],
    opacity: float,
) -> None:
    """Draw points of one kind; each knows its place among all, for clicks."""
    if not chosen:
        return
    drawn.add_trace(
        go.Scatter(
            x=np.asarray([point.ratio for _, point in chosen], dtype=np.float64),
            y=np.asarray([_y(point, figure) for _, point in chosen], dtype=np.float64),
            customdata=[[place, _hover(found, point)] for place, point in chosen],
            name=name,
            mode="markers",
            marker={**marker, "opacity": opacity},
            selected={"marker": {"opacity": 1, "color": MARK, "size": 14}},
            unselected={"marker": {"opacity": opacity}},
            hovertemplate="%{customdata[1]}<extra></extra>",
        )
    )


def _hover(found: Searched, point: SearchPoint) -> str:
    """Say everything about a point."""
    basis = f"measured on {fmt.counted(point.n_steps, 'step')}"
    if point.is_estimated:
        basis = "estimated, nothing of it was measured"
    elif not point.whole:
        every = f" of {fmt.count(len(found.steps))}" if found.steps else ""
        basis += f"{every}, then given up or not there yet"
    lines = [
        fmt.html(fmt.elided(point.label, _LABEL_WIDTH)),
        f"{fmt.ratio(point.ratio)}, {basis}",
        f"worst drop {fmt.percent(point.drop)}",
        f"largest divergence {'–' if point.divergence is None else fmt.value(point.divergence)}",
    ]
    if not point.baseline and not point.is_estimated:
        lines.append(found.verdict(point))
    return "<br>".join(lines)


def _best(drawn: go.Figure, found: Searched, figure: str) -> None:
    """Ring the best, which can be told without its colour too."""
    best = found.best
    if best is None:
        return
    drawn.add_trace(
        go.Scatter(
            x=[best.ratio],
            y=[_y(best, figure)],
            name="Best",
            mode="markers",
            marker={"symbol": "star-open", "size": 22, "color": BEYOND, "line": {"width": 2}},
            hoverinfo="skip",
        )
    )


def _limits(drawn: go.Figure, found: Searched, figure: str) -> None:
    """Draw what was asked for."""
    bound = found.bound(figure) or (found.as_divergence() if figure == "divergence" else None)
    if bound:
        limit = 100 * bound if figure == "drop" else bound
        draw_bound(drawn, limit, figure, "left", is_log=figure != "drop")
    if found.default_ratio:
        _line_at(drawn, "x", found.default_ratio, "Default ", "right", is_log=True)
    if found.target_ratio is not None:
        _line_at(drawn, "x", found.target_ratio, f"Target {found.target_ratio:g}× ", "right", is_log=True)


def draw_bound(
    drawn: go.Figure,
    limit: float,
    figure: str,
    side: str,
    *,
    is_log: bool = True,
    beyond_to: float | None = None,
) -> None:
    """Draw a bound as a line, and red what lies beyond it.

    Parameters
    ----------
    drawn, limit
        The figure, and the bound in the units of its axis.
    figure
        ``drop``, in percent, or ``divergence``, in nats.
    side
        Where its name stands, ``left`` or ``right``: where the points are far from it.
    is_log
        Whether that axis is logarithmic.
    beyond_to
        Where the red ends; None for none.
    """
    if beyond_to is not None:
        drawn.add_hrect(limit, beyond_to, fillcolor=BEYOND, opacity=0.1, line_width=0)
    text = f"Bound {limit:g} {'%' if figure == 'drop' else 'nats'}"
    _line_at(drawn, "y", limit, text, side, is_log=is_log)


def _line_at(drawn: go.Figure, axis: str, value: float, text: str, side: str, *, is_log: bool) -> None:
    """Draw a line through the whole figure, with its name at the end of it, or on that side of it.

    Plotly places lines by value, but texts on a logarithmic axis by exponent.
    """
    other = "y" if axis == "x" else "x"
    drawn.add_shape(
        type="line",
        line={"color": BEYOND, "width": 1.5, "dash": "dash"},
        **{f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": value, f"{axis}1": value},
    )
    drawn.add_annotation(
        text=text,
        font={"size": 12, "color": BEYOND},
        showarrow=False,
        **{
            f"{other}ref": "paper",
            other: 0 if axis == "y" and side == "left" else 1,
            axis: math.log10(value) if is_log else value,
        },
        xanchor=side,
        yanchor="top" if axis == "x" else "bottom",
    )


def _lay_out(drawn: go.Figure, figure: str, points: Sequence[SearchPoint], found: Searched) -> None:
    lay_out(drawn, _HEIGHT, legend=True)  # Also of a single kind: it says what the points are.
    drawn.update_layout(hovermode="closest", dragmode="pan")
    ratios = [point.ratio for point in points if point.ratio > 0]
    ratios += [] if found.target_ratio is None else [found.target_ratio]
    drawn.update_xaxes(
        title=title("Ratio of the weights, logarithmic"),
        type="log",
        automargin=True,
        tickangle=0,
        **log_ticks(ratios, "{:g}×".format),
    )
    if figure == "drop":
        drawn.update_yaxes(title=title("Worst drop, %"), automargin=True, nticks=6)
        drawn.update_yaxes(zerolinecolor=GAP)
        return
    bound = found.bound(figure)
    values = [point.divergence for point in points if point.divergence] + ([bound] if bound else [])
    drawn.update_yaxes(
        title=title("Largest divergence, nats"),
        type="log",
        automargin=True,
        **log_ticks(values),
    )


def clicked_point(points: Sequence[object], n_points: int) -> int | None:
    """Return which point was clicked; None for nothing, or for nonsense from the browser.

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
