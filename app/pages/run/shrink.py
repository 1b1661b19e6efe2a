"""The card that writes an archive: its estimated size, its contents, progress and result."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Requests
from inshrink_app.model import Problem
from inshrink_app.pages.run import logs, naming
from inshrink_app.pages.run.board import MEASURED, Board
from inshrink_app.pages.run.shrinking import KEEPS, Written
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets import choices, fmt, job_card, problem
from inshrink_app.widgets.figures import byte_ticks, lay_out, steps_axis
from inshrink_app.widgets.layout import answer, chart, folded

_MOST_PROBLEMS = 5
_STEPS_HEIGHT = 110


def show(board: Board) -> Requests:
    """Draw the card; return the requests of its button."""
    suggestion = services.suggested_name(board.shown, board.intent.archive)
    target = str(st.session_state.get(f"shrink.target.{suggestion}") or suggestion)
    job = board.writing
    with st.container(border=True, gap="small", key="shrink"):
        _size(board)
        _keep(board)
        with st.container(horizontal=True, vertical_alignment="center"):
            pressed = st.button(
                "Write archive",
                type="primary",
                icon=":material/compress:",
                disabled=job is not None and job.is_running,
                help=_help(board),
                key="shrink.write",
            )
            with st.popover("More", icon=":material/more_horiz:"):
                _more(board, suggestion)
        if pressed:
            _start(board, target)
        if job_card.settled(job, ""):
            if board.written is not None:
                _result(board, board.written)
            else:
                _basis(board)
    return board.intent.requests(target)


def _size(board: Board) -> None:
    before, now = fmt.size(board.raw_nbytes), board.figures
    if now is None or now.nbytes is None:
        st.markdown(f"#### {before}")
        return
    about = "" if now.basis == MEASURED else "about "
    st.markdown(f"#### {before} → {about}{fmt.size(now.nbytes)} · {fmt.ratio(now.ratio)}")


def _keep(board: Board) -> None:
    """Draw the choice of contents."""
    names, now, intent = list(KEEPS), board.now, board.intent
    keep = st.radio(
        "Keep",
        names,
        names.index(now.keep) if now.keep in names else 1,
        format_func=lambda name: KEEPS[name].label,
        horizontal=True,
        label_visibility="collapsed",
        key=f"shrink.keep.{now.keep}",
    )
    if keep != now.keep:
        state.clicked()
        services.choose(board.shown, keep=keep)
        st.rerun()
    if intent.is_by_hand:
        bits = f"Bits: {fmt.markdown(now.origin or 'by hand')}."
    elif now.keep == "exact":
        bits = ""
    elif intent.is_bounded:
        bits = f"Each step: {now.bound.text}."
    elif now.bound.kind == "none":
        bits = "Default settings."
    else:
        bits = "Default settings: a bound takes an evaluator that you trust."
    st.caption(f"{KEEPS[now.keep].price} {bits}")


def _help(board: Board) -> str:
    steps = fmt.all_steps(len(board.shown.steps))
    compares = board.judge is None or board.now.keep == "exact"
    against = "every tensor with the run" if compares else "the evaluator's metric with the run's"
    return f"Writes {steps}, decodes every tensor again, and compares {against}."


def _start(board: Board, typed: str) -> None:
    state.clicked()
    target = answer(lambda: services.export_target(typed, board.intent.archive))
    if target is not None and answer(lambda: board.intent.start(str(target))) is not None:
        st.rerun()


def _more(board: Board, suggestion: str) -> None:
    """Draw the rare options: target, device, and the sources of steps and metrics."""
    shown = board.shown
    st.text_input("Write to", suggestion, key=f"shrink.target.{suggestion}")
    if not services.missing_cuda():
        choices.device("shrink")
    if st.button("A range, one step, or a pack", icon=":material/tune:", key="shrink.export"):
        state.go_to("archives", panel="write")
    folded("Metrics from a file", None, "logs", functools.partial(logs.show, shown))
    if shown.place.is_dir():
        folded("Steps from file names", None, "names", functools.partial(naming.show, shown))


def _basis(board: Board) -> None:
    """Draw the basis of the size, or the progress of the trial."""
    trial, result = board.trial, board.tried
    if trial is not None and not job_card.settled(trial, ""):
        if trial.is_running:
            st.caption("Two steps are tried to estimate the size. Nothing is written.")
    elif result is not None:
        steps = " and ".join(fmt.count(int(step)) for step in result["tried"])
        text = f"Estimated from {'steps' if len(result['tried']) > 1 else 'step'} {steps}."
        if why := result.get("not_judged"):
            verb = "fails" if result.get("evaluator_failed") else "tells no cost"
            text += f" The evaluator {verb}: {why}."
        st.caption(fmt.markdown(text))
    elif not state.was_asked_for():
        st.caption("A link alone starts nothing.")
        if st.button("Estimate the size", icon=":material/science:", key="shrink.try"):
            state.clicked()
            st.rerun()


def _result(board: Board, made: Written) -> None:
    """Draw the latest archive: whether it is sound, and its cost."""
    lost = [(Path(path).name, reason) for path, reason in made.unreadable.items()]
    problem.show_unreadable(lost, "They are not in the archive: do not delete their files.")
    bound, chain = board.now.bound, made.chain
    cost = made.cost(bound.kind)
    name = fmt.markdown(fmt.elided(chain.path.name, 40))
    size = f"{fmt.size(chain.nbytes)}, {fmt.ratio(chain.ratio_total)}"
    if made.problems:
        n_problems = fmt.counted(len(made.problems), "problem")
        st.error(f"{name} is not sound: {n_problems}.", icon=":material/error:")
        for finding in made.problems[:_MOST_PROBLEMS]:
            problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    elif not bound.is_kept(cost):
        value = fmt.percent(cost) if bound.kind != "divergence" else fmt.value(cost or 0.0)
        kind = bound.kind.replace("_", " ")
        warning = f"{name} is sound ({size}), but its {kind} is {value}, beyond the bound."
        st.warning(warning, icon=":material/warning:")
    else:
        st.success(f"{name}: {size}. Decoded again and compared.", icon=":material/check_circle:")
    _by_step(board, made)
    with st.container(horizontal=True):
        if st.button("Open in Archives", icon=":material/inventory_2:", key="shrink.open"):
            state.go_to("archives", archive=str(chain.path), panel="frames")
        compare: dict[str, Any] = {
            "icon": ":material/compare_arrows:",
            "key": "shrink.compare",
            "type": "tertiary",
        }
        if made.comparison is not None and st.button("Compare", **compare):
            state.go_to("archives", archive=str(chain.path), panel="compare")


def _by_step(board: Board, made: Written) -> None:
    """Draw bytes by step, and the bounded figure over them."""
    frames = [frame for frame in made.chain.frames if frame.on_line]
    figure = go.Figure(
        go.Bar(
            x=[frame.step for frame in frames],
            y=[frame.nbytes for frame in frames],
            marker={"color": CATEGORICAL[0]},
            customdata=[fmt.size(frame.nbytes) for frame in frames],
            hovertemplate="step %{x:,d}<br>%{customdata}<extra></extra>",
            name="Bytes",
        )
    )
    kind, rows = board.now.bound.kind, getattr(made.comparison, "steps", ())
    costs = [(row.step, value) for row in rows if (value := getattr(row, kind, None)) is not None]
    lay_out(figure, _STEPS_HEIGHT, legend=bool(costs))
    if costs:
        scale, unit = (1.0, "nats") if kind == "divergence" else (100.0, "%")
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in costs],
                y=[scale * value for _, value in costs],
                yaxis="y2",
                mode="lines+markers",
                line={"color": CATEGORICAL[1], "width": 2},
                name=f"{kind.replace('_', ' ').capitalize()}, {unit}",
                hovertemplate=f"step %{{x:,d}}<br>%{{y:.3g}} {unit}<extra></extra>",
            )
        )
        figure.add_hline(
            scale * board.now.bound.value, line={"color": CATEGORICAL[5], "dash": "dash"}, yref="y2"
        )
        axis = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "nticks": 4}
        figure.update_layout(yaxis2=axis | {"tickmode": "auto"})
    figure.update_xaxes(**steps_axis(5))
    largest = max((frame.nbytes for frame in frames), default=1)
    figure.update_layout(yaxis=byte_ticks(largest) | {"automargin": True})
    chart(figure, "shrink.steps", f"Bytes of {len(frames)} steps, and what a restore of each costs")
