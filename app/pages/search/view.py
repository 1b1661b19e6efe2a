"""Search: the coarsest configuration whose restored steps keep a bound, found by measuring."""

from __future__ import annotations

import math

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.pages.search import editor as search_editor
from inshrink_app.pages.search import form as search_form
from inshrink_app.pages.search import form as search_snippets
from inshrink_app.pages.search import result as search_result
from inshrink_app.pages.search.tables import CODECS, Searched, SearchPoint, SearchRequest
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import evaluator_consent, job_card, snippets, subject
from inshrink_app.widgets.formatting import count_text, markdown_text
from inshrink_app.widgets.tables import Subject

OPEN_PAGE = "pages/open/view.py"

_BASELINES_HELP = (
    "Lossless, uniform 8 and 4 bit, and the published codecs with their own settings, on the same steps."
)


def render() -> None:
    """Draw the page."""
    shown = subject.require("Search")
    if shown is None:
        return
    if shown.kind == "archive":
        _archive(shown)
        return
    linked = services.linked_job(state.choice_text("job"), "search", shown.path)
    if linked is not None and linked.request.get("kind") != "search":
        linked = None
    job = linked or services.newest_search(shown)
    left, right = st.columns([2, 3], gap="medium")
    with left:
        request = search_form.show(shown)
        steps = request.steps if job is None else tuple(job.request.get("steps", ()))
        judge, compared = _launch(shown, request, job, steps)
    with right:
        guessing = services.estimates_job(shown, request.steps, request.codec)
        compared = (*compared, *services.estimates(guessing))
        found = _found(request, job, compared)
        _estimates(shown, request, guessing)
    if found is not None:
        _table(found, compared)
    search_editor.show(shown, found, compared, request.steps, request.codec)
    snippets.show(*search_snippets.of(shown, request, judge))


def _archive(shown: Subject) -> None:
    """Say that a search needs the originals, and lead to them where they are known."""
    original = services.original_of(shown)
    with st.container(border=True):
        st.header("A search needs the original run", anchor=False)
        st.write(
            "What an archive restores is rounded already. A search encodes the original checkpoints anew, "
            "with one configuration after the other, and compares with them."
        )
        if original is not None:
            st.code(str(original.path), language=None, wrap_lines=True)
            if st.button("Search on this run", type="primary", icon=":material/search:"):
                state.set_run(str(original.path))
                st.rerun()
        elif st.button("Open another run", type="primary", icon=":material/folder_open:"):
            state.set_run(None)
            st.switch_page(OPEN_PAGE)
    named = original if original is not None else shown
    snippets.show(*search_snippets.of(named, SearchRequest(steps=named.steps), None))


def _launch(
    shown: Subject, request: SearchRequest, job: Job | None, steps: tuple[int, ...]
) -> tuple[EvaluatorCode | None, tuple[SearchPoint, ...]]:
    """Ask whose code judges and whether it may, and begin; return it, and the baselines it judged."""
    with st.container(border=True):
        st.header("What judges", anchor=False)
        judge, trusted = evaluator_consent.ask(shown)
        if judge is None:
            return None, ()
        is_running = job is not None and job.is_running
        tip = f"Encodes and evaluates {count_text(len(request.steps))} steps for each configuration it tries."
        if is_running:
            tip = "A search is running."
        elif not trusted:
            tip = "Say first that you trust this code."
        with st.container(horizontal=True):
            if st.button(
                "Search again" if job is not None else "Search",
                type="primary",
                icon=":material/search:",
                disabled=is_running or not trusted or not request.steps,
                help=tip,
            ):
                started = services.start_search(shown, request, judge)
                state.publish(job=started.job_id)
                search_editor.forget()
                st.rerun()
            measured = services.baselines_job(shown, steps, judge)
            if measured is None and st.button(
                "Measure baselines",
                icon=":material/straighten:",
                disabled=is_running or not trusted or not steps,
                help=_BASELINES_HELP,
            ):
                services.start_baselines(shown, steps, judge)
                st.rerun()
        if measured is not None and measured.is_running:
            job_card.running(measured, "Measuring baselines")
        elif measured is not None and measured.state != "finished":
            st.caption("Baselines")
            job_card.stopped(measured, primary=False)
    return judge, services.baselines(measured)


def _found(request: SearchRequest, job: Job | None, compared: tuple[SearchPoint, ...]) -> Searched | None:
    """Draw what runs or ran last, and the baselines of its steps; return what was found."""
    with st.container(border=True):
        if job is None:
            return _nothing_yet(request, compared)
        st.header("Searching" if job.is_running else "What was found", anchor=False)
        st.caption(markdown_text(_asked(job)))
        if job.is_running:
            search_result.live(job, compared)
            return None
        if job.state != "finished":
            job_card.stopped(job, primary=False)
        found = services.searched(job)
        if job.state == "finished":
            search_result.facts(found)
        if found.points:
            search_result.chart(found, compared)
        job_card.log(job)
    return found


def _estimates(shown: Subject, request: SearchRequest, job: Job | None) -> None:
    """Offer to estimate the codec from fine to coarse, or draw how far that is."""
    if job is not None and job.is_running:
        job_card.running(job, "Estimating")
        return
    if job is not None and job.state != "finished":
        job_card.stopped(job, primary=False)
        return
    if job is None and st.button(
        "Estimate without measuring",
        icon=":material/calculate:",
        disabled=not request.steps,
        help=f"Encodes a sample of the weights with {CODECS[request.codec][0]} from fine to coarse. No "
        "evaluator is asked, so no code of the run is executed.",
    ):
        services.start_estimates(shown, request.steps, request.codec)
        st.rerun()


def _table(found: Searched, compared: tuple[SearchPoint, ...]) -> None:
    """List what is on the scatter."""
    n = len(found.points) + len(compared)
    if n:
        label = f"Configurations ({count_text(n)})"
        with st.expander(label, icon=":material/table_rows:", expanded=True):
            search_result.table(found, compared)


def _asked(job: Job) -> str:
    """Say what a search was asked for."""
    request = job.request
    words = [str(request.get("codec", "")), f"{count_text(len(request.get('steps', ())))} steps"]
    if request.get("max_drop") is not None:
        words.insert(0, f"drop ≤ {100 * float(request['max_drop']):g} %")
    if request.get("max_divergence") is not None:
        limit = float(request["max_divergence"])
        words.insert(0, f"divergence ≤ {limit:g} nats" if math.isfinite(limit) else "any divergence")
    if request.get("target_ratio") is not None:
        words.insert(0, f"smallest divergence at a ratio ≥ {float(request['target_ratio']):g}×")
    if request.get("strategy") not in (None, "auto"):
        words.append(str(request["strategy"]))
    return " · ".join(words)


def _nothing_yet(request: SearchRequest, compared: tuple[SearchPoint, ...]) -> Searched | None:
    """Say what will stand here; baselines stand here already where they were measured."""
    st.header("Nothing was searched yet", anchor=False)
    st.write(
        "How coarse may a frame be? As coarse as what it restores is still good enough. The search encodes "
        "the steps in memory, asks the evaluator, and goes on to the largest ratio that keeps what you "
        "promise. Trials appear here as they are measured."
    )
    if not compared:
        st.caption("Nothing is written but a log of the trials, which the next search goes on from.")
        return None
    limits = {name: limit for name, limit in request.limits().items() if math.isfinite(limit)}
    found = Searched(points=(), steps=request.steps, **limits)
    search_result.chart(found, compared)
    return found


render()
