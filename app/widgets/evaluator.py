"""The evaluator of a run: its code, the user's consent to run it, a trial, and the choice of another."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.server.recent import trust
from inshrink_app.server.roots import Address
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import fmt, job_card
from inshrink_app.widgets.ending import shell_text
from inshrink_app.widgets.layout import answer, facts

from inshrink_core.verbs.evaluate import Evaluate

_MAX_FIGURES = 6
_NAME_WIDTH = 18


def show(run: Subject, evaluator: EvaluatorCode | None) -> None:
    """Draw the evaluator of a run: its code, consent, a trial, and the choice of another.

    Parameters
    ----------
    run
        The run that is evaluated.
    evaluator
        Its evaluator; None without a readable one.
    """
    if evaluator is None:
        _none(run)
    elif not evaluator.is_bundled:
        consent(evaluator)
    elif evaluator.spec:
        st.caption("Transformers builds the model from config.json, and a bundled set of samples judges it.")
    else:
        st.caption("This evaluator comes with the bundled sample. It needs no consent.")
    if evaluator is None or not evaluator.is_bundled or evaluator.spec:
        _another(run)
    if evaluator is not None and services.may_run(evaluator):
        _trial(run, evaluator)


def _none(run: Subject) -> None:
    is_address = isinstance(run.path, Address)
    st.write(
        f"{'An address' if is_address else 'This run'} names no evaluator. Name a Python file with a "
        "function that takes a state dict and returns metrics, or `auto` for a model of transformers. "
        "This command writes a file to begin with:"
    )
    target = "evaluator.py" if is_address else str(run.folder / "evaluator.py")
    st.code(shell_text([Evaluate(str(run.path), write=target)]), language=None, wrap_lines=True)


def consent(evaluator: EvaluatorCode, place: str = "") -> None:
    """Show the code, and ask whether it may run; `place` distinguishes several such questions on a page."""
    with st.expander("The code that would run", icon=":material/code:"):
        st.code(str(evaluator.path), language=None, wrap_lines=True)
        st.code(evaluator.code, language="python", wrap_lines=True)
        st.caption(f"SHA-256 {evaluator.digest}")
    # The digest is part of the key, since consent covers this code and no later version of the file.
    key = f"trust.{place}.{evaluator.digest}.{evaluator.path}"

    def changed() -> None:
        may_run = st.session_state.get(key)
        if may_run is not None:  # The field ends with its page, and a click may come as the reader leaves.
            state.clicked()
            trust(evaluator.path, evaluator.digest if may_run else None)

    st.checkbox(
        "Trust this run's code and run it on this computer",
        value=services.may_run(evaluator),
        key=key,
        help="It runs in a process of its own, with your rights. Your consent holds for this content of the "
        "file; if the file changes, you are asked again.",
        on_change=changed,
    )


def _another(run: Subject) -> None:
    """Let the user name another evaluator; empty text restores the one that the run names."""
    now = services.chosen(run).evaluator
    typed = st.text_input(
        "Evaluator",
        now,
        key=f"evaluator.of.{run.path}.{now}",
        placeholder="judge.py:evaluate, or auto",
        help="Leave it empty for the evaluator that the run names.",
    ).strip()
    if typed != now and (not typed or answer(lambda: services.given_evaluator(typed, run)) is not None):
        services.choose(run, evaluator=typed, metric="", direction="")
        st.rerun()


def tried(run: Subject, evaluator: EvaluatorCode) -> bool:
    """Try an evaluator once the user asked for the run; return whether no trial is running or has failed."""
    work = services.evaluator_trial(run, evaluator)
    job = services.job_of(work)
    if job is None and state.was_asked_for():
        job = services.start_job(work)
    return job_card.settled(job, "Trying the evaluator")


def _trial(run: Subject, evaluator: EvaluatorCode) -> None:
    """Offer to try an evaluator on a step, and draw its result."""
    work = services.evaluator_trial(run, evaluator)
    job = services.job_of(work)
    if not job_card.settled(job, "Trying the evaluator"):
        return
    if job is not None:
        _returned(job.result)
    tip = f"Evaluates step {fmt.count(run.steps[-1])} and writes nothing."
    label = "Try on one step" if job is None else "Try again"
    job_card.start_button(label, work, "science", help=tip)


def _returned(found: dict[str, object]) -> None:
    """Draw an evaluator's result for a step; names and prints are untrusted."""
    metrics = found["metrics"] if isinstance(found["metrics"], dict) else {}
    counting, better = str(found["metric"]), f"decides, {found['direction']} is better"
    names = sorted(metrics, key=lambda name: name != counting)[:_MAX_FIGURES]
    facts(
        (
            fmt.markdown(fmt.clipped(name, _NAME_WIDTH)),
            fmt.value(metrics[name]),
            better if name == counting else None,
        )
        for name in names
    )
    outputs = [name for name in ("log_probs", "predictions") if isinstance(found[name], list)]
    divergence = (
        f"It returns {outputs[0]}, so a divergence can be measured."
        if outputs
        else "It returns neither log_probs nor predictions, so no divergence can be measured."
    )
    step, took = fmt.count(int(str(found["step"]))), fmt.duration(float(str(found["seconds"])))
    st.caption(fmt.markdown(f"Step {step}, in {took}. {divergence}"))
    if found["printed"]:
        st.code(str(found["printed"]), language=None, wrap_lines=True)
