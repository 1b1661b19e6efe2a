"""The figures of a run: its sizes, the frames of its archive. No Streamlit here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets.figures import byte_ticks, columns_axis, lay_out
from inshrink_app.widgets.formatting import bytes_text, count_text, html_text, ratio_text, share_text

if TYPE_CHECKING:
    from inshrink_core.chain import ChainFrame

__all__ = ["frames_figure", "sizes_figure"]


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
