"""The average of several steps as a step of its own: what is averaged, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.commands import python_text, shell_text, steps_words
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import evaluator_consent, facts, job_card, listing
from inshrink_app.widgets.choices import ends_of_range, one_of_few
from inshrink_app.widgets.formatting import count_text, counted, markdown_text, value_text
from inshrink_app.widgets.layout import answer
from inshrink_app.widgets.tables import Subject

__all__ = ["show"]

_WEIGHTS = {"uniform": "All alike", "ema": "More for later ones", "search": "Searched"}
_NAMES = {"last": "Last step", **_WEIGHTS}
_BUDGET = 200


def show(shown: Subject) -> None:
    """Draw the card of a run or an archive, folded while nothing was averaged."""
    if len(shown.steps) < 2:
        return
    key = ("average", str(shown.path))
    job = services.job_of(key)
    panel = st.expander(
        "Average several steps into one",
        icon=":material/merge:",
        key="average",
        on_change="rerun",
        expanded=job is not None,
    )
    if not panel.open:
        return
    with panel:
        st.write(
            "Late checkpoints lie around a point that is often better than any of them. The average of "
            "their weights is written as a step that loads like the run's own; all else is the last step's."
        )
        if job_card.settled(job, "Averaging") and job is not None:
            _result(services.read_result(job))
        if job is not None and job.is_running:
            return
        words, judge, ready = _words(shown)
        if st.button("Average", icon=":material/merge:", disabled=not ready):
            target = answer(lambda: services.restore_target(words[3]))
            if target is not None:
                words[3] = str(target)
                services.start_job(key, [words], shown.path, trusted=None if judge is None else judge.trusted)
                st.rerun()
        st.code(shell_text([words]), language=None, wrap_lines=True)
        st.code(python_text([words]), language=None, wrap_lines=True)


def _words(shown: Subject) -> tuple[list[str], EvaluatorCode | None, bool]:
    """Draw the controls; return the command, who judges, and whether it may be run."""
    first, last = ends_of_range("average", shown.steps)
    steps = [step for step in shown.steps if first <= step <= last]
    # A search asks the run's evaluator, and an archive has none.
    offered = _WEIGHTS if shown.kind == "run" else {name: _WEIGHTS[name] for name in ("uniform", "ema")}
    kind = one_of_few("average", "Weights of the steps", "weights", offered, "uniform")
    options, judge, ready = [], None, len(steps) > 1
    if kind == "search":
        st.caption("Looks for the coefficients that the evaluator likes best, negative ones too.")
        judge, trusted = evaluator_consent.ask(shown)
        budget = st.number_input("Combinations to try", 8, 10_000, _BUDGET, key="average.budget")
        options = ["--search", "--budget", str(budget), *(judge.words if judge is not None else [])]
        ready = ready and judge is not None and trusted
    elif kind == "ema":
        options = ["--weights", "ema"]
    free = services.suggested_folder(shown, shown.place.name, "average")
    typed = st.text_input("Write into the folder", free, key=f"average.{free}")
    words = ["average", str(shown.path), "-o", typed, *steps_words(steps, shown.steps), *options]
    return words, judge, ready


def _result(document: Mapping[str, Any] | None) -> None:
    """Draw what was written, and what the evaluator says of it."""
    if document is None:
        st.warning("Its result cannot be read any more.", icon=":material/warning:")
        return
    steps, coefficients = document["steps"], document["coefficients"]
    st.caption("Written, to be loaded like any step of the run")
    for path in document["files"]:
        st.code(str(path), language=None, wrap_lines=True)
    metric = markdown_text(str(document["metric"] or ""))
    facts.row(
        [(_NAMES[row["name"]], value_text(row["value"]), f"{metric}, measured") for row in document["judged"]]
        or [("Averaged", count_text(document["n_averaged"]), f"values of {counted(len(steps), 'step')}")]
    )
    listing.show(
        pd.DataFrame({"step": steps, "coefficient": coefficients}),
        "average",
        alt="Coefficient of each step",
        formats={"step": listing.WHOLE, "coefficient": "%.4f"},
    )
