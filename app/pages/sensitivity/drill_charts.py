"""The figures of one tensor's inside: its values and levels, its sensitivity, its course over the steps."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services
from inshrink_app.pages.sensitivity import drill_figures
from inshrink_app.pages.sensitivity.drill_figures import DrillDown
from inshrink_app.widgets import figures, problem
from inshrink_app.widgets.formatting import bytes_text, count_text, markdown_text, value_text
from inshrink_app.widgets.tables import METRICS, ServiceError, Subject

__all__ = ["course", "histogram", "score_map"]

_LEVELS = {
    "codebook": "codebook",
    "lattice": "lattice",
    "grid": "uniform levels",
    "rounded": "bfloat16",
    "exact": "bit for bit",
    "other": "no levels of its own",
}


def histogram(seen: DrillDown, *, log: bool) -> None:
    """Draw the values with their partition and levels."""
    st.markdown("**Values and levels**")
    st.plotly_chart(
        drill_figures.histogram_figure(seen, log=log),
        config=dict(figures.CONFIG),
        key="drill.histogram",
        alt=f"Histogram of {count_text(seen.numel)} values by what became of them, with the levels of "
        f"the {_LEVELS[seen.level_kind]}",
    )
    st.caption(_levels_text(seen))


def _levels_text(seen: DrillDown) -> str:
    """Say what the lines are, and what is not drawn."""
    whose = "Restored" if seen.restored else "Original"
    parts = [f"{whose} values, rms {value_text(seen.rms)}."]
    drawn = drill_figures.level_lines(seen).size
    if seen.level_kind == "exact":
        parts.append("Stored bit for bit: there are no levels.")
    elif seen.level_kind == "rounded":
        parts.append("Each value is rounded to bfloat16.")
    elif seen.level_kind == "other":
        parts.append("The codec stores a difference to the step before, so there are no fixed levels.")
    elif seen.spacing is not None:
        lines = "" if drawn else ", too fine to draw"
        parts.append(f"{seen.codec.capitalize()} steps of {value_text(seen.spacing)}{lines}.")
    else:
        parts.append(f"Lines: the {count_text(seen.points.size)} entries of the codebook that are used.")
    if seen.n_nonfinite:
        parts.append(f"{count_text(seen.n_nonfinite)} values are NaN or infinite.")
    return markdown_text(" ".join(parts))


def score_map(seen: DrillDown) -> None:
    """Draw sensitivity against magnitude."""
    told = seen.sensitivity
    st.markdown("**Sensitivity against magnitude**")
    if told is None:
        st.write(
            "This checkpoint does not tell one: it holds neither gradients nor Adam's moments, and there is "
            "no earlier step of this shape."
        )
        return
    st.plotly_chart(
        drill_figures.map_figure(told),
        config=dict(figures.CONFIG),
        key="drill.map",
        alt=f"How many values have which magnitude and which {METRICS[told.metric].label.lower()}",
    )
    together = ""
    if told.correlation is not None:
        # Zero is added, for there is a negative one.
        together = f"Correlation of the logarithms {round(told.correlation, 2) + 0.0:.2f}. "
    source = "Adam's first moment stands for the gradient. " if told.source == "exp_avg" else ""
    zeros = f"Not drawn, for one of the two is zero: {count_text(told.n_zero)}." if told.n_zero else ""
    st.caption(markdown_text(f"{METRICS[told.metric].symbol} over |w|. {together}{source}{zeros}"))


def course(shown: Subject, seen: DrillDown) -> None:
    """Draw the tensor over the steps."""
    every = bool(st.session_state.get("drill.every"))
    try:
        told = services.course(shown, seen.name, every=every)
    except ServiceError as error:
        problem.show(error.problem)
        return
    if len(told.steps) < 2:
        st.caption("A course needs two checkpoints.")
        return
    st.markdown("**Over the steps**")
    st.plotly_chart(
        drill_figures.course_figure(told, seen.step),
        config=dict(figures.CONFIG),
        key="drill.course",
        alt=f"Size, movement and cost of the tensor over {len(told.steps)} steps",
    )
    if told.n_left_out or every:
        cost = seen.numel * 4 * len(shown.steps)
        st.toggle(
            f"Read every step ({bytes_text(cost)})",
            key="drill.every",
            help=f"{count_text(told.n_left_out)} steps were left out to read less; a movement spans them.",
        )
