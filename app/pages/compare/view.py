"""Restore & compare: every step as trained and as restored, tensor by tensor and by the run's own metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, subjects_of
from inshrink_app.model import Page, ServiceError, Subject, known_of, when
from inshrink_app.pages.compare import figures as comparison_figures
from inshrink_app.pages.compare import rehearsals, tensors
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import (
    archive_picker,
    choices,
    ending,
    fmt,
    job_card,
    listing,
    problem,
    quality,
    subject,
)
from inshrink_app.widgets.choices import one_of_few, pick_several
from inshrink_app.widgets.layout import chart, facts, section

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.restore import Restore
from inshrink_core.verbs.shared.measured import Known
from inshrink_core.verbs.verify import Verify

_BOUND = "cost"
_DEFAULT_BOUND = "0.3"
_WHICH = {"some": "A spread of steps", "all": "All steps", "chosen": "Chosen steps"}

_SHARES = ("drop", "restore cost")
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
    there = services.archives_of(shown)
    if not there:
        archive_picker.none_yet("A comparison needs an archive of the run.")
        _rehearsal(original)
        _snippet(original, None)
        _next(None)
        return
    _follow_link(original, there)
    archives, steps, bound = _choices(original, there)
    judge, device = _compare(original, archives, steps, bound)
    if archives:
        tensors.errors(shown, original, archives)
        tensors.restore(shown, archives)
    _rehearsal(original)
    _snippet(original, archives[0] if archives else None, steps, judge, device)
    _next(archives[0] if archives else None)


def _next(archive: ChainReport | None) -> None:
    """Lead on, with the archive that was compared."""
    carried = {} if archive is None else {archive_picker.ARCHIVE: str(archive.path)}
    ways = () if archive is None else (ending.ARCHIVE._replace(carried=carried),)
    ending.offer(*ways, ending.ALLOCATE)


def _follow_link(original: Subject, there: tuple[ChainReport, ...]) -> None:
    """Choose what the comparison of a link is about, once; the reader may choose otherwise then."""
    job = services.linked_job(state.choice_text("job"), "compare", original.path)
    if job is None or job.work.topic != "compare" or st.session_state.get("compare.followed") == job.job_id:
        return
    st.session_state["compare.followed"] = job.job_id
    known = {str(one.path) for one in there}
    st.session_state["compare.archives"] = [path for path in _of(job) if path in known]
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
    _snippet(shown, None)


def _choices(
    original: Subject, there: tuple[ChainReport, ...]
) -> tuple[tuple[ChainReport, ...], tuple[int, ...], float]:
    """Draw the choice of archives, steps and bound, and return them."""
    with section("What to compare"):
        names = {str(one.path): one for one in there}
        _begin_with("compare.archives", list(names), list(names)[:1])
        picked = pick_several(
            "Archives",
            list(names),
            format_func=lambda path: archive_picker.choice_text(names[path]),
            key="compare.archives",
            max_selections=5,
        )
        archives = tuple(names[path] for path in picked)
        common = [step for step in original.steps if any(step in one.steps for one in (archives or there))]
        first = "some" if len(services.spread_of(common)) < len(common) else "all"
        with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
            which = one_of_few("compare", "Steps", "which", _WHICH, first)
            text = state.choice_text(_BOUND) or _DEFAULT_BOUND
            bound = st.number_input(
                "Restore cost allowed, %",
                0.0,
                100.0,
                _number(text),
                0.1,
                key="compare.bound",
                help=f"A step of which a restore costs more is marked. {quality.TIP}",
                width=200,
            )
            state.publish(bound=f"{bound:g}")
        problem.show_unreadable(
            original.unreadable, "They are not compared: keep these files, or fetch whole ones."
        )
        if which == "chosen":
            _begin_with("compare.steps", common, common[-1:])
            chosen = pick_several("Which steps", common, key="compare.steps")
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
) -> tuple[EvaluatorCode | None, str]:
    """Draw what is known by the task metric, and what measures more; return the evaluator and the device."""
    with section("Task metric"):
        if not archives or not steps:
            st.caption("Choose an archive and a step.")
            return None, choices.AUTO
        known = {chain.path: found for chain in archives if (found := known_of(chain)) is not None}
        job = services.newest_job("compare", "compare", original.path)
        if job is not None and not set(map(str, known or [one.path for one in archives])) & set(_of(job)):
            job = None
        if job is not None and job.is_running:
            _live(job, bound)
        elif known:
            _found(archives, known, bound)
        if job is not None and not job.is_running and job.state != "finished":
            job_card.stopped(job, primary=False)
        judge, trusted = services.named_judge(original)
        device = choices.device("compare")
        if judge is None or (job is not None and job.is_running):
            return judge, device
        again = all(
            one.path in known
            and known[one.path].is_current
            and set(steps) & set(one.steps) <= {row.step for row in known[one.path].comparison.steps}
            for one in archives
        )
        n = fmt.count(len(steps))
        if st.button(
            "Measure again" if again else "Compare",
            type="secondary" if again else "primary",
            icon=":material/compare_arrows:",
            disabled=not trusted,
            help=f"Restores and evaluates {n} steps of {fmt.counted(len(archives), 'archive')}."
            if trusted
            else "Confirm first that you trust this code.",
        ):
            more = {"again": True} if again else {}
            services.start_compare(original, archives, steps, judge, device=device, **more)
            st.rerun()
    return judge, device


def _of(job: Job) -> list[str]:
    """Return the archives that a comparison is about."""
    return [path for request in job.requests for path in subjects_of(request)]


def _rehearsal(original: Subject) -> None:
    """Draw the failure rehearsal of a sample, and those saved elsewhere."""
    training = services.training_of(original)
    if training is not None:
        rehearsals.rehearse(original, training)
    rehearsals.saved()


def _snippet(
    original: Subject,
    archive: ChainReport | None,
    steps: tuple[int, ...] = (),
    judge: EvaluatorCode | None = None,
    device: str = choices.AUTO,
) -> None:
    """Show the same without the explorer."""
    run = str(original.path)
    path = archive.path if archive is not None else Path(f"{run.rstrip('/')}.inshrink")
    ending.requests(
        [
            services.comparison(original, [path], steps, judge, device=device),
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
    found = services.compared(now)
    if found:
        _charts(found, bound)


def _found(archives: Sequence[ChainReport], known: Mapping[Path, Known], bound: float) -> None:
    """Draw what is known, archive by archive."""
    found = [known[one.path] for one in archives if one.path in known]
    if any(not one.is_current for one in found):
        names = ", ".join(one.name for one in found if not one.is_current)
        st.warning(
            fmt.markdown(f"{names}: measured before the last change. Measure it again below."),
            icon=":material/history:",
        )
    if len(archives) == 1:
        (chain,), (one,) = archives, found
        facts([*quality.size_facts(chain), *quality.known_facts(one, len(chain.steps))])
    else:
        _archives(archives, known, bound)
    st.caption(_about(found))
    _charts(found, bound)
    if len(found) > 1:
        nbytes = [one.nbytes for one in archives if one.path in known]
        chart(
            comparison_figures.size_figure(found, nbytes, bound),
            "compare.sizes",
            "Largest restore cost of each archive against its size",
        )
    _table(found, bound)


def _about(found: Sequence[Known]) -> str:
    """Say who measured, when and where, and at how many steps that proves little."""
    one = max(found, key=lambda one: one.at)
    n = "" if one.n_samples is None else f" on {fmt.counted(one.n_samples, 'sample')}"
    metric = f"Metric: {one.comparison.metric}, {one.comparison.direction} is better{n}"
    grain = ""
    if one.worst is not None and one.granularity is not None:
        grain = f"; one sample is {fmt.percent(one.granularity)} of it at step {fmt.count(one.worst.step)}"
    where = f"{when(one.at)}, on {one.comparison.device.upper()}"
    return fmt.markdown(f"{metric}{grain}. Measured {where}. {_stale_note(found)}")


def _archives(archives: Sequence[ChainReport], known: Mapping[Path, Known], bound: float) -> None:
    """List size, ratio and bits of each archive, and what was measured of it."""
    rows = []
    for chain in archives:
        found = known[chain.path].comparison if chain.path in known else None
        cost = None if found is None else found.max_restore_cost
        rows.append(
            {
                "archive": chain.name,
                "bytes": chain.nbytes,
                "ratio": chain.ratio_total,
                "bits per weight": chain.bits_per_weight,
                "restore cost": cost,
                "bound": "–" if cost is None else "within" if cost <= bound else "above",
                "largest drop": None if found is None else found.max_drop,
                "largest divergence": None if found is None else found.max_divergence,
                "steps measured": 0 if found is None else len(found.steps),
            }
        )
    listing.show(
        pd.DataFrame(rows),
        "compared",
        alt="Size, ratio, bits per weight, restore cost, drop and divergence of each archive",
    )


def _stale_note(found: Sequence[Known]) -> str:
    """Say at how many steps a copy that stores nothing costs no more: those steps prove little."""
    pairs = [
        (row.restore_cost, row.stale_restore_cost)
        for one in found
        for row in one.comparison.steps
        if row.restore_cost is not None and row.stale_restore_cost is not None
    ]
    as_good = sum(stale <= own for own, stale in pairs)
    if not as_good:
        return ""
    return f"At {fmt.counted(as_good, 'step')} the previous checkpoint costs no more: they prove little."


def _charts(found: Sequence[Known], bound: float) -> None:
    """Draw metric, restore cost, drop and divergence by step."""
    names = ", ".join(fmt.html(one.name) for one in found)
    rows = [row for one in found for row in one.comparison.steps]
    drawn = {"metric": (comparison_figures.metric_figure(found), "Metric, as trained and as restored")}
    if any(row.restore_cost is not None for row in rows):
        of_cost = comparison_figures.share_figure(found, "restore_cost", bound)
        drawn["cost"] = (of_cost, "Restore cost in percent, with its bound and the previous checkpoint")
    of_drop = comparison_figures.share_figure(found, "drop")
    drawn["drop"] = (of_drop, "Drop in percent, with the previous checkpoint")
    if any(row.divergence for row in rows):
        of_divergence = comparison_figures.divergence_figure(found)
        drawn["divergence"] = (of_divergence, "Divergence of the predictions, with the previous checkpoint")
    for place, (name, (figure, alt)) in enumerate(drawn.items()):
        if place % 2 == 0:
            columns = st.columns(2, gap="medium")
        with columns[place % 2]:
            chart(figure, f"compare.{name}", f"{alt}, by step, of {names}")
    st.caption(
        "Previous checkpoint: the original before this one, in its place; it stores nothing. Where it leaves "
        "the picture at the top it is worse. A step where it does as well proves little."
    )


def _table(found: Sequence[Known], bound: float) -> None:
    """List every step."""
    rows = [row for one in found for row in one.comparison.steps]
    table = pd.DataFrame(rows).drop(columns=["restore_gain", "restore_noise"]).rename(columns=_OF_PREVIOUS)
    table.insert(0, "archive", [one.name for one in found for _ in one.comparison.steps])
    costs = [row.restore_cost for row in rows]
    table["bound"] = ["–" if cost is None else "within" if cost <= bound else "above" for cost in costs]
    metric = fmt.fixed_format([*table["original"], *table["restored"]])
    shares = dict.fromkeys((name for name in table if str(name).startswith(_SHARES)), listing.SHARE)
    small = dict.fromkeys((name for name in table if str(name).startswith("divergence")), listing.SMALL)
    listing.show(
        table,
        "compare",
        alt="Original and restored metric, drop and divergence of every step",
        formats={"original": metric, "restored": metric, **shares, **small},
        hidden=[] if len(found) > 1 else ["archive"],
        helps=dict.fromkeys(small, quality.NATS),
    )


PAGE = Page("Restore & compare", ":material/compare_arrows:", render)
