"""Whose code evaluates a run, and the reader's word that it may be executed."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import problem
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = ["ask"]

_OTHER = "evaluator.other"


def ask(original: Subject) -> tuple[EvaluatorCode | None, bool]:
    """Draw the evaluator and ask for consent where it is not ours.

    Returns
    -------
    EvaluatorCode | None, bool
        The code, None where there is none that can be read; and whether it may be executed. Nothing is
        executed here.
    """
    judge = _find(original)
    if judge is None:
        return None, False
    if judge.is_bundled:
        st.caption("The evaluator of the bundled sample is ours and needs no consent.")
        return judge, True
    with st.expander("The code that would run", icon=":material/code:"):
        st.code(str(judge.path), language=None, wrap_lines=True)
        st.code(judge.code, language=None, wrap_lines=True)
        st.caption("SHA-256")
        st.code(judge.digest, language=None, wrap_lines=True)
    # The digest in the key: consent is for this code, and for no later version of the file.
    trusted = st.checkbox(
        "Trust this run's code and run it on this computer",
        key=f"trust.{judge.digest}.{judge.path}",
        help="It runs in a process of its own, with your rights. Once it changes you are asked again.",
    )
    return judge, bool(trusted)


def _find(original: Subject) -> EvaluatorCode | None:
    """Return the run's evaluator, or the one that the reader names instead."""
    own: EvaluatorCode | None = None
    try:
        own = services.evaluator_of(original)
    except ServiceError as error:
        problem.show(error.problem)
    typed = st.session_state.get(_OTHER, "")
    if own is None and not typed:
        st.write(
            "The run names no evaluator. Name a Python file with a function that takes a state dict and "
            "returns its metrics; or put it into `inshrink.toml` beside the checkpoints."
        )
    if own is None or not own.is_bundled:
        typed = st.text_input(
            "Evaluator" if own is None else "Another evaluator",
            key=_OTHER,
            placeholder="judge.py:evaluate",
        )
    if not typed.strip():
        return own
    try:
        return services.given_evaluator(typed, original)
    except ServiceError as error:
        problem.show(error.problem)
        return None
