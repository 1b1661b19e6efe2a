"""The figures of a run: its training, its sizes, the frames of its archive. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets.figures import byte_ticks, columns_axis, lay_out, steps_axis
from inshrink_app.widgets.formatting import bytes_text, count_text, elide, html_text, ratio_text, share_text
from plotly.subplots import make_subplots

if TYPE_CHECKING:
    from inshrink_core.chain import ChainFrame

__all__ = ["frames_figure", "log_figure", "log_groups", "sizes_figure"]

_DASHES = ("solid", "dash", "dot")
_DASH_SIGNS = ("\u2501", "\u2505", "\u2509")
_MAX_IN_TITLE = 3
_NAME_WIDTH = 34


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


def frames_figure(frames: Sequence[ChainFrame]) -> go.Figure:
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
    lay_out(figure, 250, legend=True)
    figure.update_layout(bargap=0.15)
    labels = [count_text(row.step) for row in frames]
    figure.update_xaxes(categoryorder="array", categoryarray=labels, **columns_axis(labels))
    figure.update_yaxes(
        rangemode="tozero", automargin=True, **byte_ticks(max((row.nbytes for row in frames), default=1))
    )
    return figure
