"""Whose code evaluates a run, the reader's word that it may be executed, and a way to make one."""

from __future__ import annotations

import functools
from pathlib import Path

import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import python_text, shell_text
from inshrink_app.model import Subject
from inshrink_app.server.recent import is_trusted, trust
from inshrink_app.server.roots import Address
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import fmt, job_card
from inshrink_app.widgets.layout import answer, facts, folded

from inshrink_core.verbs.evaluate import Evaluate

_OTHER = "evaluator.other"
_OF = "evaluator.of"
_MADE = "evaluator.made"
_PANEL = "evaluator.make"
_MOST_FIGURES = 6
_NAME_WIDTH = 18


def ask(original: Subject) -> tuple[EvaluatorCode | None, bool]:
    """Draw the evaluator, ask for consent where it is not ours, and offer to try it.

    Returns
    -------
    EvaluatorCode | None, bool
        The code, None where there is none that can be read; and whether it may be executed. Nothing is
        executed here but what the reader asks for.
    """
    judge = _find(original)
    if judge is None:
        return None, False
    if judge.is_bundled:
        st.caption(
            "The model is built from config.json by transformers, and judged on samples of its own."
            if judge.spec
            else "The evaluator of the bundled sample is ours and needs no consent."
        )
        return judge, True
    with st.expander("The code that would run", icon=":material/code:"):
        st.code(str(judge.path), language=None, wrap_lines=True)
        st.code(judge.code, language=None, wrap_lines=True)
        st.caption("SHA-256")
        st.code(judge.digest, language=None, wrap_lines=True)
    # The digest in the key: consent is for this code, and for no later version of the file.
    key = f"trust.{judge.digest}.{judge.path}"
    trusted = st.checkbox(
        "Trust this run's code and run it on this computer",
        value=is_trusted(judge.path, judge.digest),
        key=key,
        help="It runs in a process of its own, with your rights. Your consent is remembered for this file as "
        "it is; if the file changes, you are asked again.",
        on_change=_trusted_changed,
        args=(key, judge),
    )
    _trial(original, judge, trusted=trusted)
    return judge, trusted


def _trusted_changed(key: str, judge: EvaluatorCode) -> None:
    """Remember the reader's word, or that it was taken back."""
    said = st.session_state.get(key)
    if said is not None:  # The field ends with its page, and a click may come as the reader leaves.
        trust(judge.path, judge.digest if said else None)


def _find(original: Subject) -> EvaluatorCode | None:
    """Return the run's evaluator, or the one that the reader names instead."""
    if _MADE in st.session_state:  # A widget's value may be set before it is drawn alone.
        st.session_state[_OTHER], st.session_state[_PANEL] = st.session_state.pop(_MADE), False
    kept = f"evaluator.of.{original.path}"  # A widget's value ends with its page.
    own = answer(lambda: services.evaluator_of(original))
    typed = st.session_state.get(_OTHER) if st.session_state.get(_OF) == kept else None
    if typed is None:
        likely = "" if own is not None else services.likely_evaluator(original)
        typed = st.session_state.get(kept, likely)
    st.session_state[_OTHER] = typed  # Also where it stands there: the field of another page is another one.
    if own is None and not typed:
        is_elsewhere = isinstance(original.path, Address)
        none = "No evaluator is taken from an address" if is_elsewhere else "The run names no evaluator"
        st.write(
            f"{none}. Name a Python file with a function that takes a state dict and "
            "returns its metrics, put it into `inshrink.toml` beside the checkpoints, or make one here. "
            "Models of transformers need none: write `auto`."
        )
    if own is None or not own.is_bundled:
        typed = st.text_input(
            "Evaluator" if own is None else "Another evaluator",
            key=_OTHER,
            placeholder="judge.py:evaluate, or auto",
        )
    st.session_state.update({kept: typed, _OF: kept})
    if own is None:
        making = functools.partial(_make, original)
        folded("Make an evaluator", ":material/edit_note:", _PANEL, making)
    if not typed.strip():
        return own
    return answer(lambda: services.given_evaluator(typed, original))


def _make(original: Subject) -> None:
    """Offer to write an evaluator to begin with; nothing is executed."""
    model = st.text_input("Class of the model", key="evaluator.model", placeholder="train:Net").strip()
    target = st.text_input(
        "Write the evaluator to", value=services.suggested_evaluator(original), key="evaluator.target"
    )
    replace = Path(target).is_file() and st.checkbox("Replace the evaluator that is there")
    if st.button("Write the template", icon=":material/note_add:"):
        made = answer(lambda: services.make_evaluator(original, target, model, replace=bool(replace)))
        if made is not None:
            st.session_state[_MADE] = str(made.output)
            st.rerun()
    st.caption("Then fill in what is marked TODO, in your own editor, trust it here and try it on one step.")
    request = Evaluate(str(original.path), write=target, model=model or None, force=bool(replace))
    st.code(shell_text([request]), language=None, wrap_lines=True)
    st.code(python_text([request]), language=None, wrap_lines=True)


def _trial(original: Subject, judge: EvaluatorCode, *, trusted: bool) -> None:
    """Offer to try an evaluator on one step, and draw what it said there."""
    work = services.evaluator_trial(original, judge)
    job = services.job_of(work)
    if not job_card.settled(job, "Trying the evaluator"):
        return
    if job is not None:
        _told(job.result)
    tip = f"Evaluates step {fmt.count(original.steps[-1])} and keeps nothing."
    tip = tip if trusted else "Confirm first that you trust this code."
    label = "Try on one step" if job is None else "Try again"
    job_card.start_button(label, work, "science", disabled=not trusted, help=tip)


def _told(found: dict[str, object]) -> None:
    """Draw what an evaluator said of one step; names and prints are untrusted."""
    metrics = found["metrics"] if isinstance(found["metrics"], dict) else {}
    counting, better = str(found["metric"]), f"decides, {found['direction']} is better"
    names = sorted(metrics, key=lambda name: name != counting)[:_MOST_FIGURES]
    facts(
        [
            (
                fmt.markdown(fmt.elided(name, _NAME_WIDTH)),
                fmt.value(metrics[name]),
                better if name == counting else None,
            )
            for name in names
        ]
    )
    shapes = [(name, found[name]) for name in ("log_probs", "predictions")]
    told = [f"{name} {' × '.join(map(str, shape))}" for name, shape in shapes if isinstance(shape, list)]
    said = (
        f"From {told[0]} a divergence is measured."
        if told
        else ("It returns neither log_probs nor predictions, so no divergence is measured.")
    )
    step, took = fmt.count(int(str(found["step"]))), fmt.duration(float(str(found["seconds"])))
    st.caption(fmt.markdown(f"Step {step}, in {took}. {said}"))
    if found["printed"]:
        st.code(str(found["printed"]), language=None, wrap_lines=True)
