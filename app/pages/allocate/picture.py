"""The picture of size against quality and the list of its points; a click on one loads it into the editor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.pages.allocate import editor
from inshrink_app.pages.allocate.allocating import Board, calibration, weight_bytes
from inshrink_app.pages.allocate.figure import Here, Marks, allocation_figure, clicked_point
from inshrink_app.services import Searched, SearchPoint
from inshrink_app.widgets import fmt, job_card, listing, quality
from inshrink_app.widgets.layout import chart

_CHART, _TABLE, _AGAINST = "allocate.picture", "allocate.points", "allocate.against"
_FIGURES = {"divergence": "Divergence", "drop": "Drop"}
_COLUMNS = {
    "configuration": "label",
    "figures": "basis",
    "ratio": "ratio",
    "drop": "drop",
    "divergence": "divergence",
    "restore cost": "restore_cost",
    "steps": "n_steps",
    "restore gain": "gain",
    "restore noise": "noise",
}
"""What stands in the table of a `SearchPoint`, by heading."""


def show(board: Board, job: Job | None) -> None:
    """Draw the picture; while a search runs, its trials as they arrive."""
    if job is not None and job.is_running:
        _live(board, job)
    else:
        _draw(board)


@st.fragment(run_every=2 * job_card.POLL_SECONDS)
def _live(board: Board, job: Job) -> None:
    """Draw the picture of a search that runs."""
    found = services.searched(job_card.current(job), services.steps_of(job, board.shown))
    others = tuple(one for one in board.points if one.name or one.is_estimated)
    points = (*found.points, *others) if found.steps == board.steps else board.points
    best = "None keeps the bounds yet" if found.best is None else f"Best so far {fmt.ratio(found.best.ratio)}"
    _draw(board._replace(points=points))
    st.caption(f"{best} · about {fmt.counted(max(0, job.total - job.done), 'evaluation')} left")


def _draw(board: Board) -> None:
    points = board.points
    known = [name for name in _FIGURES if any(one.figure(name) is not None for one in points)]
    if not known:
        st.write(
            "How coarse may a frame be? As coarse as possible, while what it restores is good enough. A "
            "search encodes the steps in memory, asks the evaluator, and goes on to the largest ratio that "
            "keeps the bound; trials appear here as they are measured. Nothing is written but their log."
        )
        st.caption(" ".join(_not_drawn(board)))
        return
    figure = _against(known)
    limit = board.limits.get(figure)
    text = f"Bound {fmt.percent(limit) if figure == 'drop' else f'{fmt.value(limit or 0)} nats'}"
    if figure == "divergence" and (cost := board.found.limits.get("restore_cost")) is not None:
        text = f"Restore cost {fmt.percent(cost)}"
    told = board.numbers
    here = Here(None, None)
    if told is not None:
        here = Here(told.ratio_weights, getattr(told, figure), told.basis == "measured")
    drawn = allocation_figure(
        points,
        board.rates,
        here,
        figure,
        Marks(limit, text, board.found.default_ratio, board.found.target_ratio),
        weight_bytes(board.shown) * max(1, len(board.steps)),
    )
    st.session_state["allocate.n_points"] = len(points)
    chart(
        drawn,
        _CHART,
        f"Size of the weights against {figure}: the curve of all layers alike, this allocation, and what was "
        "measured",
        on_select=_clicked,
        selection_mode=("points",),
    )
    st.caption(" ".join(_said(board, figure)), help=quality.NATS if figure == "divergence" else None)


def _against(known: Sequence[str]) -> str:
    """Let the reader choose what quality is, where both are known."""
    if len(known) == 1:
        return known[0]
    if st.session_state.get(_AGAINST) not in known:
        st.session_state[_AGAINST] = known[0]
    return str(
        st.segmented_control(
            "Quality",
            known,
            format_func=lambda name: fmt.inked(_FIGURES[name]),
            key=_AGAINST,
            required=True,
            label_visibility="collapsed",
        )
    )


def _said(board: Board, figure: str) -> list[str]:
    """Say how the picture is to be read, and what is not drawn."""
    said = [f"{fmt.counted(len(board.steps), 'step')}. Click a point to load it."]
    if any((one.figure(figure) or 1) <= 0 and one.whole for one in board.points):
        said.append("At the lower edge: zero, or better than the original.")
    if board.rates is not None:
        said.append(f"The curve is estimated, {calibration(board, board.rates)}.")
    return said + _not_drawn(board)


def _not_drawn(board: Board) -> list[str]:
    """Say what is known and is not of these steps."""
    said = []
    left = [one for one in board.points if not one.whole and not one.is_estimated and not one.archive]
    if left:
        few, many = min(one.n_steps for one in left), max(one.n_steps for one in left)
        ended = fmt.counted(many, "step") if few == many else f"{few} to {fmt.counted(many, 'step')}"
        said.append(
            f"Not drawn: {fmt.counted(len(left), 'trial')} that ended after {ended}; they tell neither the "
            "size nor the worst of all."
        )
    n_archives = sum(not one.whole for one in board.points if one.archive)
    if n_archives:
        said.append(f"Not drawn: {fmt.counted(n_archives, 'archive')} of other steps.")
    if board.n_other_steps:
        said.append(f"Not drawn: {fmt.counted(board.n_other_steps, 'trial')} of a search on other steps.")
    return said


def show_points(board: Board) -> None:
    """List every configuration; a row picks it, as a click on its point does."""
    points = board.points
    if not points:
        st.caption("Nothing was measured or estimated yet.")
        return
    listed = pd.DataFrame({head: [getattr(one, name) for one in points] for head, name in _COLUMNS.items()})
    listed["configuration"] = [one.name or one.label for one in points]
    listed.insert(2, "is", [_word(board.found, one) for one in points])
    listing.show(
        listed,
        "search",
        alt="Configurations with ratio, worst drop, largest divergence and restore gain",
        formats={"restore gain": "%.3f"},
        key=_TABLE,
        on_select=_row_chosen,
        selection_mode="single-row",
    )


def _word(found: Searched, point: SearchPoint) -> str:
    """Say in a few words where a configuration stands."""
    if point.is_estimated:
        return "not measured"
    if point.name:
        return "published codec" if point.baseline else "archive"
    if point.is_best:
        return "best"
    if not point.whole:
        return "given up" if not point.keeps else "not finished"
    return found.verdict(point)


def _clicked() -> None:
    """Take in a click on the picture."""
    chosen: Any = st.session_state[_CHART]["selection"]["points"]
    editor.pick(clicked_point(chosen, st.session_state["allocate.n_points"]))


def _row_chosen() -> None:
    """Take in a choice in the table."""
    rows = st.session_state[_TABLE]["selection"]["rows"]
    state.clicked()
    editor.pick(int(rows[0]) if rows else None)
