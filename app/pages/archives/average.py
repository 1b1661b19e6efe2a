"""The average of several steps, written as a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Work
from inshrink_app.model import Subject
from inshrink_app.widgets import ending, fmt, job_card, listing
from inshrink_app.widgets.choices import ends_of_range, one_of_few
from inshrink_app.widgets.layout import answer, facts

from inshrink_core.request import request_from_json

_WEIGHTS = {"uniform": "Equal", "ema": "Later steps count more", "search": "Searched"}
_NAMES = {"last": "Last step", **_WEIGHTS}


def show(shown: Subject) -> None:
    """Draw the settings, the progress and the result."""
    if len(shown.steps) < 2:
        st.caption("An average needs two steps.")
        return
    st.caption("Averages the weights of several steps into one that loads like a step of the run.")
    job = services.newest_job("archives", "average", shown.path)
    first, last = ends_of_range("average", shown.steps)
    steps = [step for step in shown.steps if first <= step <= last]
    # A search needs the evaluator of a run.
    offered = {name: label for name, label in _WEIGHTS.items() if shown.kind == "run" or name != "search"}
    kind = one_of_few("average", "Weights of the steps", "weights", offered, "uniform")
    fields: dict[str, Any] = {} if steps == list(shown.steps) else {"steps": steps}
    trusted, ready = "", len(steps) > 1
    if kind == "search":
        st.caption("Searches the coefficients, negative values too, by the evaluator in the header.")
        judge, may_run = services.named_judge(shown)
        budget = st.number_input("Combinations to try", 8, 10_000, 200, key="average.budget")
        fields |= {"search": True, "budget": int(budget), **(judge.fields if judge is not None else {})}
        trusted, ready = judge.trusted if judge is not None else "", ready and may_run
    elif kind == "ema":
        fields["weights"] = "ema"
    free = services.suggested_path(shown, shown.place.name, "average")
    typed = st.text_input("Write into the folder", free, key=f"average.{free}")

    def request(output: str) -> Any:  # a verb that the lab registers
        asked = {"source": str(shown.path), "output": output, **fields}
        return request_from_json({"verb": "average", "fields": asked})

    disabled = (job is not None and job.is_running) or not ready
    if st.button("Average", icon=":material/merge:", disabled=disabled, type="primary"):
        target = answer(lambda: services.restore_target(typed))
        if target is not None:
            asked = [request(str(target))]
            services.start_job(Work.asking(asked, shown.path, "archives", "average", trusted=trusted))
            st.rerun()
    if job_card.settled(job, "") and job is not None:
        _result(services.read_result(job))
    ending.requests([request(typed)])


def _result(document: Mapping[str, Any]) -> None:
    """Draw the written step and its metric."""
    steps, metric = document["steps"], fmt.markdown(str(document["metric"] or ""))
    st.caption("Written, to be loaded like any step of the run")
    for path in document["files"]:
        st.code(str(path), language=None, wrap_lines=True)
    facts(
        [(_NAMES[row["name"]], fmt.value(row["value"]), f"{metric}, measured") for row in document["judged"]]
        or [("Averaged", fmt.count(document["n_averaged"]), f"values of {fmt.counted(len(steps), 'step')}")]
    )
    table = pd.DataFrame({"step": steps, "coefficient": document["coefficients"]})
    listing.show(table, "average", alt="Coefficient of each step", formats={"coefficient": "%.4f"})
