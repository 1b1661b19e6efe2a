"""The first card of a run: what it shrinks to for each of three goals, and one button that does the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Requests
from inshrink_app.model.problem import Problem, ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.pages.overview import shrinking
from inshrink_app.pages.overview.shrinking import Shrunk
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import evaluator_consent, fmt, job_card, listing, problem, quality
from inshrink_app.widgets.choices import one_of_few
from inshrink_app.widgets.layout import Fact, answer, facts, section

RECOMMENDED = "resume"

_GOAL = "goal"
_DIGITS = 3


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
_TRIED = "overview.tried"
_BASES = {"measured": "measured by trials", "predicted": "predicted from trials"}


def chosen_goal() -> str:
    """Return the goal that is chosen, by the link, else the session."""
    return state.choice(_GOAL, shrinking.goal_names(), RECOMMENDED)


def show(shown: Subject) -> Requests:
    """Draw the card; return what it does, as requests."""
    tried = shrinking.goals_request(shown)
    with section("Shrink this run"):
        job = shrinking.shrink_job(shown)
        if job is not None and job.is_running:
            _at_work(job)
            return [tried, *job.requests]
        if job is not None and job.state == "finished":
            _made(job)
        elif job is not None:
            job_card.stopped(job, primary=False)
        trial = answer(lambda: shrinking.goals_job(shown))
        earlier = _earlier(shown) if trial is None else None
        if trial is None and earlier is None and state.was_asked_for():
            trial = answer(lambda: shrinking.start_goals(shown))
        _goals(shown, trial or earlier, is_earlier=earlier is not None)
        return [tried, *_launch(shown, again=job is not None and job.state == "finished")]


def _earlier(shown: Subject) -> Job | None:
    """Return the trial from before the run has grown: not every checkpoint begins another one."""
    path, job_id = st.session_state.get(_TRIED, ("", ""))
    return services.find_job(job_id) if path == str(shown.path) else None


def _at_work(job: Job) -> None:
    """Draw the one line of progress."""
    st.write("Exports, then decodes every tensor again, then compares with the run. You may leave this page.")
    _progress(job)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _progress(job: Job) -> None:
    """Draw how far a job is; the page is drawn anew once it has ended."""
    now = job_card.current(job)
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)


def _goals(shown: Subject, trial: Job | None, *, is_earlier: bool) -> None:
    """Draw what is known of the goals, or how far the trial is."""
    if trial is not None:
        st.session_state[_TRIED] = (str(shown.path), trial.job_id)
    found = services.read_result(trial) if trial is not None and trial.state == "finished" else None
    rows = {str(row["goal"]): row for row in found["goals"]} if found else {}
    names = shrinking.goal_names()
    goal = one_of_few(
        "overview", "What is it for?", _GOAL, {name: _WORDS[name].label for name in names}, RECOMMENDED
    )
    for name, column in zip(names, st.columns(len(names), gap="small"), strict=True):
        with column, st.container(border=True, height="stretch", gap="small"):
            _goal(name, rows.get(name), int(found["run_bytes"]) if found else None, chosen=name == goal)
    if found:
        tried = [fmt.count(int(step)) for step in found["tried"]]
        steps = f"steps {' and '.join(tried)}" if len(tried) > 1 else f"step {tried[0]}"
        part = "" if found["sampled"] >= 1 else f", on {fmt.share(found['sampled'])} of their weights"
        st.caption(
            f"Estimated from {steps}, tried in {fmt.duration(found['seconds'])} on "
            f"{fmt.markdown(str(found['device']))}{part}, with the default settings, without a bound on the "
            "restore cost. Nothing was written, and no code of the run was executed."
        )
        if is_earlier:
            _offer_trial(shown, "The run has grown since.")
    elif trial is not None and trial.is_running:
        st.caption("Trying two steps for each goal. Nothing is written, and no code of the run is executed.")
        _progress(trial)
    elif trial is not None:
        job_card.stopped(trial, primary=False)
    else:
        _offer_trial(
            shown,
            "This page was opened by a link, so nothing was tried yet. Two steps are enough to estimate the "
            "sizes.",
        )


def _offer_trial(shown: Subject, why: str) -> None:
    """Offer the trial."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Try two steps", icon=":material/science:"):
            state.clicked()
            if answer(lambda: shrinking.start_goals(shown)) is not None:
                st.rerun()
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
        after = int(row["archive_bytes"])
        smaller = before / after if after else None
        st.metric(
            f"{fmt.size(before)} become about",
            fmt.size(after),
            f"{fmt.ratio(smaller)} smaller in all",
            delta_color="off",
            delta_arrow="off",
            help="Raw bytes of every tensor of the run, over the bytes of the archive with all its tables.",
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
    cost = row["restore_cost"]
    if cost is not None and row["basis"] in _BASES:
        return f"Restore cost: **{fmt.percent(float(cost))}** of the loss, {_BASES[row['basis']]}"
    error = row["relative_error"]
    if error is None:  # Weights that are not finite have none.
        return f"Restore cost: {quality.NOT_KNOWN}"
    said = fmt.percent(float(error))
    return f"Restore cost: {quality.NOT_KNOWN}. Weights are off by {said} (relative, root mean square)"


def _launch(shown: Subject, *, again: bool) -> Requests:
    """Ask where to and whose code may run, and begin; return the requests."""
    goal = chosen_goal()
    left, right = st.columns(2, gap="medium")
    with right:
        judge, bound = _judge(shown, goal)
    request = shrinking.goal_request(shown, goal, bound=bound)
    suggestion = services.suggested_name(shown, request)
    with left:
        typed = st.text_input("Write to", value=suggestion, key=f"shrink.target.{suggestion}")
    problem.show_unreadable(
        shown.unreadable, "The archive will hold all others: keep these files, or fetch whole ones."
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        pressed = st.button(
            "Shrink it again" if again else "Shrink it",
            type="secondary" if again else "primary",
            icon=":material/compress:",
        )
        small = (
            f", each as small as a restore cost of {quality.bound_text()} of the loss allows" if bound else ""
        )
        how = "every tensor with the run" if judge is None else "a few of them with the run by its metric"
        steps = fmt.counted(len(shown.steps), "step")
        st.caption(f"Exports all {steps}{small}; then decodes them again, and compares {how}.")
    if pressed:
        target = answer(lambda: services.export_target(typed, request))
        started = target and answer(lambda: shrinking.start_shrink(shown, goal, target, judge, bound=bound))
        if started is not None:
            st.rerun()
    return shrinking.shrink_requests(shown, goal, typed, judge, bound=bound)


def _judge(shown: Subject, goal: str) -> tuple[EvaluatorCode | None, bool]:
    """Return whose code may measure what a restore costs, None for nobody's; and whether that is bound."""
    if shrinking.goal_request(shown, goal).optimizer == "exact":
        st.caption("Exact needs no evaluator: every bit is compared.")
        return None, False
    judge, trusted = evaluator_consent.ask(shown)
    if judge is not None and trusted:
        return judge, st.checkbox(
            f"Bound what a restore costs: {quality.bound_text()} of the loss",
            value=True,
            key="shrink.bound",
            help="Needs an evaluator that returns a loss or `log_probs`. Without the bound, every step is "
            "written with the default settings.",
        )
    st.caption(
        "Without an evaluator that may run, every step is written with the default settings, and what a "
        "restore costs stays unknown. With one, each step becomes as small as a restore cost of "
        f"{quality.bound_text()} of the loss allows: often much smaller, and finer where the defaults would "
        "cost more."
    )
    return None, False


def _made(job: Job) -> None:
    """Draw the result."""
    try:
        made = shrinking.shrunk_by(job)
    except ServiceError as error:
        problem.show(error.problem)
        return
    if made is None:
        st.warning("The archive is not there any more.", icon=":material/warning:")
        return
    _verdict(made)
    facts(_figures(made))
    st.code(str(made.chain.path), language=None, wrap_lines=True)
    with st.container(horizontal=True):
        if st.button("Open the archive", type="primary", icon=":material/inventory_2:"):
            state.remember(archive=str(made.chain.path))
            state.go_to("archive")
        if made.compared is not None and st.button("See the comparison", icon=":material/compare_arrows:"):
            st.session_state["compare.archives"] = [str(made.chain.path)]
            state.go_to("compare")
        offered = services.download_url(made.chain.path)
        if offered is not None:
            listing.file_link(f"Download {fmt.markdown(made.chain.name)}", *offered)
    st.divider()


def _verdict(made: Shrunk) -> None:
    """Say whether the archive can be trusted."""
    cost = made.compared.max_restore_cost if made.compared is not None else None
    problem.show_unreadable(made.unreadable, "They are not in the archive: do not delete their files.")
    if not made.is_sound:
        st.error(
            f"Written, but not sound: {fmt.counted(len(made.problems), 'problem')}.", icon=":material/error:"
        )
        for finding in made.problems[:5]:
            problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    elif quality.is_over(cost):
        st.warning(
            f"Sound, but a restore costs {fmt.percent(cost)} of the loss, more than {quality.bound_text()}. "
            "Search finds finer settings.",
            icon=":material/warning:",
        )
    else:
        bound = f", each step within a restore cost of {fmt.percent(made.bound)}," if made.bound else ","
        st.success(f"Done: written{bound} decoded again and compared.", icon=":material/check_circle:")


def _figures(made: Shrunk) -> list[Fact]:
    """Return the figures of the result; all of them measured."""
    chain = made.chain
    bits = chain.bits_per_weight
    rows: list[Fact] = [
        ("Archive", fmt.size(chain.nbytes), f"of {fmt.size(chain.raw_bytes)} raw"),
        ("Ratio in all", fmt.ratio(chain.ratio_total), f"weights {fmt.ratio(chain.ratio_weights)}"),
        (
            "Bits per weight",
            "–" if bits is None else fmt.value(bits, _DIGITS),
            f"measured, on {made.device}" if made.device else "measured",
        ),
    ]
    if made.compared is not None:
        cost, worst = quality.compared_fact(made.compared), made.compared.worst
        drop, step = (None, None) if worst is None else (worst.drop, worst.step)
        if made.kept is not None:  # Of all steps, where the comparison has some.
            said = f"of the loss, measured on {fmt.counted(made.kept.n_steps, 'step')}"
            cost = (cost[0], fmt.percent(made.kept.restore_cost), said, quality.tip())
            drop, step = made.kept.drop, made.kept.step
        rows.append(cost)
        if step is not None:
            said = f"relative, of {made.compared.metric} at step {fmt.count(step)}"
            rows.append(("Worst drop", fmt.percent(drop), said))
    elif made.n_tensors is not None:
        exact = made.n_exact == made.n_tensors
        rows.append(
            (
                "Bit-exact",
                "all" if exact else f"{fmt.count(made.n_exact or 0)} of {fmt.count(made.n_tensors)}",
                "tensors of all steps",
            )
        )
        if not exact and made.relative_error is not None:
            rows.append(
                ("Relative error", fmt.percent(made.relative_error), "of the weights, root mean square")
            )
            rows.append(("Restore cost", "–", quality.NOT_KNOWN, quality.tip()))
    return rows
