"""Restore & compare: every step as trained and as restored, tensor by tensor and by the run's own metric."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import subjects_of
from inshrink_app.model.page import Page
from inshrink_app.model.problem import ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.pages.compare import figures as comparison_figures
from inshrink_app.pages.compare import rehearsals, tensors
from inshrink_app.services import Compared, EvaluatorCode
from inshrink_app.widgets import (
    archive_picker,
    ending,
    evaluator_consent,
    figures,
    fmt,
    job_card,
    listing,
    problem,
    quality,
    subject,
)
from inshrink_app.widgets.choices import one_of_few
from inshrink_app.widgets.layout import Fact, chart, facts, section

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport

_BOUND = "bound"
_DEFAULT_BOUND = "1"
_WHICH = {"some": "A spread of steps", "all": "All steps", "chosen": "Chosen steps"}

_NAME_WIDTH = 40
_OF_PREVIOUS = {
    "stale_drop": "drop of previous",
    "stale_divergence": "divergence of previous",
    "restore_cost": "restore cost",
    "stale_restore_cost": "restore cost of previous",
}


def render() -> None:
    """Draw the page."""
    shown = subject.require("Restore & compare")
    if shown is None:
        return
    original = _original(shown)
    if original is None:
        return
    choices = services.archives_of(shown)
    if not choices:
        archive_picker.none_yet("A comparison needs an archive of the run.")
        _rehearsal(original)
        _snippet(original, None, (), None)
        _next(None)
        return
    _follow_link(original, choices)
    archives, steps, bound = _choices(original, choices)
    judge = _compare(original, archives, steps, bound)
    if archives:
        tensors.errors(shown, original, archives)
        tensors.restore(shown, archives)
    _rehearsal(original)
    job_card.of_page("compare", original.path, shown.path)
    _snippet(original, archives[0] if archives else None, steps, judge)
    _next(archives[0] if archives else None)


def _next(archive: ChainReport | None) -> None:
    """Lead on, with the archive that was compared."""
    way = ending.Next(
        "Finer or coarser? Allocate", "allocate", "Finds the smallest archive that keeps a bound."
    )
    if archive is None:
        ending.offer(way)
        return
    carried = {archive_picker.ARCHIVE: str(archive.path)}
    ending.offer(
        ending.Next("Open the archive", "archive", "Its chain, its checksums, and what can go.", carried),
        way,
    )


def _follow_link(original: Subject, choices: tuple[ChainReport, ...]) -> None:
    """Choose what the comparison of a link is about, once; the reader may choose otherwise then."""
    job = services.linked_job(state.choice_text("job"), "compare", original.path)
    if job is None or job.work.topic != "compare" or st.session_state.get("compare.followed") == job.job_id:
        return
    st.session_state["compare.followed"] = job.job_id
    known = {str(one.path) for one in choices}
    compared = [path for request in job.requests for path in subjects_of(request)]
    st.session_state["compare.archives"] = [path for path in compared if path in known]
    st.session_state["compare.which"] = "chosen"
    asked = {step for request in job.requests for step in getattr(request, "steps", None) or ()}
    st.session_state["compare.steps"] = [step for step in original.steps if step in asked]


def _original(shown: Subject) -> Subject | None:
    """Return the run to compare with; ask for it where an archive's is not found."""
    found = services.original_of(shown)
    typed = state.choice_text("original")
    if typed and shown.kind == "archive":
        try:
            given = services.load_subject(typed)
        except ServiceError as error:
            problem.show(error.problem)
        else:
            if given.kind == "run" and set(given.steps) & set(shown.steps):
                return given
            st.warning("This is no run with steps of this archive.", icon=":material/warning:")
    if found is not None:
        if shown.kind == "archive":
            st.caption("Original run")
            st.code(str(found.path), language=None, wrap_lines=True)
        return found
    _ask_for_original(shown)
    return None


def _ask_for_original(shown: Subject) -> None:
    """Ask for the run that the archive was made from."""
    with section("Which run was this made from?"):
        st.write(
            "A comparison needs the original checkpoints. No run with the steps of this archive lies beside "
            "it or was opened recently."
        )
        with st.form("original", border=False):
            typed = st.text_input("Path of the original run", placeholder="runs/my-training")
            if st.form_submit_button("Use this run", type="primary") and typed.strip():
                state.publish(original=typed.strip())
                st.rerun()
    _snippet(shown, None, (), None)


def _choices(
    original: Subject, choices: tuple[ChainReport, ...]
) -> tuple[tuple[ChainReport, ...], tuple[int, ...], float]:
    """Draw the choice of archives, steps and bound, and return them."""
    with section("What to compare"):
        names = {str(one.path): one for one in choices}
        _begin_with("compare.archives", list(names), list(names)[:1])
        picked = st.multiselect(
            "Archives",
            list(names),
            format_func=lambda path: archive_picker.choice_text(names[path]),
            key="compare.archives",
            max_selections=5,
        )
        archives = tuple(names[path] for path in picked)
        common = [step for step in original.steps if any(step in one.steps for one in (archives or choices))]
        first = "some" if len(services.spread_of(common)) < len(common) else "all"
        with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
            which = one_of_few("compare", "Steps", "which", _WHICH, first)
            text = state.choice_text(_BOUND) or _DEFAULT_BOUND
            bound = st.number_input(
                "Drop allowed, %",
                0.0,
                100.0,
                _number(text),
                0.1,
                key="compare.bound",
                help="A step that drops by more is marked.",
                width=160,
            )
            state.publish(bound=f"{bound:g}")
        problem.show_unreadable(
            original.unreadable, "They are not compared: keep these files, or fetch whole ones."
        )
        if which == "chosen":
            _begin_with("compare.steps", common, common[-1:])
            chosen = st.multiselect("Which steps", common, format_func=fmt.count, key="compare.steps")
            return archives, tuple(sorted(chosen)), bound / 100
    return archives, services.spread_of(common) if which == "some" else tuple(common), bound / 100


def _begin_with(key: str, options: list[Any], default: list[Any]) -> None:
    """Give a choice of several its values, without those that are no options any more."""
    st.session_state[key] = [one for one in st.session_state.get(key, default) if one in options]


def _number(text: str) -> float:
    """Return a bound from the link, which is untrusted."""
    try:
        return min(100.0, max(0.0, float(text)))
    except ValueError:
        return float(_DEFAULT_BOUND)


def _compare(
    original: Subject, archives: tuple[ChainReport, ...], steps: tuple[int, ...], bound: float
) -> EvaluatorCode | None:
    """Draw the comparison by the task metric, or what is needed for it; return the evaluator."""
    with section("Task metric"):
        if not archives or not steps:
            st.caption("Choose an archive and a step.")
            return None
        judge, trusted = evaluator_consent.ask(original)
        if judge is None:
            return None
        job = services.compare_job(original, archives, steps, judge)
        if job is not None and job.is_running:
            _live(job, bound)
            return judge
        if job is not None and job.state == "finished":
            _found(job, bound)
        elif job is not None:
            job_card.stopped(job, primary=False)
        again = job is not None and job.state == "finished"
        n = fmt.count(len(steps))
        if st.button(
            "Compare again" if again else "Compare",
            type="secondary" if again else "primary",
            icon=":material/compare_arrows:",
            disabled=not trusted,
            help=f"Restores and evaluates {n} steps of {fmt.count(len(archives))} archives."
            if trusted
            else "Confirm first that you trust this code.",
        ):
            started = services.start_compare(original, archives, steps, judge)
            state.publish(job=started.job_id)
            st.session_state["compare.followed"] = started.job_id
            st.rerun()
    return judge


def _rehearsal(original: Subject) -> None:
    """Draw the failure rehearsal of a sample, and those saved elsewhere."""
    training = services.training_of(original)
    if training is not None:
        rehearsals.rehearse(original, training)
    rehearsals.saved()


def _snippet(
    original: Subject, archive: ChainReport | None, steps: tuple[int, ...], judge: EvaluatorCode | None
) -> None:
    """Show the same without the explorer."""
    from inshrink_core.verbs.restore import Restore
    from inshrink_core.verbs.verify import Verify

    run = str(original.path)
    path = archive.path if archive is not None else Path(f"{run.rstrip('/')}.inshrink")
    ending.requests(
        [
            services.comparison(original, [path], steps, judge),
            Verify(str(path), against=run),
            Restore(str(path), "restored/"),
        ]
    )


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job, bound: float) -> None:
    """Draw a comparison while it runs, each step as it arrives."""
    now = job_card.current(job)
    job_card.progress(now)
    job_card.cancel_button(now)
    found = [one for one in services.compared(now) if one.steps]
    if found:
        _charts(found, bound)


def _found(job: Job, bound: float) -> None:
    """Draw a finished comparison."""
    found = [one for one in services.compared(job) if one.steps]
    if not found:
        st.caption("No step was compared.")
        return
    for one in found:
        _verdict(one, bound)
    _charts(found, bound)
    _table(found, bound)


def _verdict(one: Compared, bound: float) -> None:
    """Say how one archive did, against the bound and against doing nothing."""
    worst = one.worst
    shown: list[Fact] = [
        (
            "Worst drop",
            "–" if worst is None else fmt.percent(worst.drop),
            "no step has one"
            if worst is None
            else f"relative, at step {fmt.count(worst.step)}, "
            + ("within the bound" if (worst.drop or 0.0) <= bound else "above the bound"),
        ),
        quality.compared_fact(one),
        ("Largest divergence", _value(one.max_divergence), "nats, of the predictions"),
        (
            "Metric",
            fmt.elided(one.metric, 18),
            f"{one.direction} is better" + (f", n = {fmt.count(one.n_samples)}" if one.n_samples else ""),
        ),
        ("Steps", fmt.count(len(one.steps)), _stale_note(one)),
    ]
    st.caption(fmt.markdown(fmt.elided(one.name, _NAME_WIDTH)))
    facts(shown)


def _value(value: float | None) -> str:
    return "–" if value is None else fmt.value(value)


def _stale_note(one: Compared) -> str:
    """Say at how many steps a copy that stores nothing diverges no more: those steps prove little."""
    pairs = [
        (row.divergence, row.stale_divergence)
        for row in one.steps
        if row.divergence is not None and row.stale_divergence is not None
    ]
    if not pairs:
        return "no divergence is known"
    as_good = sum(stale <= own for own, stale in pairs)
    return f"{as_good} no better than previous" if as_good else "all better than previous"


def _charts(found: list[Compared], bound: float) -> None:
    """Draw metric, drop and divergence by step."""
    names = ", ".join(fmt.html(one.name) for one in found)
    left, right = st.columns(2, gap="medium")
    config = dict(figures.CONFIG)
    left.plotly_chart(
        comparison_figures.metric_figure(found),
        config=config,
        key="compare.metric",
        alt=f"Metric by step, as trained and as restored from {names}",
    )
    right.plotly_chart(
        comparison_figures.drop_figure(found, bound),
        config=config,
        key="compare.drop",
        alt=f"Drop by step in percent, with the bound and the previous checkpoint, of {names}",
    )
    if any(row.divergence for one in found for row in one.steps):
        chart(
            comparison_figures.divergence_figure(found),
            "compare.divergence",
            f"Divergence of the predictions by step, with the previous checkpoint, of {names}",
        )
    st.caption(
        "Previous checkpoint: the original before this one, in its place; it stores nothing. A step where it "
        "does as well proves little."
    )


def _table(found: list[Compared], bound: float) -> None:
    """List every step."""
    table = pd.DataFrame([row for one in found for row in one.steps])
    table = table.drop(columns=["restore_gain", "restore_noise"]).rename(columns=_OF_PREVIOUS)
    table.insert(0, "archive", [one.name for one in found for _ in one.steps])
    table["bound"] = [
        "–" if row.drop is None else "within" if row.drop <= bound else "above"
        for one in found
        for row in one.steps
    ]
    metric = fmt.fixed_format([*table["original"], *table["restored"]])
    listing.show(
        table,
        "compare",
        alt="Original and restored metric, drop and divergence of every step",
        formats={
            "original": metric,
            "restored": metric,
            "drop": listing.SHARE,
            "drop of previous": listing.SHARE,
            "divergence": listing.SMALL,
            "divergence of previous": listing.SMALL,
            "restore cost": listing.SHARE,
            "restore cost of previous": listing.SHARE,
        },
        hidden=[] if len(found) > 1 else ["archive"],
    )


PAGE = Page("Restore & compare", ":material/compare_arrows:", render)
