"""The graph of an archive's chain: keyframes, delta frames, branches, and restores. No Streamlit here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import fmt
from inshrink_app.widgets.figures import few_ticks, lay_out, title

from inshrink_core.chain import ChainFrame

MAX_COLUMNS = 240
"""More steps than this are drawn closer than a mark is wide; the newest are shown then."""

_SMALLEST, _LARGEST = 6, 18
_MAX_LABELS = 7
_LANE = 74
_KINDS = {"keyframe": ("Keyframe", "square", 0), "delta": ("Delta frame", "circle", 1)}


def chain_figure(frames: Sequence[ChainFrame]) -> go.Figure:
    """Draw frames by step and branch; the area of a mark grows with the bytes of its frame.

    Parameters
    ----------
    frames
        In commit order; those of more than `MAX_COLUMNS` steps are cut to the newest.
    """
    steps = sorted({frame.step for frame in frames})[-MAX_COLUMNS:]
    column = {step: position for position, step in enumerate(steps)}
    shown = [frame for frame in frames if frame.step in column]
    lanes = {branch: lane for lane, branch in enumerate(sorted({frame.branch for frame in shown}))}
    places = {frame.frame_id: (column[frame.step], lanes[frame.branch]) for frame in shown}
    figure = go.Figure()
    _draw_links(figure, shown, places)
    _draw_restores(figure, shown, column, lanes)
    largest = max((frame.nbytes for frame in shown), default=1) or 1
    for kind, (label, symbol, colour) in _KINDS.items():
        rows = [frame for frame in shown if frame.kind == kind]
        if rows:
            _draw_frames(figure, rows, places, label, symbol, CATEGORICAL[colour], largest)
    _lay_out(figure, steps, lanes)
    return figure


def _draw_links(figure: go.Figure, frames: Sequence[ChainFrame], places: dict[str, tuple[int, int]]) -> None:
    """Draw what each frame continues from: solid where it is its reference, thin before a keyframe."""
    for kind, width, dash in (("delta", 2.5, "solid"), ("keyframe", 1.2, "dot")):
        xs: list[float | None] = []
        ys: list[float | None] = []
        for frame in frames:
            before = places.get(frame.parent_id)
            if frame.kind == kind and before is not None:
                here = places[frame.frame_id]
                xs += [before[0], here[0], None]
                ys += [before[1], here[1], None]
        if xs:
            line = {"color": GAP, "width": width, "dash": dash}
            figure.add_trace(
                go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False)
            )


def _draw_restores(
    figure: go.Figure, frames: Sequence[ChainFrame], column: dict[int, int], lanes: dict[int, int]
) -> None:
    """Draw where training was restored: an arrow from the step restored to the first frame after it."""
    by_id = {frame.frame_id: frame for frame in frames}
    for frame in frames:
        before = by_id.get(frame.parent_id)
        is_first = before is None or before.restored_step != frame.restored_step
        if frame.restored_step is None or not is_first or frame.restored_step not in column:
            continue
        source = next((f for f in frames if f.step == frame.restored_step), None)
        if source is not None:
            figure.add_annotation(
                x=column[frame.step],
                y=lanes[frame.branch],
                ax=column[source.step],
                ay=lanes[source.branch],
                axref="x",
                ayref="y",
                text="",
                arrowhead=2,
                arrowwidth=1.6,
                arrowcolor=CATEGORICAL[5],
                standoff=8,
                startstandoff=8,
            )


def _draw_frames(
    figure: go.Figure,
    rows: Sequence[ChainFrame],
    places: dict[str, tuple[int, int]],
    label: str,
    symbol: str,
    colour: str,
    largest: int,
) -> None:
    """Draw the frames of one kind; those of older branches are hollow."""
    sizes = [_SMALLEST + (_LARGEST - _SMALLEST) * math.sqrt(row.nbytes / largest) for row in rows]
    symbols = [symbol if row.on_line else f"{symbol}-open" for row in rows]
    symbols = ["x" if row.damage else sign for row, sign in zip(rows, symbols, strict=True)]
    notes = [
        "damaged"
        if row.damage
        else f"restored from step {fmt.count(row.restored_step)}"
        if row.restored_step is not None
        else "on the newest branch"
        if row.on_line
        else "on an older branch"
        for row in rows
    ]
    figure.add_trace(
        go.Scatter(
            x=np.asarray([places[row.frame_id][0] for row in rows], dtype=np.float64),
            y=np.asarray([places[row.frame_id][1] for row in rows], dtype=np.float64),
            mode="markers",
            name=label,
            marker={"symbol": symbols, "size": sizes, "color": colour, "opacity": 1, "line": {"width": 1.2}},
            customdata=[
                [fmt.count(row.step), fmt.size(row.nbytes), fmt.ratio(row.ratio_total), note]
                for row, note in zip(rows, notes, strict=True)
            ],
            hovertemplate=(
                f"{label} of step %{{customdata[0]}}<br>%{{customdata[1]}}, %{{customdata[2]}}<br>"
                "%{customdata[3]}<extra></extra>"
            ),
        )
    )


def _lay_out(figure: go.Figure, steps: Sequence[int], lanes: dict[int, int]) -> None:
    """Give every branch a lane, the first one at the top."""
    labels = [fmt.count(step) for step in steps]
    lay_out(figure, 80 + _LANE * max(1, len(lanes)), legend=True)
    figure.update_layout(legend={"itemsizing": "constant"})
    ticks = few_ticks([str(i) for i in range(len(steps))], labels, _MAX_LABELS)
    figure.update_xaxes(
        tickvals=[int(position) for position in ticks["tickvals"]],
        ticktext=ticks["ticktext"],
        tickangle=0,
        title=title("Step"),
        showgrid=False,
        zeroline=False,
        range=[-0.7, max(1, len(steps)) - 0.3],
    )
    figure.update_yaxes(
        tickvals=list(lanes.values()),
        ticktext=["Main branch" if branch == 0 else f"Branch {branch}" for branch in lanes],
        range=[max(1, len(lanes)) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
        automargin=True,
    )
