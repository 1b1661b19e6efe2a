"""Ratio against drop and ratio against divergence, as one HTML page that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inshrink_core.bench.rows import REPEAT, Bound
from inshrink_core.errors import MissingExtraError

if TYPE_CHECKING:
    from inshrink_core.bench.points import Point

__all__ = ["plots_html"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>inshrink bench</title>
<style>body{{font-family:sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}</style></head>
<body><h1>Ratio and fidelity</h1>
<p>Every dot is a measured chain, keyframe and headers included; further right and lower is better.
Dotted lines are the bounds, the dashed line is the stale copy, which stores nothing.</p>
{figures}
</body></html>
"""

_FIGURES = {
    "drop": ("max_drop", "drop of {metric}, the worst step", ".2%"),
    "divergence": ("mean_divergence", "mean divergence, nats", ".3g"),
}
"""By kind of bound: the figure of a point, the title of its axis, and how its numbers are written."""


def plots_html(points: Mapping[str, Sequence[Point]], bounds: Sequence[Bound], metric: str) -> str:
    """Return a page with a figure for each kind of bound; the drawing code is in the page.

    Raises
    ------
    MissingExtraError
        plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise MissingExtraError("plotly", "app") from error
    parts: list[str] = []
    for kind in dict.fromkeys(bound.kind for bound in bounds):
        figure = go.Figure()
        _draw(figure, kind, points, bounds)
        _, title, number = _FIGURES[kind]
        figure.update_layout(
            xaxis={"title": "ratio of the weights", "type": "log"},
            yaxis={"title": title.format(metric=metric), "tickformat": number, "type": _scale(kind)},
            template="plotly_white",
            height=560,
        )
        parts.append(figure.to_html(full_html=False, include_plotlyjs=not parts))
    return _PAGE.format(figures="\n".join(parts))


def _draw(figure: Any, kind: str, points: Mapping[str, Sequence[Point]], bounds: Sequence[Bound]) -> None:
    """Draw what is known of one kind of bound: codecs, limits, the stale copy."""
    name = _FIGURES[kind][0]
    known = {
        label: [point for point in group if getattr(point, name) is not None]
        for label, group in points.items()
    }
    for label, group in known.items():
        if label != REPEAT and group:
            _add_codec(figure, label, group, name)
    for bound in bounds:
        if bound.kind == kind and (bound.limit > 0 or _scale(kind) == "linear"):
            figure.add_hline(y=bound.limit, line_dash="dot", line_color="#888", line_width=1)
    ratios = [p.ratio_weights for group in known.values() for p in group if p.ratio_weights is not None]
    for stale in known.get(REPEAT, []) if ratios else []:
        # A trace, since an annotation of a line stands in the wrong place on a logarithmic axis.
        figure.add_scatter(
            x=[min(ratios), max(ratios)],
            y=[getattr(stale, name)] * 2,
            mode="lines",
            name="stale copy",
            line={"dash": "dash", "color": "#444"},
        )


def _scale(kind: str) -> str:
    """Choose by kind: a drop may be negative or zero, a divergence spans decades."""
    return "log" if kind == "divergence" else "linear"


def _add_codec(figure: Any, label: str, points: Sequence[Point], name: str) -> None:
    """Draw the points of one codec in the order of its knob."""
    figure.add_scatter(
        x=[point.ratio_weights for point in points],
        y=[getattr(point, name) for point in points],
        mode="lines+markers",
        name=html.escape(label, quote=False),
        text=[html.escape(json.dumps(dict(point.config)), quote=False) for point in points],
        hovertemplate="%{x:.3g}×, %{y:.3g}<br>%{text}",
    )
