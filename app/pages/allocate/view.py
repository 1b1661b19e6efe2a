"""Allocate: one picture of size against quality, one table of layers, and one search of the best bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import ASK_ABOVE_BYTES, Page, Subject
from inshrink_app.pages.allocate import allocating, editor, form, layers, picture
from inshrink_app.pages.allocate.allocating import Board
from inshrink_app.services import Edit, EvaluatorCode, Searched
from inshrink_app.widgets import ending, fmt, job_card, subject
from inshrink_app.widgets.choices import codec_labels, one_of_few
from inshrink_app.widgets.layout import answer, section

from inshrink_core.codec import DEFAULT_CODEC
from inshrink_core.request import listed
from inshrink_core.verbs.compress import Compress
from inshrink_core.verbs.search import Search

_MEASURING = "allocate.measuring"
_BOUNDS = ("max_drop", "max_divergence", "max_restore_cost", "evaluator", "trust_run")
_VIEWS = {"layers": "Layers", "settings": "Settings and overrides", "measured": "Measured and estimated"}


def render() -> None:
    """Draw the page."""
    shown = subject.require("Allocate")
    if shown is None:
        return
    if shown.kind == "archive":
        _archive(shown)
        return
    linked = services.linked_job(state.choice_text("job"), "allocate", shown.path)
    job = linked if linked is not None and linked.verb == "search" else None
    job = job or services.newest_job("allocate", "search", shown.path)
    with st.container(border=True):
        request, judge, trusted = _controls(shown, job)
        board = _board(shown, request, job, judge if trusted else None)
        if job is not None and not job.is_running and job.state != "finished":
            job_card.stopped(job, primary=False)
        _estimates(board)
        _edited(board, job)
    if job is not None:
        job_card.log(job)
    _snippet(shown, request, judge, by_step=board.found.is_best_by_step)
    applied = "With the configuration that you applied, if you did."
    ending.offer(ending.EXPORT._replace(why=applied), ending.COMPARE)


def _controls(shown: Subject, job: Job | None) -> tuple[Search, EvaluatorCode | None, bool]:
    """Draw the button that searches, what is searched for, and whose code judges; return what they say."""
    with st.container(horizontal=True, vertical_alignment="center"):
        place = st.container(width="content")
        with st.popover("What to search for", icon=":material/tune:"):
            asked = form.show(shown, services.steps_of(job, shown) if job is not None else shown.steps)
        judge, trusted = services.named_judge(shown)
        request = dataclasses.replace(asked, **services.judged_by(judge))
        st.caption(fmt.markdown(_asked(request)))
    is_running = job is not None and job.is_running
    with place:
        n_steps = len(_steps(shown, request))
        tip = f"Encodes and evaluates {fmt.counted(n_steps, 'step')} for each trial."
        if is_running:
            tip = "A search is running."
        elif judge is None:
            tip = "A search needs an evaluator: name one, or make one, under Evaluator."
        elif not trusted:
            tip = "Confirm first, under Evaluator, that you trust its code."
        if st.button(
            "Search again" if job is not None else "Search",
            type="primary" if trusted else "secondary",
            icon=":material/search:",
            disabled=is_running or not trusted or not n_steps,
            help=tip,
        ):
            state.clicked()
            trusted_code = judge.trusted if judge is not None else ""
            work = Work.asking([request], shown.path, "allocate", "search", trusted=trusted_code)
            state.publish(job=services.start_job(work).job_id)
            st.rerun()
    if job is not None and is_running:
        job_card.running(job)
    return request, judge, trusted


def _steps(shown: Subject, request: Search) -> tuple[int, ...]:
    """Return the steps that are searched, all of them where the request names none."""
    return tuple(map(int, listed(request.steps) or shown.steps))


def _board(shown: Subject, request: Search, job: Job | None, judge: EvaluatorCode | None) -> Board:
    """Gather what was searched, measured and estimated of these steps.

    Estimates begin by themselves once the reader clicked anywhere; those that were made before anything was
    measured are made anew once trials tell what an error costs.
    """
    steps, codec = _steps(shown, request), request.codec or ""
    limits, target = services.limits_of(request), request.target_ratio
    found = Searched(points=(), steps=steps, limits=limits, target_ratio=target)
    n_left_out = 0
    if job is not None:
        before = services.searched_before(shown, job)
        searched = before or services.searched(job, services.steps_of(job, shown))
        n_left_out = len(searched.points) if searched.steps != steps else 0
        found = found if n_left_out else searched
    own = () if judge is None else services.measured_configs(shown, steps, judge, found)
    published: tuple[services.SearchPoint, ...] = ()
    if judge is not None:
        published = services.baselines(services.job_of(services.baselines_work(shown, steps, judge)))
    archives = services.measured_archives(shown, judge, steps)
    # The archive that has what was found for each step is drawn once.
    ratios = {fmt.ratio(one.ratio) for one in archives if not one.config}
    searched_points = [one for one in found.points if one.config or fmt.ratio(one.ratio) not in ratios]
    measured = (*searched_points, *own, *published, *archives)
    work = services.estimating_work(shown, steps, codec, is_calibrated=bool(measured))
    guessing = services.job_of(work)
    if (
        guessing is None
        and steps
        and state.was_clicked()
        and allocating.weight_bytes(shown) <= ASK_ABOVE_BYTES
    ):
        guessing = services.start_job(work)
    rates = allocating.rates(shown, guessing, codec)
    if rates is None and measured:  # Those from before anything was measured, while they are made anew.
        earlier = services.job_of(services.estimating_work(shown, steps, codec, is_calibrated=False))
        rates, guessing = allocating.rates(shown, earlier, codec), guessing or earlier
    points = (*measured, *services.estimates(guessing))
    return Board(
        shown=shown,
        steps=steps,
        codec=codec,
        points=points,
        rates=None if rates is None else allocating.calibrated(shown, rates, points),
        limits=_limits(dataclasses.replace(found, points=measured)),
        found=found,
        n_other_steps=n_left_out,
        judge=judge,
        edit=Edit(str(shown.path), {}),
    )


def _limits(found: Searched) -> dict[str, float]:
    """Return the bounds on the drop and the divergence, which stands in for the restore cost."""
    limits = {name: found.limits.get(name) for name in ("drop", "divergence")}
    limits["divergence"] = limits["divergence"] or found.as_divergence()
    return {name: limit for name, limit in limits.items() if limit}


def _estimates(board: Board) -> None:
    """Offer to estimate the codec from fine to coarse, or draw how far that is."""
    is_calibrated = any(not one.is_estimated for one in board.points)
    work = services.estimating_work(board.shown, board.steps, board.codec, is_calibrated=is_calibrated)
    job = services.job_of(work)
    if job is None and board.steps:
        tip = (
            f"Encodes a sample of the weights with {codec_labels()[board.codec]} from fine to coarse, and "
            "tells what each layer takes. No evaluator is asked, so no code of the run is executed."
        )
        job_card.start_button("Estimate without measuring", work, "calculate", help=tip)
    if job is not None and job.is_running:
        st.caption("Estimating what each layer takes")
        job_card.running(job)
    else:
        job_card.settled(job, "")


@st.fragment
def _edited(board: Board, job: Job | None) -> None:
    """Draw the picture and what is changed by hand. A click redraws this part alone."""
    board = board._replace(edit=editor.current(board, job))
    board = board._replace(numbers=answer(lambda: allocating.numbers_of(board), "Estimating…"))
    left, right = st.columns([3, 2], gap="medium")
    with left:
        picture.show(board, job)
        _said(board.found, job)
    with right:
        editor.way_back(board)
        layers.show_numbers(board)
        layers.show_handles(board)
        editor.offer(board)
        _measure(board)
    view = one_of_few("allocate", "Table", "table", _VIEWS, "layers", label_visibility="collapsed")
    if view == "settings":
        editor.show_settings(board)
    elif view == "measured":
        picture.show_points(board)
    else:
        layers.show_table(board)


def _said(found: Searched, job: Job | None) -> None:
    """Say what the search came to, and what decided."""
    best = found.best
    is_told = found.metric or (job is not None and job.state == "finished")  # Not of one that was cut short.
    if job is None or job.is_running or not found.points or not is_told:
        return
    if best is None:
        asked = "reaches the ratio" if found.target_ratio is not None else "keeps the bounds at every step"
        st.warning(
            f"No configuration that was tried {asked}. Loosen what is asked for, search another codec, or "
            "allow more configurations.",
            icon=":material/warning:",
        )
    else:
        took = f"{fmt.counted(found.evaluations, 'evaluation')} in {fmt.duration(found.seconds)}"
        figures = [f"{fmt.ratio(best.ratio)} of the weights", f"worst drop {fmt.percent(best.drop)}"]
        if best.restore_cost is not None:
            figures.append(f"restore cost {fmt.percent(best.restore_cost)}")
        st.caption(fmt.markdown(f"Best of the search: {best.label} · {', '.join(figures)} · {took}."))
    notes = list(found.notes)
    if found.uninformative:
        few, every = fmt.counted(len(found.uninformative), "step"), fmt.count(len(found.steps))
        notes.append(
            f"at {few} of {every} the previous checkpoint keeps the bounds too: they say nothing there"
        )
    for note in notes:
        st.caption(fmt.markdown(fmt.sentence(note)))


def _measure(board: Board) -> None:
    """Measure what stands in the editor, where the reader wants that; and the published codecs."""
    shown, steps, judge = board.shown, board.steps, board.judge
    if judge is None or not steps:
        return
    config: Mapping[str, Any] = board.edit.config
    wanted = st.toggle(
        "Measure each change",
        key=_MEASURING,
        help=f"In the background {fmt.counted(len(steps), 'step')} are written with what stands here for the "
        "evaluator, and the point joins those that were measured. Another change starts it again.",
    )
    work = services.measuring_work(shown, steps, judge, config)
    job = services.job_of(work)
    if not wanted:
        if job is not None and job.is_running:
            services.stop_job(job)
    elif job is None or job.state == "cancelled":
        job_card.running(services.start_measuring(work))
    elif job.is_running:
        job_card.running(job)
    elif job.state != "finished":
        job_card.stopped(job, primary=False)
    baselines = services.baselines_work(shown, steps, judge)
    published = services.job_of(baselines)
    if published is None and len(steps) > 1:
        tip = (
            "Lossless, uniform 8 and 4 bit, and the published codecs with their own settings, on the same "
            "steps."
        )
        job_card.start_button("Measure published codecs", baselines, "straighten", again=False, help=tip)
    else:
        job_card.settled(published, "Measuring published codecs")


def _snippet(shown: Subject, request: Search, judge: EvaluatorCode | None, *, by_step: bool = False) -> None:
    """Show the same without the explorer, and compressing with what is found."""
    path = str(shown.place).rstrip("/")
    search = dataclasses.replace(request, output=f"{path}-search.json")
    archive = Path(f"{path}-searched.inshrink")
    asked: dict[str, Any] = {"config": f"{path}-search.json"}
    if by_step:  # The file holds one configuration; under the bounds each step gets its own.
        asked = {name: getattr(request, name) for name in _BOUNDS}
    compress = Compress(str(shown.path), str(archive), **asked)
    compare = services.comparison(shown, [archive], _steps(shown, request), judge)
    estimates = services.estimate_levels(shown, _steps(shown, request), request.codec or "")
    ending.requests([search, compress, compare, estimates])


def _archive(shown: Subject) -> None:
    """Say that a search needs the originals, and lead to them where they are known."""
    original = services.original_of(shown)
    with section("A search needs the original run"):
        st.write(
            "What an archive restores is rounded already. A search encodes the original checkpoints anew, "
            "with one configuration after the other, and compares with them."
        )
        if original is not None:
            st.code(str(original.path), language=None, wrap_lines=True)
            if st.button("Search on this run", type="primary", icon=":material/search:"):
                state.set_run(str(original.path))
                st.rerun()
        else:
            subject.open_another()
    named = original if original is not None else shown
    _snippet(named, Search(str(named.path), codec=DEFAULT_CODEC, trust_run=True), None)


def _asked(asked: Any) -> str:
    """Say what a search is asked for."""
    told = []
    if asked.target_ratio is not None:
        told.append(f"smallest divergence at a ratio ≥ {fmt.ratio(asked.target_ratio)}")
    if asked.max_divergence is not None:
        free = math.isinf(asked.max_divergence)
        told.append("any divergence" if free else f"divergence ≤ {fmt.value(asked.max_divergence)} nats")
    told += [f"drop ≤ {fmt.percent(asked.max_drop)}"] if asked.max_drop is not None else []
    cost = asked.bounds.max_restore_cost
    told += [f"restore cost ≤ {fmt.percent(cost)}"] if cost is not None else []
    told += [asked.codec, "all steps" if asked.steps is None else fmt.counted(len(asked.steps), "step")]
    return " · ".join(told)


PAGE = Page("Allocate", ":material/tune:", render, former=("search",))
