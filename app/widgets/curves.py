"""Training metrics as curves, those of one scale together. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets.figures import add_heading, lay_out, steps_axis
from inshrink_app.widgets.formatting import elide, html_text

__all__ = ["WIDTH", "log_figure", "log_groups"]

WIDTH = 1_000
"""Parts of a curve with more values than two in each: the smallest and the largest of each are drawn."""

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
_NAME_WIDTH = 34


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


def log_figure(log: Mapping[str, Sequence[tuple[int, float]]], heading: str = "") -> go.Figure:
    """Draw training metrics by step; the title serves as legend.

    Parameters
    ----------
    log
        Of each metric its values by step; of very many, those that show at this width.
    heading
        Stands in the place of the legend.
    """
    from inshrink_core.analysis.thinning import thinned

    figure = go.Figure()
    for position, (name, logged) in enumerate(log.items()):
        series = thinned(logged, WIDTH)
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
            )
        )
    add_heading(figure, html_text(elide(heading, _NAME_WIDTH)) or _legend([*log]))
    lay_out(figure, 216, titles=True)
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
