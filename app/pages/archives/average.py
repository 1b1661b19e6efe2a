"""The average of several steps as a step of its own: what is averaged, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Work
from inshrink_app.model import Subject
from inshrink_app.services import EvaluatorCode
from inshrink_app.widgets import ending, fmt, job_card, listing
from inshrink_app.widgets.choices import ends_of_range, one_of_few
from inshrink_app.widgets.layout import answer, facts

from inshrink_core.request import request_from_json

_WEIGHTS = {"uniform": "Equal", "ema": "Later ones count more", "search": "Searched"}
_NAMES = {"last": "Last step", **_WEIGHTS}
_BUDGET = 200


def show(shown: Subject) -> None:
    """Draw the controls, the progress, and what was written."""
    if len(shown.steps) < 2:
        st.caption("An average needs two steps.")
        return
    st.caption("Averages the weights of several steps into one that loads like a step of the run.")
    job = services.newest_job("archives", "average", shown.path)
    fields, judge, ready = _fields(shown)
    is_running = job is not None and job.is_running
    if st.button("Average", icon=":material/merge:", disabled=is_running or not ready, type="primary"):
        target = answer(lambda: services.restore_target(fields["output"]))
        if target is not None:
            request = _request({**fields, "output": str(target)})
            trusted = judge.trusted if judge else ""
            services.start_job(Work.asking([request], shown.path, "archives", "average", trusted=trusted))
            st.rerun()
    if job_card.settled(job, "") and job is not None:
        _result(services.read_result(job))
    ending.requests([_request(fields)])


def _request(fields: Mapping[str, Any]) -> Any:
    """Return the request: the laboratory's verb is found by its name, as another package's would be."""
    return request_from_json({"verb": "average", "fields": dict(fields)})


def _fields(shown: Subject) -> tuple[dict[str, Any], EvaluatorCode | None, bool]:
    """Draw the controls; return the fields, the evaluator, and whether all is chosen."""
    first, last = ends_of_range("average", shown.steps)
    steps = [step for step in shown.steps if first <= step <= last]
    # A search needs the evaluator of a run.
    offered = _WEIGHTS if shown.kind == "run" else {name: _WEIGHTS[name] for name in ("uniform", "ema")}
    kind = one_of_few("average", "Weights of the steps", "weights", offered, "uniform")
    judge, ready = None, len(steps) > 1
    fields: dict[str, Any] = {} if steps == list(shown.steps) else {"steps": steps}
    if kind == "search":
        st.caption("Searches the coefficients, negative ones too, by the evaluator in the header.")
        judge, trusted = services.named_judge(shown)
        budget = st.number_input("Combinations to try", 8, 10_000, _BUDGET, key="average.budget")
        fields |= {"search": True, "budget": int(budget), **(judge.fields if judge is not None else {})}
        ready = ready and judge is not None and trusted
    elif kind == "ema":
        fields["weights"] = "ema"
    free = services.suggested_path(shown, shown.place.name, "average")
    typed = st.text_input("Write into the folder", free, key=f"average.{free}")
    return {"source": str(shown.path), "output": typed, **fields}, judge, ready


def _result(document: Mapping[str, Any] | None) -> None:
    """Draw what was written, and its metric."""
    if document is None:
        st.warning("The result cannot be read any more.", icon=":material/warning:")
        return
    steps, coefficients = document["steps"], document["coefficients"]
    st.caption("Written, to be loaded like any step of the run")
    for path in document["files"]:
        st.code(str(path), language=None, wrap_lines=True)
    metric = fmt.markdown(str(document["metric"] or ""))
    facts(
        [(_NAMES[row["name"]], fmt.value(row["value"]), f"{metric}, measured") for row in document["judged"]]
        or [("Averaged", fmt.count(document["n_averaged"]), f"values of {fmt.counted(len(steps), 'step')}")]
    )
    listing.show(
        pd.DataFrame({"step": steps, "coefficient": coefficients}),
        "average",
        alt="Coefficient of each step",
        formats={"step": listing.WHOLE, "coefficient": "%.4f"},
    )
