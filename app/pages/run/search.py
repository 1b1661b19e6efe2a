"""A search for the best bits: its options, progress and result."""

from __future__ import annotations

import dataclasses
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject
from inshrink_app.pages.run.board import Board
from inshrink_app.services import Chosen, EvaluatorCode
from inshrink_app.widgets import fmt, job_card
from inshrink_app.widgets.choices import (
    codec_labels,
    device,
    ends_of_range,
    one_of_few,
    one_of_many,
)

from inshrink_core.request import listed
from inshrink_core.verbs.search import Search

_RATIO = 30.0
_MEASURING = "search.measuring"


def show(board: Board) -> None:
    """Draw the search button, its options, progress and result."""
    shown, judge, job = board.shown, board.judge, board.search
    with st.container(horizontal=True, vertical_alignment="center"):
        place = st.container(width="content")
        with st.popover("Search options", icon=":material/tune:"):
            asked = _options(shown, board.now, board.steps)
        request = dataclasses.replace(asked, **services.judged_by(judge))
        can_search = judge is not None and (request.target_ratio is not None or bool(request.bounds.limits))
        n_steps = len(listed(request.steps) or shown.steps)
        tip = f"Writes and evaluates {fmt.counted(n_steps, 'step')} for each trial, in memory."
        if judge is None:
            tip = "A search needs an evaluator that you trust; choose it in the header."
        elif not can_search:
            tip = "A search needs a bound, in the header, or a ratio, in its options."
        pressed = place.button(
            "Search again" if job is not None else "Search the best bits",
            icon=":material/search:",
            disabled=not can_search or (job is not None and job.is_running),
            help=tip,
            key="search.start",
        )
        if pressed:
            _start(shown, request, judge)
        if judge is not None:
            _measure(board, judge)
        if job is not None and job.is_running:
            job_card.running(job)
    if job is not None and not job.is_running:
        job_card.settled(job, "")
        _result(board, job)


def _start(shown: Subject, request: Search, judge: EvaluatorCode | None) -> None:
    state.clicked()
    trusted = judge.trusted if judge is not None else ""
    work = Work.asking([request], shown.path, "run", "search", trusted=trusted)
    state.publish(job=services.start_job(work).job_id)
    st.rerun()


def _options(shown: Subject, now: Chosen, before: tuple[int, ...]) -> Search:
    """Draw the options; the bound is the header's, unless the search has a target ratio."""
    fields: dict[str, Any] = dict(now.bound.fields)
    if st.toggle("Reach a ratio instead of a bound", key="search.by_ratio"):
        ratio = st.number_input("Ratio of the weights", 1.0, 100_000.0, _RATIO, 1.0, key="search.ratio")
        fields = {"target_ratio": ratio}
        st.caption("Finds the smallest divergence among the configurations that reach it.")
    names = codec_labels(searched=True)
    fields["codec"] = one_of_many("search", "Codec", "codec", names, next(iter(names)))
    steps = _steps(shown, before)
    if "target_ratio" not in fields:
        fields["budget"] = st.number_input(
            "Most configurations to try", 1, 10_000, None, key="search.budget", placeholder="No limit"
        )
    fields["steps"] = None if steps == shown.steps else steps
    return Search(str(shown.path), device=device("search"), **fields)


def _steps(shown: Subject, before: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the choice of steps. They are consecutive, since deltas between neighbours are small."""
    if len(shown.steps) == 1:
        return shown.steps
    usual = "all" if before == shown.steps else "range"
    if one_of_few("search", "Steps", "chain", {"all": "All steps", "range": "A range"}, usual) == "all":
        return shown.steps
    first, last = ends_of_range("search", shown.steps, before)
    return tuple(step for step in shown.steps if first <= step <= last)


def _measure(board: Board, judge: EvaluatorCode) -> None:
    """Draw the buttons that measure the edited bits and the published codecs."""
    shown, steps = board.shown, board.steps
    wanted = st.toggle(
        "Measure each change",
        key=_MEASURING,
        width="content",
        help=f"Writes and evaluates {fmt.counted(len(steps), 'step')} in the background. Another change "
        "starts it again.",
    )
    baselines = services.baselines_work(shown, steps, judge)
    published = services.job_of(baselines)
    if published is None and len(steps) > 1:
        tip = "Lossless, uniform 8 and 4 bit, and the published codecs, on the same steps."
        job_card.start_button(
            "Measure published codecs", baselines, "straighten", again=False, help=tip, type="tertiary"
        )
    job_card.settled(published, "Measuring published codecs")
    work = services.measuring_work(shown, steps, judge, board.config)
    job = services.job_of(work)
    if wanted:
        if job is None or job.state == "cancelled":
            job = services.start_measuring(work)
        job_card.settled(job, "")
    elif job is not None and job.is_running:
        services.stop_job(job)


def plain(board: Board) -> Search:
    """Return the search of all steps within the bound, with default options."""
    fields: dict[str, Any] = {**board.now.bound.fields, **services.judged_by(board.judge)}
    return Search(str(board.shown.path), codec=board.codec, **fields)


def _result(board: Board, job: Job) -> None:
    """Draw the result and offer its best configuration; taking it is one edit, which *Undo* reverts."""
    found = board.found
    best = found.best
    if not found.points or not (found.metric or job.state == "finished"):  # It may have been cancelled.
        return
    if best is None:
        asked = "reaches the ratio" if found.target_ratio is not None else "keeps the bound at every step"
        st.warning(
            f"No configuration {asked}. Loosen the bound, choose another codec or try more configurations.",
            icon=":material/warning:",
        )
        return
    took = f"{fmt.counted(found.evaluations, 'evaluation')} in {fmt.duration(found.seconds)}"
    figures = [f"{fmt.ratio(best.ratio)} of the weights", f"drop {fmt.percent(best.drop)}"]
    if best.restore_cost is not None:
        figures.append(f"restore cost {fmt.percent(best.restore_cost)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        text = f"Search result: {best.label} · {', '.join(figures)} · {took}."
        st.caption(fmt.markdown(text), width="content")
        if board.now.config != best.config:
            args = (board.shown, dict(best.config), job.job_id)
            st.button("Take it", icon=":material/star:", key="search.take", on_click=_take, args=args)
    notes = list(found.notes)
    if found.uninformative:
        few, total = fmt.counted(len(found.uninformative), "step"), fmt.count(len(found.steps))
        notes.append(
            f"at {few} of {total} the weights hardly moved: the previous checkpoint keeps the bound, too"
        )
    if notes:
        st.caption(fmt.markdown(" ".join(map(fmt.sentence, notes))))


def _take(shown: Subject, config: dict[str, Any], job_id: str) -> None:
    state.clicked()
    services.change_bits(shown, config, "the search", searched=job_id)
