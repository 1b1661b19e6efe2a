"""The chain as it would be written, a bar a frame. No Streamlit here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets.figures import byte_ticks, few_ticks, lay_out, title
from inshrink_app.widgets.formatting import bytes_text, count_text

__all__ = ["plan_figure"]

_MAX_LABELS = 8
_KINDS = (("keyframe", "Keyframe", 0), ("delta", "Delta frame", 1))


def plan_figure(frames: Sequence[tuple[int, str, float]], unit: str) -> go.Figure:
    """Draw frames as they would be written.

    Parameters
    ----------
    frames
        Step, ``keyframe`` or ``delta``, and size in bytes.
    unit
        What the sizes are, for the hover: ``estimated`` or ``uncompressed``.
    """
    figure = go.Figure()
    for kind, label, colour in _KINDS:
        rows = [row for row in frames if row[1] == kind]
        if rows:
            figure.add_trace(
                go.Bar(
                    x=[count_text(step) for step, _, _ in rows],
                    y=np.asarray([size for _, _, size in rows], dtype=np.float64),
                    name=label,
                    marker_color=CATEGORICAL[colour],
                    customdata=[[bytes_text(size)] for _, _, size in rows],
                    hovertemplate=f"{label} of step %{{x}}<br>%{{customdata[0]}} {unit}<extra></extra>",
                )
            )
    labels = [count_text(step) for step, _, _ in frames]
    lay_out(figure, 200, legend=True)
    figure.update_layout(bargap=0.15, barmode="overlay")
    figure.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickangle=0,
        title=title("Step"),
        **few_ticks(labels, labels, _MAX_LABELS),
    )
    figure.update_yaxes(
        rangemode="tozero",
        automargin=True,
        **byte_ticks(round(max((size for _, _, size in frames), default=1))),
    )
    return figure
