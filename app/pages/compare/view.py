"""Restore & compare: every step as trained and as restored, tensor by tensor and by the run's own metric."""

from __future__ import annotations

import shlex
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.archive import restore_card, tensor_errors
from inshrink_app.pages.archive.tables import ArchiveChoice
from inshrink_app.pages.compare import rehearsal as rehearsal_card
from inshrink_app.pages.compare import result as comparison_result
from inshrink_app.pages.compare import saved_rehearsals
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import archive_picker, evaluator_consent, job_card, problem, snippets, subject
from inshrink_app.widgets.formatting import count_text, inked
from inshrink_app.widgets.tables import ServiceError, Subject

_BOUND = "bound"
_DEFAULT_BOUND = "1"
_WHICH = {"some": "A spread of steps", "all": "All steps", "chosen": "Chosen steps"}

# Steps that are compared to begin with: enough to see a course, few enough to wait for.
_SPREAD = 8


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
        return
    _follow_link(original, choices)
    archives, steps, bound = _choices(original, choices)
    judge = _compare(original, archives, steps, bound)
    if archives:
        tensor_errors.show(shown, original, archives)
        restore_card.show(shown, archives)
    _rehearsal(original)
    _snippet(original, archives[0] if archives else None, steps, judge)


def _follow_link(original: Subject, choices: tuple[ArchiveChoice, ...]) -> None:
    """Choose what the comparison of a link is about, once; the reader may choose otherwise then."""
    job = services.linked_job(state.choice_text("job"), "compare", original.path)
    if job is None or st.session_state.get("compare.followed") == job.job_id:
        return
    st.session_state["compare.followed"] = job.job_id
    known = {str(one.path) for one in choices}
    st.session_state["compare.archives"] = [one for one in job.request["archives"] if one in known]
    st.session_state["compare.which"] = "chosen"
    st.session_state["compare.steps"] = [step for step in job.request["steps"] if step in original.steps]


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
    with st.container(border=True):
        st.header("Which run was this made from?", anchor=False)
        st.write(
            "A comparison needs the original checkpoints. No run with the steps of this archive lies beside "
            "it or was opened lately."
        )
        with st.form("original", border=False):
            typed = st.text_input("Path of the original run", placeholder="runs/my-training")
            if st.form_submit_button("Use this run", type="primary") and typed.strip():
                state.publish(original=typed.strip())
                st.rerun()
    _snippet(shown, None, (), None)


def _choices(
    original: Subject, choices: tuple[ArchiveChoice, ...]
) -> tuple[tuple[ArchiveChoice, ...], tuple[int, ...], float]:
    """Draw the choice of archives, steps and bound, and return them."""
    with st.container(border=True):
        st.header("What to compare", anchor=False)
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
        st.session_state.setdefault("compare.which", "some" if len(common) > _SPREAD else "all")
        with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
            which = st.segmented_control(
                "Steps",
                list(_WHICH),
                format_func=lambda name: inked(_WHICH[name]),
                key="compare.which",
            )
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
        if which == "chosen":
            _begin_with("compare.steps", common, common[-1:])
            chosen = st.multiselect("Which steps", common, format_func=count_text, key="compare.steps")
            return archives, tuple(sorted(chosen)), bound / 100
    return archives, _spread(common) if which == "some" else tuple(common), bound / 100


def _begin_with(key: str, options: list[Any], default: list[Any]) -> None:
    """Give a choice of several its values, without those that are no options any more."""
    st.session_state[key] = [one for one in st.session_state.get(key, default) if one in options]


def _number(text: str) -> float:
    """Return a bound from the link, which is untrusted."""
    try:
        return min(100.0, max(0.0, float(text)))
    except ValueError:
        return float(_DEFAULT_BOUND)


def _spread(steps: list[int]) -> tuple[int, ...]:
    """Return steps spread over the run, the last one among them."""
    if len(steps) <= _SPREAD:
        return tuple(steps)
    return tuple(steps[round(i * (len(steps) - 1) / (_SPREAD - 1))] for i in range(_SPREAD))


def _compare(
    original: Subject, archives: tuple[ArchiveChoice, ...], steps: tuple[int, ...], bound: float
) -> EvaluatorCode | None:
    """Draw the comparison by the task metric, or what is needed for it; return the evaluator."""
    with st.container(border=True):
        st.header("Task metric", anchor=False)
        if not archives or not steps:
            st.caption("Choose an archive and a step.")
            return None
        judge, trusted = evaluator_consent.ask(original)
        if judge is None:
            return None
        job = services.compare_job(original, archives, steps, judge.spec)
        if job is not None and job.is_running:
            comparison_result.live(job, bound)
            return judge
        if job is not None and job.state == "finished":
            comparison_result.show(job, bound)
        elif job is not None:
            job_card.stopped(job, primary=False)
        again = job is not None and job.state == "finished"
        n = count_text(len(steps))
        if st.button(
            "Compare again" if again else "Compare",
            type="secondary" if again else "primary",
            icon=":material/compare_arrows:",
            disabled=not trusted,
            help=f"Restores and evaluates {n} steps of {count_text(len(archives))} archives."
            if trusted
            else "Say first that you trust this code.",
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
        rehearsal_card.show(original, training)
    saved_rehearsals.show()


def _snippet(
    original: Subject, archive: ArchiveChoice | None, steps: tuple[int, ...], judge: EvaluatorCode | None
) -> None:
    """Show the same without the explorer."""
    run = str(original.path)
    path = str(archive.path) if archive is not None else f"{run.rstrip('/')}.inshrink"
    option, keyword = " --trust-run", ", trust_run=True"
    if judge is not None and judge.is_bundled:
        option = keyword = ""
    elif judge is not None and judge.spec:
        option, keyword = f" --evaluator {shlex.quote(judge.spec)}", f", evaluator={judge.spec!r}"
    chosen = f" --steps {','.join(map(str, steps))}" if steps else ""
    listed = f", steps={list(steps)!r}" if steps else ""
    snippets.show(
        f"inshrink compare {shlex.quote(path)} --against {shlex.quote(run)}{option}{chosen}\n"
        f"inshrink verify {shlex.quote(path)} --against {shlex.quote(run)}\n"
        f"inshrink restore {shlex.quote(path)} -o restored/",
        f"import inshrink_core\n\nfound = inshrink_core.compare({path!r}, {run!r}{keyword}{listed})\n"
        "for row in found.steps:\n    print(row.step, row.original, row.restored, row.drop)",
    )


render()
