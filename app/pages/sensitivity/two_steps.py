"""Two steps of a run: how far the weights moved, and how a metric of every tensor changed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.sensitivity import differences
from inshrink_app.pages.sensitivity.changes import Changes, between_steps
from inshrink_app.pages.sensitivity.drill_figures import Moved
from inshrink_app.pages.sensitivity.measurement import ASK_ABOVE_BYTES
from inshrink_app.widgets import listing, problem, snippets
from inshrink_app.widgets.formatting import bytes_text, count_text, shape_text
from inshrink_app.widgets.tables import METRICS, Sensitivity, ServiceError, Subject

__all__ = ["two_steps"]

_FIRST, _SECOND = "a", "b"


def two_steps(shown: Subject, tables: Mapping[str, Sensitivity], statistic: str) -> None:
    """Compare any two steps of a run: a metric by tensor, and how far the weights moved.

    Parameters
    ----------
    shown
        The run or archive.
    tables
        A metric by grouping.
    statistic
        What of its values counts.
    """
    table = tables["tensor"]
    if len(table.steps) < 2:
        with st.container(border=True):
            st.header("There is one checkpoint", anchor=False)
            st.write("A difference needs two steps.")
        return
    first, second = _steps(table.steps)
    if first == second:
        st.info("Choose two different steps.", icon=":material/info:")
        return
    found = between_steps(table, statistic, first, second)
    label = METRICS[table.metric].label
    with st.container(border=True):
        differences.draw(found, f"to step {first:,}", f"{label} of tensors, as a multiple of step {first:,}")
        differences.list_names(found.only_first, f"Only at step {count_text(first)}")
        differences.list_names(found.only_second, f"Only at step {count_text(second)}")
    moved = _moved(shown, first, second)
    _steps_table(found, moved, (first, second), label)
    if moved is not None:
        differences.list_names(moved.reshaped, "Of another shape or dtype")
    path = str(shown.path)
    snippets.show(
        f"inshrink diff {shlex.quote(path)} --steps {first} {second}",
        f"import inshrink_core\nfrom inshrink_core.verbs.diff import diff\n\n"
        f"moved = diff({path!r}, steps=({first}, {second}))\n"
        "for row in moved.rows()[:10]:\n    print(row['key'], row['relative'], row['cosine'])",
    )


def _steps(steps: Sequence[int]) -> tuple[int, int]:
    """Draw the two pickers, beginning with what the link says; the last two by default."""
    defaults = {_FIRST: steps[-2], _SECOND: steps[-1]}
    if len(steps) > 2:
        defaults[_FIRST] = steps[0]
    chosen = {}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        for key, label in ((_FIRST, "From step"), (_SECOND, "To step")):
            widget = f"steps.{key}"
            if st.session_state.get(widget) not in steps:
                known = state.choice(key, [str(step) for step in steps], str(defaults[key]))
                st.session_state[widget] = int(known)
            chosen[key] = st.selectbox(label, steps, key=widget, format_func=count_text, width=170)
        st.button("Swap", icon=":material/swap_horiz:", on_click=_swap)
    state.publish(**{key: str(step) for key, step in chosen.items()})
    return chosen[_FIRST], chosen[_SECOND]


def _swap() -> None:
    keys = (f"steps.{_FIRST}", f"steps.{_SECOND}")
    st.session_state[keys[0]], st.session_state[keys[1]] = (st.session_state[key] for key in reversed(keys))


def _moved(shown: Subject, first: int, second: int) -> Moved | None:
    """Measure the movement of the weights; ask first where much must be read."""
    cost = services.diff_cost(shown)
    asked = f"diff.asked.{shown.path}"
    if (cost > ASK_ABOVE_BYTES or not state.was_clicked()) and not st.session_state.get(asked):
        if st.button(f"Measure movement ({bytes_text(cost)} are read)", icon=":material/play_arrow:"):
            state.clicked()
            st.session_state[asked] = True
            st.rerun()
        return None
    try:
        with st.spinner("Comparing both steps…"):
            return services.moved_between(shown, first, second)
    except ServiceError as error:
        problem.show(error.problem)
        return None


def _steps_table(found: Changes, moved: Moved | None, steps: tuple[int, int], label: str) -> None:
    """List every tensor, the largest change first."""
    rows = {row.name: row for row in moved.rows} if moved is not None else {}
    before, after = (f"{label.lower()} at {step}" for step in steps)
    frame = pd.DataFrame(
        {
            "tensor": found.names,
            "layer type": found.layers,
            before: found.first,
            after: found.second,
            "times": found.second / found.first if len(found.names) else [],
        }
    )
    if moved is not None:
        known = [rows.get(name) for name in found.names]
        frame.insert(2, "shape", [shape_text(row.shape) if row else "" for row in known])
        frame["moved"] = [row.relative if row else None for row in known]
        frame["cosine"] = [row.cosine if row else None for row in known]
        frame["changed"] = [row.changed if row else None for row in known]
    listing.show(
        frame,
        f"difference-{steps[0]}-{steps[1]}",
        alt=f"Tensors by their change from step {steps[0]} to step {steps[1]}",
        formats={
            before: listing.SMALL,
            after: listing.SMALL,
            "times": "%.3f",
            "moved": "%.4f",
            "cosine": "%.4f",
            "changed": listing.SHARE,
        },
        helps={
            "times": "The value at the second step over that at the first",
            "moved": "Norm of the difference over the norm at the first step",
            "cosine": "Between the values at both steps",
            "changed": "Share of values of which any bit changed",
        },
    )
