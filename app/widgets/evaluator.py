"""Whose code evaluates a run, the reader's consent to run it, a trial, and a template to begin with."""

from __future__ import annotations

import functools
from pathlib import Path

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import python_text, shell_text
from inshrink_app.model import Subject
from inshrink_app.server.recent import trust
from inshrink_app.server.roots import Address
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import fmt, job_card
from inshrink_app.widgets.layout import answer, facts, folded

from inshrink_core.verbs.evaluate import Evaluate

_PANEL = "evaluator.make"
_MOST_FIGURES = 6
_NAME_WIDTH = 18


def show(run: Subject, judge: EvaluatorCode | None) -> None:
    """Draw the evaluator of a run: its code, consent, a trial, and another one instead.

    Parameters
    ----------
    run
        The run that is evaluated.
    judge
        Its evaluator; None without one that can be read.
    """
    if judge is None:
        _none(run)
    elif judge.is_bundled:
        st.caption(
            "Transformers builds the model from config.json, and a bundled set of samples judges it."
            if judge.spec
            else "This evaluator comes with the bundled sample. It needs no consent."
        )
    else:
        _consent(judge)
    if judge is None or not judge.is_bundled or judge.spec:
        _another(run)
    if judge is None:
        folded("Make an evaluator", ":material/edit_note:", _PANEL, functools.partial(_make, run))
        return
    _trial(run, judge, trusted=services.may_run(judge))


def _none(run: Subject) -> None:
    where = (
        "An address names no evaluator." if isinstance(run.path, Address) else "This run names no evaluator."
    )
    st.write(
        f"{where} Name a Python file with a function that takes a state dict and returns metrics, or make "
        "one here. Models of transformers need none: write `auto`."
    )


def _consent(judge: EvaluatorCode) -> None:
    """Show the code, and ask whether it may run."""
    with st.expander("The code that would run", icon=":material/code:"):
        st.code(str(judge.path), language=None, wrap_lines=True)
        st.code(judge.code, language="python", wrap_lines=True)
        st.caption(f"SHA-256 {judge.digest}")
    # The digest in the key: consent is for this code, and for no later version of the file.
    key = f"trust.{judge.digest}.{judge.path}"

    def changed() -> None:
        said = st.session_state.get(key)
        if said is not None:  # The field ends with its page, and a click may come as the reader leaves.
            state.clicked()
            trust(judge.path, judge.digest if said else None)

    st.checkbox(
        "Trust this run's code and run it on this computer",
        value=services.may_run(judge),
        key=key,
        help="It runs in a process of its own, with your rights. Your consent holds for this content of the "
        "file; if the file changes, you are asked again.",
        on_change=changed,
    )


def _another(run: Subject) -> None:
    """Let another evaluator be named; empty text goes back to the run's own."""
    now = services.chosen(run).evaluator
    typed = st.text_input(
        "Evaluator",
        now,
        key=f"evaluator.of.{run.path}.{now}",
        placeholder="judge.py:evaluate, or auto",
        help="Leave it empty for the evaluator that the run names.",
    ).strip()
    if typed == now:
        return
    if not typed or answer(lambda: services.given_evaluator(typed, run)) is not None:
        services.choose(run, evaluator=typed, metric="", direction="")
        st.rerun()


def _make(run: Subject) -> None:
    """Offer to write an evaluator to begin with; nothing is executed."""
    model = st.text_input("Class of the model", key="evaluator.model", placeholder="train:Net").strip()
    target = st.text_input(
        "Write the evaluator to", value=services.suggested_evaluator(run), key="evaluator.target"
    )
    is_there = Path(target).is_file()
    replace = is_there and st.checkbox("Replace the evaluator that is there")
    if st.button("Write the template", icon=":material/note_add:"):
        made = answer(lambda: services.make_evaluator(run, target, model, replace=bool(replace)))
        if made is not None:
            services.choose(run, evaluator=str(made.output))
            st.rerun()
    request = Evaluate(str(run.path), write=target, model=model or None, force=bool(replace))
    for text in (shell_text([request]), python_text([request])):
        st.code(text, language=None, wrap_lines=True)


def _trial(run: Subject, judge: EvaluatorCode, *, trusted: bool) -> None:
    """Offer to try an evaluator on one step, and draw what it returned."""
    work = services.evaluator_trial(run, judge)
    job = services.job_of(work)
    if not job_card.settled(job, "Trying the evaluator"):
        return
    if job is not None:
        _returned(job.result)
    tip = f"Evaluates step {fmt.count(run.steps[-1])} and writes nothing."
    tip = tip if trusted else "Confirm first that you trust this code."
    label = "Try on one step" if job is None else "Try again"
    job_card.start_button(label, work, "science", disabled=not trusted, help=tip)


def _returned(found: dict[str, object]) -> None:
    """Draw what an evaluator returned for one step; names and prints are untrusted."""
    metrics = found["metrics"] if isinstance(found["metrics"], dict) else {}
    counting, better = str(found["metric"]), f"decides, {found['direction']} is better"
    names = sorted(metrics, key=lambda name: name != counting)[:_MOST_FIGURES]
    facts(
        (
            fmt.markdown(fmt.elided(name, _NAME_WIDTH)),
            fmt.value(metrics[name]),
            better if name == counting else None,
        )
        for name in names
    )
    outputs = [name for name in ("log_probs", "predictions") if isinstance(found[name], list)]
    said = (
        f"It returns {outputs[0]}, so a divergence can be measured."
        if outputs
        else "It returns neither log_probs nor predictions, so no divergence can be measured."
    )
    step, took = fmt.count(int(str(found["step"]))), fmt.duration(float(str(found["seconds"])))
    st.caption(fmt.markdown(f"Step {step}, in {took}. {said}"))
    if found["printed"]:
        st.code(str(found["printed"]), language=None, wrap_lines=True)
