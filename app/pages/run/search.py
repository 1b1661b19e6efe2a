"""A search for the best bits: its options, progress and result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject
from inshrink_app.pages.run.board import Board, edit_bits
from inshrink_app.services import Chosen, EvaluatorCode
from inshrink_app.widgets import fmt, job_card
from inshrink_app.widgets.choices import codec_labels, ends_of_range, one_of_many

from inshrink_core.request import listed
from inshrink_core.verbs.search import Search

_RATIO = 30.0


def show(board: Board) -> None:
    """Draw the search button, its options, progress and result."""
    shown, evaluator, job = board.shown, board.evaluator, board.search
    with st.container(horizontal=True, vertical_alignment="center"):
        place = st.container(width="content")
        with st.popover("Search options", icon=":material/tune:"):
            asked = _options(shown, board.now, board.steps)
        request = dataclasses.replace(asked, **services.evaluator_fields(evaluator))
        can_search = evaluator is not None and (
            request.target_ratio is not None or bool(request.bounds.limits)
        )
        n_steps = len(listed(request.steps) or shown.steps)
        tip = f"Writes and evaluates {fmt.counted(n_steps, 'step')} for each trial, in memory."
        if evaluator is None:
            tip = "A search needs an evaluator that you trust; choose it in the header."
        elif not can_search:
            tip = "A search needs a bound, in the header, or a ratio, in its options."
        pressed = place.button(
            "Search again" if job is not None else "Search for the best bits",
            icon=":material/search:",
            disabled=not can_search or (job is not None and job.is_running),
            help=tip,
            key="search.start",
        )
        if pressed:
            _start(shown, request, evaluator)
        if evaluator is not None:
            _baselines(board, evaluator)
    job_card.settled(job, parts=job_card.n_rows)
    if job is not None and not job.is_running:
        _result(board, job)


def _start(shown: Subject, request: Search, evaluator: EvaluatorCode | None) -> None:
    state.clicked()
    trusted = evaluator.trusted if evaluator is not None else ""
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
    if len(shown.steps) > 1:  # They are consecutive, since deltas between neighbours are small.
        first, last = ends_of_range("search", shown.steps, before)
        steps = tuple(step for step in shown.steps if first <= step <= last)
        fields["steps"] = None if steps == shown.steps else steps
    if "target_ratio" not in fields:
        fields["budget"] = st.number_input(
            "Most configurations to try", 1, 10_000, None, key="search.budget", placeholder="No limit"
        )
    return Search(str(shown.path), **fields)


def _baselines(board: Board, evaluator: EvaluatorCode) -> None:
    """Draw the button that measures the published codecs."""
    work = services.baselines_work(board.shown, board.steps, evaluator)
    job = services.job_of(work)
    if job is None and len(board.steps) > 1:
        look: dict[str, Any] = {"type": "tertiary", "again": False}
        tip = "Lossless, uniform 8 and 4 bit, and the published codecs, on the same steps."
        job_card.start_button("Measure published codecs", work, "straighten", help=tip, **look)
    job_card.settled(job, "Measuring published codecs")


def plain(board: Board) -> Search:
    """Return the search of all steps within the bound, with default options."""
    fields: dict[str, Any] = {**board.now.bound.fields, **services.evaluator_fields(board.evaluator)}
    return Search(str(board.shown.path), codec=board.codec, **fields)


def _result(board: Board, job: Job) -> None:
    """Draw the result and offer its best configuration; taking it is one edit, which *Undo* reverts."""
    found = board.found
    best = found.best
    if not (found.points and found.report):  # It may have been cancelled.
        return
    if best is None:
        asked = "reaches the ratio" if found.target_ratio is not None else "keeps the bound at every step"
        st.warning(
            f"No configuration {asked}. Loosen the bound, choose another codec or try more configurations.",
            icon=":material/warning:",
        )
        return
    report = found.report
    took = f"{fmt.counted(report['evaluations'], 'evaluation')} in {fmt.duration(report['seconds'])}"
    figures = [f"{fmt.ratio(best.ratio)} of the weights", f"drop {fmt.percent(best.drop)}"]
    if best.restore_cost is not None:
        figures.append(f"restore cost {fmt.percent(best.restore_cost)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        text = f"Search result: {best.label} · {', '.join(figures)} · {took}."
        notes = fmt.markdown(" ".join(map(fmt.sentence, _notes(report))))
        st.caption(fmt.markdown(text), width="content", help=notes or None)
        if board.now.config != best.config:
            args = (board.shown, dict(best.config), "the search")
            st.button("Take it", icon=":material/star:", key="search.take", on_click=edit_bits, args=args)


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on a finished search: the deciding step, the default's size, and the engine's notes."""
    if binding := report.get("binding"):
        figure, usage = str(binding["figure"]).replace("_", " "), fmt.percent(binding["usage"])
        yield f"step {binding['step']} decides: its {figure} takes {usage} of the bound"
    if (default := report.get("default")) and report.get("target_ratio") is None:
        check = "keeps the bounds" if default["keeps"] else "breaks them"
        yield f"the default stores {fmt.ratio(default['ratio_weights'])} of the weights, and {check}"
    yield from map(str, report.get("notes", ()))
    if not_discriminative := report.get("not_discriminative"):
        few, total = fmt.counted(len(not_discriminative), "step"), fmt.count(len(report["steps"]))
        yield f"at {few} of {total} the weights hardly moved: the previous checkpoint keeps the bound, too"
