"""The card that writes an archive: what becomes of the size, what to keep, progress and result."""

from __future__ import annotations

import functools
from pathlib import Path

import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Requests
from inshrink_app.model import Problem
from inshrink_app.pages.run import logs, naming, shrinking
from inshrink_app.pages.run.board import Board, Figures
from inshrink_app.pages.run.shrinking import KEEPS, Written
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets import choices, fmt, job_card, problem
from inshrink_app.widgets.figures import byte_ticks, lay_out, steps_axis
from inshrink_app.widgets.layout import answer, chart, folded

_MOST_PROBLEMS = 5
_STEPS_HEIGHT = 110


def show(board: Board, now: Figures | None, device: str) -> Requests:
    """Draw the card; return what it does, as requests."""
    shown, judge = board.shown, board.judge
    with st.container(border=True, gap="small", key="shrink"):
        _size(board, now)
        _keep(board)
        running = board.writing is not None and board.writing.is_running
        target = _target(board)
        requests = shrinking.write_requests(
            shown, board.now, target, judge, device, can_bound=board.can_bound
        )
        with st.container(horizontal=True, vertical_alignment="center"):
            if st.button(
                "Write archive",
                type="primary",
                icon=":material/compress:",
                disabled=running,
                help=_promise(board),
                key="shrink.write",
            ):
                _start(board, target, device)
            with st.popover("More", icon=":material/more_horiz:"):
                _more(board)
        if running and board.writing is not None:
            job_card.running(board.writing)
        elif board.writing is not None and board.writing.state != "finished":
            job_card.stopped(board.writing, primary=False)
        elif board.written is not None:
            _result(board, board.written)
        else:
            _basis(board)
    return requests


def _size(board: Board, now: Figures | None) -> None:
    """Draw the size before and after."""
    before = fmt.size(board.raw_nbytes)
    if now is None or now.nbytes is None:
        st.markdown(f"#### {before}")
        return
    about = "" if now.basis == "measured" else "about "
    st.markdown(f"#### {before} → {about}{fmt.size(now.nbytes)} · {fmt.ratio(now.ratio)}")


def _keep(board: Board) -> None:
    """Let the reader choose what is kept."""
    names = list(KEEPS)
    keep = st.radio(
        "Keep",
        names,
        names.index(board.now.keep) if board.now.keep in names else 1,
        format_func=lambda name: KEEPS[name].label,
        horizontal=True,
        label_visibility="collapsed",
        key=f"shrink.keep.{board.now.keep}",
    )
    if keep != board.now.keep:
        state.clicked()
        services.choose(board.shown, keep=keep)
        st.rerun()
    by_hand = shrinking.is_by_hand(board.now)
    how = f"Bits: {fmt.markdown(board.now.origin or 'by hand')}." if by_hand else _how(board)
    st.caption(f"{KEEPS[board.now.keep].price} {how}")


def _how(board: Board) -> str:
    """Say what decides the bits of each step."""
    if board.now.keep == "exact":
        return ""
    if shrinking.is_bounded(board.now, board.judge, can_bound=board.can_bound):
        return f"Each step: {board.now.bound.text}."
    if board.now.bound.kind == "none":
        return "Default settings."
    return "Default settings: a bound takes an evaluator that you trust."


def _promise(board: Board) -> str:
    steps = fmt.all_steps(len(board.shown.steps))
    compares = board.judge is None or board.now.keep == "exact"
    against = "every tensor with the run" if compares else "the evaluator's metric with the run's"
    return f"Writes {steps}, decodes every tensor again, and compares {against}."


def _target(board: Board) -> str:
    """Return where the archive goes; the popover lets it be changed."""
    request = shrinking.chain_request(board.shown, board.now, board.judge, can_bound=board.can_bound)
    suggestion = services.suggested_name(board.shown, request)
    return str(st.session_state.get(f"shrink.target.{suggestion}") or suggestion)


def _start(board: Board, typed: str, device: str) -> None:
    state.clicked()
    request = shrinking.chain_request(board.shown, board.now, board.judge, device, can_bound=board.can_bound)
    target = answer(lambda: services.export_target(typed, request))
    if target is None:
        return
    requests = shrinking.write_requests(
        board.shown, board.now, str(target), board.judge, device, can_bound=board.can_bound
    )
    if answer(lambda: shrinking.start_writing(board.shown, requests, board.judge)) is not None:
        st.rerun()


def _more(board: Board) -> None:
    """Draw what few need: where to, on which device, and where steps and metrics come from."""
    shown = board.shown
    request = shrinking.chain_request(shown, board.now, board.judge, can_bound=board.can_bound)
    suggestion = services.suggested_name(shown, request)
    st.text_input("Write to", suggestion, key=f"shrink.target.{suggestion}")
    if not services.missing_cuda():
        choices.device("shrink")
    if st.button("A range, one step, or a pack", icon=":material/tune:", key="shrink.export"):
        state.go_to("archives", panel="write")
    folded("Metrics from a file", None, "logs", functools.partial(logs.show, shown))
    if shown.place.is_dir():
        folded("Steps from file names", None, "names", functools.partial(naming.show, shown))


def _basis(board: Board) -> None:
    """Say what the size rests on, or how far the trial is."""
    found, trial = board.tried, board.trial
    if trial is not None and trial.is_running:
        job_card.running(trial)
        st.caption("Two steps are tried to estimate the size. Nothing is written.")
        return
    if trial is not None and trial.state not in ("finished", "running", "queued"):
        job_card.stopped(trial, primary=False)
        return
    if found is None:
        if not state.was_asked_for():
            st.caption("A link alone starts nothing.")
            if st.button("Estimate the size", icon=":material/science:", key="shrink.try"):
                state.clicked()
                st.rerun()
        return
    tried = [fmt.count(int(step)) for step in found["tried"]]
    said = f"Estimated from {'steps' if len(tried) > 1 else 'step'} {' and '.join(tried)}."
    if why := found.get("not_judged"):
        said += f" The evaluator {'fails' if found.get('evaluator_failed') else 'tells no cost'}: {why}."
    st.caption(fmt.markdown(said))


def _result(board: Board, made: Written) -> None:
    """Draw what was written last: whether it is sound, and what it costs."""
    lost = [(Path(path).name, reason) for path, reason in made.unreadable.items()]
    problem.show_unreadable(lost, "They are not in the archive: do not delete their files.")
    found = made.comparison
    value = board.now.bound.of(_Worst(found)) if found is not None else None
    name = fmt.markdown(fmt.elided(made.chain.path.name, 40))
    size = f"{fmt.size(made.chain.nbytes)}, {fmt.ratio(made.chain.ratio_total)}"
    if made.problems:
        st.error(
            f"{name} is not sound: {fmt.counted(len(made.problems), 'problem')}.", icon=":material/error:"
        )
        for finding in made.problems[:_MOST_PROBLEMS]:
            problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    elif not board.now.bound.is_kept(value):
        kind = board.now.bound.kind.replace("_", " ")
        shown = fmt.percent(value) if kind != "divergence" else fmt.value(value or 0.0)
        st.warning(
            f"{name} is sound ({size}), but its {kind} is {shown}, beyond the bound.",
            icon=":material/warning:",
        )
    else:
        st.success(f"{name}: {size}. Decoded again and compared.", icon=":material/check_circle:")
    _by_step(board, made)
    with st.container(horizontal=True):
        if st.button("Open in Archives", icon=":material/inventory_2:", key="shrink.open"):
            state.go_to("archives", archive=str(made.chain.path), panel="frames")
        if found is not None and st.button(
            "Compare", icon=":material/compare_arrows:", key="shrink.compare", type="tertiary"
        ):
            state.go_to("archives", archive=str(made.chain.path), panel="compare")


class _Worst:
    """The figures of a comparison by the names of bounds."""

    def __init__(self, comparison: object) -> None:
        for name in ("restore_cost", "drop", "divergence"):
            setattr(self, name, getattr(comparison, f"max_{name}", None))


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
    kind, found = board.now.bound.kind, made.comparison
    costs = [] if found is None or kind == "none" else [(row.step, getattr(row, kind)) for row in found.steps]
    costs = [(step, value) for step, value in costs if value is not None]
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
        figure.update_layout(
            yaxis2={
                "overlaying": "y",
                "side": "right",
                "showgrid": False,
                "rangemode": "tozero",
                "tickmode": "auto",
                "nticks": 4,
            }
        )
    figure.update_xaxes(**steps_axis(5))
    largest = max((frame.nbytes for frame in frames), default=1)
    figure.update_layout(yaxis=byte_ticks(largest) | {"automargin": True})
    chart(figure, "shrink.steps", f"Bytes of {len(frames)} steps, and what a restore of each costs")
