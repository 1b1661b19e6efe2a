"""The first card of a run: what it shrinks to for each of three goals, and one button that does the whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Requests, Work
from inshrink_app.model import Problem, Subject, known_of, when
from inshrink_app.pages.overview import shrinking
from inshrink_app.pages.overview.shrinking import Shrunk
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import choices, fmt, job_card, problem, quality
from inshrink_app.widgets.choices import one_of_few
from inshrink_app.widgets.layout import Fact, answer, facts, section

from inshrink_core.verbs.shared.measured import Known

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

RECOMMENDED = "resume"

_GOAL = "goal"
_DIGITS = 3
_PENDING = "pending"


class _Words(NamedTuple):
    """A goal as people say it."""

    label: str
    kept: str
    price: str


_WORDS: Mapping[str, _Words] = {
    "exact": _Words(
        "Resume exactly",
        "Weights and optimizer state: exact.",
        "Training goes on bit for bit.",
    ),
    "resume": _Words(
        "Resume",
        "Weights and optimizer state: compressed.",
        "Training goes on, not bit for bit.",
    ),
    "weights": _Words(
        "Evaluate or transfer only",
        "Weights: compressed. Optimizer state: dropped.",
        "Training cannot go on without warming the optimizer up.",
    ),
}
_BASES = {
    "measured": "measured by trials",
    "predicted": "predicted from trials",
    "judged": "measured on the steps tried",
    "written": "measured on all steps",
}
_BECOME = {
    "": ("become about", "", ""),
    "written": ("became", "", "As it was written."),
    "judged": (
        "become at most",
        " or more",
        "Of the two steps that were tried the first was written alone; with more steps before them, frames "
        "take less.",
    ),
}
"""What a size is, how its ratio goes on and what stands behind it, by what it rests on."""


def chosen_goal() -> str:
    """Return the goal that is chosen, by the link, else the session."""
    return state.choice(_GOAL, shrinking.GOAL_NAMES, RECOMMENDED)


def show(shown: Subject) -> Requests:
    """Draw the card; return what it does, as requests."""
    with section("Shrink this run"):
        job = services.newest_job("overview", "shrink", shown.path)
        if job is not None and job.is_running:
            st.write(
                "Exports, then decodes every tensor again, then compares with the run. You may leave this "
                "page."
            )
            job_card.running(job)
            return job.requests
        is_made = job is not None and job.state == "finished"
        made = answer(lambda: shrinking.shrunk_by(job)) if job is not None and is_made else None
        if made is not None:
            _made(made)
        elif is_made:
            st.warning("The archive is not there any more.", icon=":material/warning:")
        elif job is not None:
            job_card.stopped(job, primary=False)
        names = shrinking.GOAL_NAMES
        labels = {name: _WORDS[name].label for name in names}
        goal = one_of_few("overview", "What is it for?", _GOAL, labels, RECOMMENDED)
        cards = st.container()
        left, right = st.columns(2, gap="medium")
        with right:
            judge, device = _judge(shown)
        with cards:
            is_bound, has_failed = _goals(
                shown, goal, judge, device, {} if made is None else {made.goal: made.row()}
            )
        tried = shrinking.goals_request(shown, judge, device)
        judge = None if has_failed else judge
        return [tried, *_launch(shown, left, goal, judge, device, bound=is_bound, again=is_made)]


def _goals(
    shown: Subject,
    goal: str,
    judge: EvaluatorCode | None,
    device: str,
    written: Mapping[str, Mapping[str, Any]],
) -> tuple[bool, bool]:
    """Draw what is known of the goals, or how far the trial is.

    Returns
    -------
    bool, bool
        Whether a bound can be kept, and whether the evaluator was seen to fail.

    Notes
    -----
    What was `written` for a goal takes the place of what was estimated of it.
    """
    work = answer(lambda: shrinking.goals_work(shown, judge, device))
    trial = None if work is None else services.job_of(work)
    known = shrinking.known_goals(shown, judge)
    is_known = known is not None and known.is_current
    if trial is not None and trial.state == "interrupted" and state.was_asked_for():
        services.resume_job(trial)
    if trial is None and work is not None and not is_known and state.was_asked_for():
        trial = services.start_job(work, again=False)
    if trial is not None and trial.is_running:
        _trying(shown, trial, goal, judge is not None)
        return judge is not None, False
    result = services.read_result(trial) if trial is not None and trial.state == "finished" else None
    found = shrinking.told_goals(result) if result else known.document if known is not None else None
    rows = found["goals"] if found else {}
    _cards({**rows, **written} if rows else rows, int(found["run_bytes"]) if found else None, goal)
    if found:
        st.caption(_basis(found, None if known is None else known.at))
        if not is_known and known is not None and found is known.document:
            _offer_trial(work, "The run has changed since.")
    elif trial is not None:
        job_card.stopped(trial, primary=False)
    else:
        _offer_trial(
            work,
            "This page was opened by a link, so nothing was tried yet. Two steps are enough to estimate the "
            "sizes.",
        )
    told = found or {}
    return judge is not None and not told.get("not_judged"), bool(told.get("evaluator_failed"))


@st.fragment(run_every=job_card.POLL_SECONDS)
def _trying(shown: Subject, trial: Job, goal: str, is_judged: bool) -> None:
    """Draw a trial while it runs, each number as it arrives."""
    now = job_card.current(trial)
    rows = shrinking.goal_rows(now.told())
    for row in rows.values() if is_judged else ():
        row["basis"] = _PENDING if row["basis"] == "unknown" else row["basis"]
    _cards(rows, len(shown.steps) * sum(row.nbytes for row in shown.tensors), goal)
    judged = "; then the evaluator judges them, written within the bound" if is_judged else ""
    st.caption(
        "Loads PyTorch, which takes some seconds, then tries two steps for each goal, the quickest first"
        f"{judged}. The first trial after an installation takes longer: it compiles loops, once. Nothing is "
        "written."
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)


def _cards(rows: Mapping[str, Mapping[str, Any]], before: int | None, goal: str) -> None:
    """Draw a card a goal."""
    names = shrinking.GOAL_NAMES
    for name, column in zip(names, st.columns(len(names), gap="small"), strict=True):
        with column, st.container(border=True, height="stretch", gap="small"):
            _goal(name, rows.get(name), before, chosen=name == goal)


def _basis(found: Mapping[str, Any], at: float | None) -> str:
    """Say what the estimates rest on."""
    tried = [fmt.count(int(step)) for step in found["tried"]]
    steps = f"steps {' and '.join(tried)}" if len(tried) > 1 else f"step {tried[0]}"
    part = "" if found["sampled"] >= 1 else f", on {fmt.share(found['sampled'])} of their weights"
    bound = found.get("bound")
    how = (
        "with the default settings, without a bound on the restore cost"
        if bound is None
        else f"each as small as a restore cost of {fmt.percent(bound)} of the loss allows"
    )
    why = found.get("not_judged")
    what = "does not run" if found.get("evaluator_failed") else "tells no restore cost"
    told = f" The evaluator {what}: {fmt.markdown(str(why))}." if why else ""
    day = "" if at is None else f", {when(at)}"
    safe = ", and no code of the run was executed" if bound is None and not why else ""
    return (
        f"Estimated from {steps}, tried in {fmt.duration(found['seconds'])} on "
        f"{fmt.device(found['device'])}{part}{day}, {how}.{told} Nothing was written{safe}."
    )


def _offer_trial(work: Work | None, why: str) -> None:
    """Offer the trial."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if work is not None:
            job_card.start_button("Try two steps", work, "science", again=False)
        st.caption(why)


def _goal(name: str, row: Mapping[str, Any] | None, before: int | None, *, chosen: bool) -> None:
    """Draw one goal: before and after, ratio, bits per weight, and what is lost."""
    words = _WORDS[name]
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(f"**{words.label}**", width="content")
        if name == RECOMMENDED:
            st.badge("Recommended", color="green")
        if chosen:
            st.badge("Chosen", icon=":material/check:")
    if row is None or not before:
        st.metric("Size of the archive", "…", "not known yet", delta_color="off", delta_arrow="off")
    else:
        after, what = int(row["archive_bytes"]), "written" if "written" in row else row["basis"]
        become, or_more, tip = _BECOME.get(what, _BECOME[""])
        st.metric(
            f"{fmt.size(before)} {become}",
            fmt.size(after),
            f"{fmt.ratio(before / after if after else None)} smaller{or_more}",
            delta_color="off",
            delta_arrow="off",
            help=f"{quality.RATIO} {tip}",
        )
        bits = row["bits_per_weight"]
        kept = "" if name != "weights" else f" ({fmt.ratio(row['ratio_total'])} of the weights alone)"
        if bits is not None:
            st.write(f"**{fmt.value(float(bits), _DIGITS)}** bits per weight{kept}")
        st.write(_loss(row))
    st.caption(f"{words.kept} {words.price}")


def _loss(row: Mapping[str, Any]) -> str:
    """Say what a restore costs, and how that is known."""
    if row["basis"] == "exact":
        return "Restore cost: **none**, exact"
    if row["basis"] == _PENDING:
        return "Restore cost: the evaluator has not judged this yet"
    drop = row.get("drop")
    beside = "" if drop is None else f"; drop {fmt.percent(float(drop))}"
    cost = row["restore_cost"]
    if cost is not None and row["basis"] in _BASES:
        return f"Restore cost: **{fmt.percent(float(cost))}** of the loss, {_BASES[row['basis']]}{beside}"
    error = row["relative_error"]
    if error is None:  # Weights that are not finite have none.
        return f"Restore cost: {quality.NOT_KNOWN}"
    said = fmt.percent(float(error))
    return f"Restore cost: {quality.NOT_KNOWN}. Weights are off by {said} (relative, root mean square)"


def _launch(
    shown: Subject,
    place: DeltaGenerator,
    goal: str,
    judge: EvaluatorCode | None,
    device: str,
    *,
    bound: bool,
    again: bool,
) -> Requests:
    """Ask where to, and begin; return the requests."""
    request = shrinking.goal_request(shown, goal, bound=bound)
    suggestion = services.suggested_name(shown, request)
    typed = place.text_input("Write to", value=suggestion, key=f"shrink.target.{suggestion}")
    requests = shrinking.shrink_requests(shown, goal, typed, judge, device, bound=bound)
    problem.show_unreadable(
        shown.unreadable, "The archive will hold all others: keep these files, or fetch whole ones."
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        pressed = st.button(
            "Shrink it again" if again else "Shrink it",
            type="secondary" if again else "primary",
            icon=":material/compress:",
        )
        steps = fmt.all_steps(len(shown.steps))
        small = (
            "" if request.chain.max_restore_cost is None else f", within a restore cost of {quality.BOUND}"
        )
        how = (
            "every tensor with the run"
            if requests[-1].verb() == "verify"
            else "them with the run by its metric"
        )
        st.caption(f"Writes {steps}{small}; then decodes every tensor again, and compares {how}.")
    if pressed:
        state.clicked()
        target = answer(lambda: services.export_target(typed, request))
        started = target and answer(
            lambda: shrinking.start_shrink(
                shown,
                shrinking.shrink_requests(shown, goal, str(target), judge, device, bound=bound),
                judge,
            )
        )
        if started is not None:
            st.rerun()
    return requests


def _judge(shown: Subject) -> tuple[EvaluatorCode | None, str]:
    """Return whose code may measure what a restore costs, None for nobody's, and where is computed."""
    judge, trusted = services.named_judge(shown)
    if judge is None or not trusted:
        st.caption(
            "Without an evaluator that may run, every step is written with the default settings, and what a "
            "restore costs stays unknown. With one, each step becomes as small as a restore cost of "
            f"{quality.BOUND} of the loss allows: often much smaller, and finer where the defaults "
            "would cost more."
        )
    return judge if trusted else None, choices.device("overview")


def _made(made: Shrunk) -> None:
    """Draw the result."""
    known = known_of(made.chain)
    _verdict(made, known)
    facts(_figures(made))
    if (least := made.written.get("decided")) is not None:
        exact = ", stored exactly" if least["exact"] else ""
        st.caption(
            f"Step {fmt.count(least['step'])} decides the ratio: its weights shrink least, "
            f"{fmt.ratio(least['ratio_weights'])}{exact}."
        )
    st.code(str(made.chain.path), language=None, wrap_lines=True)
    with st.container(horizontal=True):
        if st.button("Open the archive", type="primary", icon=":material/inventory_2:"):
            state.remember(archive=str(made.chain.path))
            state.go_to("archive")
        if known is not None and st.button("See the comparison", icon=":material/compare_arrows:"):
            st.session_state["compare.archives"] = [str(made.chain.path)]
            state.go_to("compare")
    st.divider()


def _verdict(made: Shrunk, known: Known | None) -> None:
    """Say whether the archive can be trusted."""
    cost = None if known is None else known.comparison.max_restore_cost
    lost = [(Path(path).name, reason) for path, reason in made.unreadable.items()]
    problem.show_unreadable(lost, "They are not in the archive: do not delete their files.")
    if made.problems:
        st.error(
            f"Written, but not sound: {fmt.counted(len(made.problems), 'problem')}.", icon=":material/error:"
        )
        for finding in made.problems[:5]:
            problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    elif quality.is_over(cost):
        st.warning(
            f"Sound, but a restore costs {fmt.percent(cost)} of the loss, more than {quality.BOUND}. "
            "Search finds finer settings.",
            icon=":material/warning:",
        )
    else:
        bound = made.written.get("bounds", {}).get("restore_cost")
        bound = f", each step within a restore cost of {fmt.percent(bound)}," if bound else ","
        st.success(f"Done: written{bound} decoded again and compared.", icon=":material/check_circle:")


def _figures(made: Shrunk) -> list[Fact]:
    """Return the figures of the result; all of them measured."""
    device = str(made.written.get("device", ""))
    rows = [*quality.size_facts(made.chain, device), *quality.archive_facts(made.chain)]
    if tensors := made.verified.get("errors"):
        n_exact = sum(bool(row["bit_exact"]) for row in tensors)
        exact = n_exact == len(tensors)
        held = "all" if exact else f"{fmt.count(n_exact)} of {fmt.count(len(tensors))}"
        rows.append(("Bit-exact", held, "tensors of all steps"))
        error = made.written.get("relative_error")
        if not exact and error is not None:
            rows.append(("Relative error", fmt.percent(error), "of the weights, root mean square"))
    if large := sorted({str(row["name"]) for row in made.verified.get("large_errors", ())}):
        rows.append(("Relative error above .25", fmt.count(len(large)), ", ".join(large[:3])))
    return rows
