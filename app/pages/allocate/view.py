"""Allocate: bits for every layer, by hand and by a search of the coarsest that keeps a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.model.page import Page
from inshrink_app.model.subject import Subject
from inshrink_app.pages.allocate import allocating
from inshrink_app.pages.allocate import editor as search_editor
from inshrink_app.pages.allocate import figure as search_figure
from inshrink_app.pages.allocate import form as search_form
from inshrink_app.pages.allocate import layers as allocate_layers
from inshrink_app.pages.allocate.curve import given_up, steps_text
from inshrink_app.services import EvaluatorCode, Searched, SearchPoint, SearchRequest, front
from inshrink_app.widgets import ending, evaluator_consent, fmt, job_card, listing, subject
from inshrink_app.widgets.choices import codec_labels
from inshrink_app.widgets.layout import chart, facts, section

if TYPE_CHECKING:
    from inshrink_core.search.rates import Rates

_MEASURING = "allocate.measuring"
_CHART, _TABLE, _FIGURE = "search.chart", "search.table", "search.figure"
_FIGURES = {"drop": "Drop", "divergence": "Divergence"}
_COLUMNS = {
    "configuration": "label",
    "figures": "basis",
    "ratio": "ratio",
    "drop": "drop",
    "divergence": "divergence",
    "restore cost": "restore_cost",
    "steps": "n_steps",
    "gain": "gain",
    "noise": "noise",
}
"""What stands in the table of a `SearchPoint`, by heading."""


_BASELINES_HELP = (
    "Lossless, uniform 8 and 4 bit, and the published codecs with their own settings, on the same steps."
)


def render() -> None:
    """Draw the page."""
    shown = subject.require("Allocate")
    if shown is None:
        return
    if shown.kind == "archive":
        _archive(shown)
        return
    linked = services.linked_job(state.choice_text("job"), "allocate", shown.path)
    job = linked if linked is not None and linked.verb == "search" else services.newest_search(shown)
    by_hand = st.container()
    left, right = st.columns([2, 3], gap="medium")
    with left:
        request = search_form.show(shown)
        steps = request.steps if job is None else services.steps_of(job, shown)
        judge, trusted, compared = _launch(shown, request, job, steps)
    with right:
        before = None if job is None else services.searched_before(shown, job)
        known = None if job is None else before or services.searched(job, steps)
        is_calibrated = bool(compared or (known is not None and known.points))
        guessing = services.estimates_job(shown, request.steps, request.codec, is_calibrated=is_calibrated)
        own = () if judge is None else services.measured_configs(shown, steps, judge, known)
        compared = (*compared, *services.estimates(guessing), *own)
        found = _found(request, job, known, compared, is_earlier=before is not None)
    if found is not None:
        _table(found, compared)
    with by_hand:
        _estimates(shown, request, guessing, is_calibrated=is_calibrated)
        rates = allocating.rates(shown, guessing, request.codec)
        if rates is None and is_calibrated:  # Those from before the trials, while they are made anew.
            earlier = services.estimates_job(shown, request.steps, request.codec, is_calibrated=False)
            rates = allocating.rates(shown, earlier, request.codec)
        if rates is not None:
            known_points = found.points if found is not None else ()
            archives = services.measured_archives(shown, judge)
            rates = allocating.calibrated(shown, rates, (*known_points, *compared, *archives))
        _edited(shown, found, compared, request, rates, judge if trusted else None)
    job_card.of_page("allocate", shown.path)
    _snippet(shown, request, judge)
    ending.offer(
        ending.Next(
            "Write an archive: Export", "export", "With the configuration that you applied, if you did."
        ),
        ending.Next(
            "Is it good enough? Restore & compare", "compare", "What a restore of an archive really costs."
        ),
    )


@st.fragment
def _edited(
    shown: Subject,
    found: Searched | None,
    compared: tuple[SearchPoint, ...],
    request: SearchRequest,
    rates: Rates | None,
    judge: EvaluatorCode | None,
) -> None:
    """Draw what is changed by hand: bits of layers, and settings. A click redraws this part alone."""
    points = (*(found.points if found is not None else ()), *compared)
    edit = search_editor.current(shown, found, points, request.codec)
    allocate_layers.show(shown, edit, points, rates, _limits(found, request))
    if judge is not None:
        steps = found.steps if found is not None and found.steps else request.steps
        _measure(shown, steps, judge, edit.config)
    search_editor.show(shown, edit, found, points, request.steps, rates)


def _measure(shown: Subject, steps: tuple[int, ...], judge: EvaluatorCode, config: Mapping[str, Any]) -> None:
    """Measure what stands in the editor, where the reader wants that; the next change ends it."""
    wanted = st.toggle(
        "Measure each change in the background",
        key=_MEASURING,
        disabled=not steps,
        help=f"Encodes {fmt.counted(len(steps), 'step')} with what stands here and asks the evaluator; the "
        "point joins those that were measured. Another change starts it again.",
    )
    job = services.measured_job(shown, steps, judge, config) if steps else None
    if not wanted:
        if job is not None and job.is_running:
            services.stop_job(job)
    elif job is None or job.state == "cancelled":
        _measuring(services.start_measuring(shown, steps, judge, config))
    elif job.is_running:
        _measuring(job)
    elif job.state != "finished":
        job_card.stopped(job, primary=False)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _measuring(job: Job) -> None:
    """Draw how far that is."""
    job_card.progress(job_card.current(job))


def _limits(found: Searched | None, request: SearchRequest) -> dict[str, float]:
    """Return the bounds that the page goes by: those of the search, else those that are asked for."""
    if found is not None and found.points:
        bounds = {name: found.bound(name) for name in _FIGURES}
        bounds["divergence"] = bounds["divergence"] or found.as_divergence()
        return {name: bound for name, bound in bounds.items() if bound}
    from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE

    asked = request.limits()
    limits = {name: asked[f"max_{name}"] for name in _FIGURES if f"max_{name}" in asked}
    if request.goal == "drop":
        limits.setdefault("divergence", DEFAULT_MAX_DIVERGENCE)
    return {name: limit for name, limit in limits.items() if 0 < limit < math.inf}


def _snippet(shown: Subject, request: SearchRequest, judge: EvaluatorCode | None) -> None:
    """Show the same without the explorer, and compressing with what is found."""
    from inshrink_core.verbs.compress import Compress

    path = str(shown.place).rstrip("/")
    search = services.search_request(shown, request, judge, f"{path}-search.json")
    archive = Path(f"{path}-searched.inshrink")
    compress = Compress(str(shown.path), str(archive), config=f"{path}-search.json")
    compare = services.comparison(shown, [archive], request.steps, judge)
    estimates = services.estimate_levels(shown, request.steps, request.codec)
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
    _snippet(named, SearchRequest(steps=named.steps), None)


def _launch(
    shown: Subject, request: SearchRequest, job: Job | None, steps: tuple[int, ...]
) -> tuple[EvaluatorCode | None, bool, tuple[SearchPoint, ...]]:
    """Ask whose code judges and whether it may, and begin; return both, and the baselines it judged."""
    with section("Evaluator"):
        judge, trusted = evaluator_consent.ask(shown)
        if judge is None:
            st.caption(
                "Bits can be allocated without one: *Estimate without measuring* judges every layer by a "
                "proxy, its rounding error weighted with Fisher or, without second moments, with movement. "
                "Trials of an evaluator calibrate it."
            )
            return None, False, ()
        is_running = job is not None and job.is_running
        tip = f"Encodes and evaluates {fmt.count(len(request.steps))} steps for each configuration it tries."
        if is_running:
            tip = "A search is running."
        elif not trusted:
            tip = "Confirm first that you trust this code."
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
                disabled=is_running or not trusted or len(steps) < 2,
                help=_BASELINES_HELP,
            ):
                services.start_baselines(shown, steps, judge)
                st.rerun()
        job_card.settled(measured, "Measuring baselines")
    return judge, trusted, services.baselines(measured)


def _found(
    request: SearchRequest,
    job: Job | None,
    found: Searched | None,
    compared: tuple[SearchPoint, ...],
    *,
    is_earlier: bool,
) -> Searched | None:
    """Draw what runs or ran last, and the baselines of its steps; return what was found.

    Where the last search did not finish, what the one before it found stays, and its own trials join that.
    """
    with st.container(border=True):
        if job is None or found is None:
            return _nothing_yet(request, compared)
        st.header("Searching" if job.is_running else "What was found", anchor=False)
        st.caption(fmt.markdown(_asked(job)))
        if job.is_running:
            _live(job, found.steps, compared)
            return None
        if job.state != "finished":
            job_card.stopped(job, primary=False)
        if is_earlier:
            st.caption("From the previous search, with the trials of both:")
        if is_earlier or job.state == "finished":
            _facts(found)
        if found.points:
            _figure(found, compared, _CHART, selectable=True)
        job_card.log(job)
    return found


def _estimates(shown: Subject, request: SearchRequest, job: Job | None, *, is_calibrated: bool) -> None:
    """Offer to estimate the codec from fine to coarse, or draw how far that is.

    Estimates that were made before anything was measured are made anew once trials tell what an error costs.
    """
    if job is None and is_calibrated and state.was_clicked():
        earlier = services.estimates_job(shown, request.steps, request.codec, is_calibrated=False)
        if earlier is not None and earlier.state == "finished":
            services.start_estimates(shown, request.steps, request.codec, is_calibrated=True)
            st.rerun()
    if (
        job_card.settled(job, "Estimating")
        and job is None
        and st.button(
            "Estimate without measuring",
            icon=":material/calculate:",
            disabled=not request.steps,
            help=f"Encodes a sample of the weights with {codec_labels()[request.codec]} from fine to coarse, "
            "and tells what each layer takes. No evaluator is asked, so no code of the run is executed.",
        )
    ):
        services.start_estimates(shown, request.steps, request.codec, is_calibrated=is_calibrated)
        st.rerun()


def _table(found: Searched, compared: Sequence[SearchPoint]) -> None:
    """List every configuration; a row picks it, as a click on its point does."""
    points = (*found.points, *compared)
    if not points:
        return
    shares = {place for name in _FIGURES for place in front(points, name)}
    listed = pd.DataFrame({head: [getattr(one, name) for one in points] for head, name in _COLUMNS.items()})
    listed.insert(2, "is", [_word(found, one, place in shares) for place, one in enumerate(points)])
    label = f"Configurations ({fmt.count(len(points))})"
    with st.expander(label, icon=":material/table_rows:", expanded=True):
        listing.show(
            listed,
            "search",
            alt="Configurations with ratio, worst drop, largest divergence and restore gain",
            formats={
                "ratio": listing.RATIO,
                "drop": listing.SHARE,
                "divergence": listing.SMALL,
                "restore cost": listing.SHARE,
                "gain": "%.3f",
                "noise": "%.3f",
            },
            key=_TABLE,
            on_select=_row_chosen,
            selection_mode="single-row",
        )


def _word(found: Searched, point: SearchPoint, is_on_front: bool) -> str:
    """Say in a few words where a configuration stands."""
    if point.is_estimated:
        return "not measured"
    if point.baseline:
        return "baseline"
    if point.is_best:
        return "best"
    if not point.whole:
        return "given up" if not point.keeps else "not finished"
    kept = found.verdict(point)
    return f"{kept}, on the front" if is_on_front else kept


def _asked(job: Job) -> str:
    """Say what a search was asked for."""
    asked: Any = job.requests[-1]
    told = []
    if asked.target_ratio is not None:
        told.append(f"smallest divergence at a ratio ≥ {asked.target_ratio:g}×")
    if asked.max_divergence is not None:
        free = math.isinf(asked.max_divergence)
        told.append("any divergence" if free else f"divergence ≤ {asked.max_divergence:g} nats")
    told += [f"drop ≤ {100 * asked.max_drop:g} %"] if asked.max_drop is not None else []
    cost = asked.bounds.max_restore_cost
    told += [f"restore cost ≤ {100 * cost:g} %"] if cost is not None else []
    told += [asked.codec, "all steps" if asked.steps is None else fmt.counted(len(asked.steps), "step")]
    return " · ".join(told + ([asked.strategy] if asked.strategy != "auto" else []))


def _nothing_yet(request: SearchRequest, compared: tuple[SearchPoint, ...]) -> Searched | None:
    """Say what will stand here; baselines stand here already where they were measured."""
    st.header("Nothing has been searched yet", anchor=False)
    st.write(
        "How coarse may a frame be? As coarse as possible, while what it restores is good enough. The search "
        "encodes the steps in memory, asks the evaluator, and goes on to the largest ratio that keeps the "
        "bound. Trials appear here as they are measured."
    )
    if not compared:
        st.caption("Nothing is written but a log of the trials, which the next search goes on from.")
        return None
    told = request.limits()
    drop, divergence = told.get("max_drop"), told.get("max_divergence")
    found = Searched(
        points=(),
        steps=request.steps,
        max_drop=drop,
        max_divergence=None if divergence == float("inf") else divergence,
        max_restore_cost=told.get("max_restore_cost"),
        target_ratio=told.get("target_ratio"),
    )
    _figure(found, compared, _CHART, selectable=True)
    return found


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job, steps: Sequence[int], compared: Sequence[SearchPoint]) -> None:
    """Draw a search while it runs, each trial as it arrives."""
    current = job_card.current(job)
    job_card.progress(current)
    found = services.searched(current, steps)
    left = max(0, current.total - current.done)
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.cancel_button(current)
        if current.total:
            best = "none yet" if found.best is None else fmt.ratio(found.best.ratio)
            st.caption(f"Best so far {best} · about {fmt.counted(left, 'evaluation')} left")
    if found.points:
        _figure(found, compared, "live", selectable=False)


def _facts(found: Searched) -> None:
    """Draw the figures of the best; all of them measured."""
    best = found.best
    if best is None:
        asked = "reaches the ratio" if found.target_ratio is not None else "keeps the bounds at every step"
        st.warning(
            f"No configuration that was tried {asked}. Loosen what is asked for, search another codec, or "
            "allow more configurations.",
            icon=":material/warning:",
        )
        return
    metric = fmt.elided(found.metric, 18) or "the metric"
    shown = [
        ("Ratio, weights", fmt.ratio(best.ratio), f"measured on {fmt.counted(best.n_steps, 'step')}"),
        ("Worst drop", fmt.percent(best.drop), f"of {fmt.markdown(metric)}, measured"),
        (
            "Largest divergence",
            "–" if best.divergence is None else fmt.value(best.divergence),
            "nats, measured",
        ),
    ]
    if best.restore_cost is not None:
        shown.append(("Restore cost", fmt.percent(best.restore_cost), "of the loss, worst step, measured"))
    if best.gain is not None and best.noise is not None:
        shown.append(("Restore gain", f"{best.gain:.3f}", f"noise {fmt.value(best.noise)}, measured"))
    facts(shown)
    took = f"{fmt.counted(found.evaluations, 'evaluation')} in {fmt.duration(found.seconds)}"
    st.caption(fmt.markdown(f"Best: {best.label} · {took}"))
    notes = list(found.notes)
    if found.uninformative:
        few, all_steps = fmt.counted(len(found.uninformative), "step"), fmt.count(len(found.steps))
        notes.append(
            f"at {few} of {all_steps} the previous checkpoint keeps the bounds too: they say nothing there"
        )
    for note in notes:
        st.caption(fmt.markdown(fmt.sentence(note)))


def _figure(found: Searched, compared: Sequence[SearchPoint], key: str, *, selectable: bool) -> None:
    """Draw the scatter against what the reader chose."""
    points = (*found.points, *compared)
    options = [name for name in _FIGURES if any(point.figure(name) is not None for point in points)]
    by_divergence = found.max_divergence is not None or found.max_restore_cost is not None
    default = "divergence" if by_divergence and "divergence" in options else "drop"
    chosen = default
    if len(options) > 1:
        if st.session_state.get(_FIGURE) not in options:
            st.session_state[_FIGURE] = default
        chosen = (
            st.segmented_control(
                "Against",
                options,
                format_func=lambda name: fmt.inked(_FIGURES[name]),
                key=f"{_FIGURE}.{key}",
                default=st.session_state[_FIGURE],
            )
            or default
        )
        st.session_state[_FIGURE] = chosen
    selecting: dict[str, Any] = {}
    if selectable:
        selecting = {"on_select": _clicked, "selection_mode": ("points",)}
        st.session_state["search.n_points"] = len(points)
    chart(
        search_figure.search_figure(found, compared, chosen),
        key,
        f"Ratio of the weights against {_FIGURES[chosen].lower()} of {len(points)} configurations",
        **selecting,
    )
    words = _legend_words(points)
    if chosen == "divergence":
        words += " A divergence of zero is not on this axis; the table has it."
    st.caption(words + (" Click a point to load it into the editor." if selectable else ""))


def _legend_words(points: Sequence[SearchPoint]) -> str:
    """Say how the points are to be read, as far as there are such."""
    if all(point.is_estimated for point in points):
        return (
            "Hollow diamonds are estimates: each is one configuration, encoded on a sample of the weights. "
            "Nothing of it was measured; a search measures."
        )
    words = "Every point is one configuration, measured on the chain. Dim: another one is better in both."
    left = given_up(points)
    if left:
        words += (
            f" Hollow circles: given up, or not finished, after {steps_text(left)}; their ratio and their "
            "worst step are not those of the whole chain."
        )
    if any(point.is_estimated for point in points):
        words += " Hollow diamonds: estimated, not measured."
    return words


def _clicked() -> None:
    """Take in a click on the scatter."""
    points, n_points = st.session_state[_CHART]["selection"]["points"], st.session_state["search.n_points"]
    search_editor.pick(search_figure.clicked_point(points, n_points))


def _row_chosen() -> None:
    """Take in a choice in the table."""
    rows = st.session_state[_TABLE]["selection"]["rows"]
    search_editor.pick(int(rows[0]) if rows else None)


PAGE = Page("Allocate", ":material/tune:", render, former=("search",))
