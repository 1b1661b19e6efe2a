"""The inside of one tensor: its values, levels, sensitivity, course and cost."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.sensitivity import drill_charts, drill_take_away
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.drill_figures import DrillDown
from inshrink_app.pages.sensitivity.measurement import ASK_ABOVE_BYTES
from inshrink_app.pages.sensitivity.selection import Event
from inshrink_app.widgets import problem
from inshrink_app.widgets.formatting import bytes_text, count_text, inked, share_text, value_text
from inshrink_app.widgets.tables import Sensitivity, ServiceError, Subject

__all__ = ["show_tensor"]

_WAY, _LOG, _STEP = "drill.way", "drill.log", "inside.step"
_WAYS = {
    "archive": "As archived",
    "lattice": "Lattice",
    "inshrinkerator": "Inshrinkerator",
    "uniform": "Uniform",
    "lossless": "Lossless",
}


def show_tensor(shown: Subject, table: Sensitivity, tensor: str, step: int) -> None:
    """Draw the inside of one tensor at one step.

    Parameters
    ----------
    shown
        The run or archive.
    table
        The metric on screen, by tensor.
    tensor, step
        Which one.
    """
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        _step_slider(table.steps, step)
        way = _way(shown, step)
        st.toggle("Log counts", key=_LOG, width="content", help="Counts of the histogram as logarithms.")
    cost = services.drill_cost(shown, tensor)
    asked = f"drill.asked.{tensor}"
    if (cost > ASK_ABOVE_BYTES or not state.was_clicked()) and not st.session_state.get(asked):
        _ask(cost, asked)
        return
    metric = table.metric if table.metric in ("taylor", "fisher", "update") else None
    try:
        with st.spinner("Looking inside…"):
            seen = services.drill_down(shown, step, tensor, way, metric)
            if metric is not None and seen.sensitivity is None:
                seen = services.drill_down(shown, step, tensor, way, None)
    except ServiceError as error:
        problem.show(error.problem)
        return
    _facts(seen)
    left, right = st.columns(2, gap="medium")
    with left:
        drill_charts.histogram(seen, log=bool(st.session_state.get(_LOG)))
    with right:
        drill_charts.score_map(seen)
    drill_charts.course(shown, seen)
    drill_take_away.show(shown, seen, way, metric)


def _step_slider(steps: Sequence[int], step: int) -> None:
    """Let the step be moved."""
    if len(steps) < 2:
        return
    st.session_state[_STEP] = step
    st.select_slider(
        "Step",
        steps,
        key=_STEP,
        format_func=count_text,
        on_change=_stepped,
        width=300,
    )


def _stepped() -> None:
    chosen.apply(Event("step", step=st.session_state[_STEP]))


def _way(shown: Subject, step: int) -> str:
    """Let the reader choose how the tensor is stored."""
    ways = services.stored_ways(shown, step)
    if len(ways) == 1:
        return ways[0]
    if st.session_state.get(_WAY) not in ways:
        st.session_state[_WAY] = ways[0]
    picked = st.segmented_control(
        "Stored",
        ways,
        format_func=lambda name: inked(_WAYS[name]),
        key=_WAY,
        required=True,
        help="How its levels are chosen: as the archive beside this run holds them, or as a codec would "
        "choose them for this tensor alone.",
    )
    return picked or ways[0]


def _ask(cost: int, asked: str) -> None:
    """Say what a look inside costs before it is taken."""
    st.write(
        f"A look inside reads up to {bytes_text(cost)}: the tensor, the step before it, its optimizer state."
    )
    st.button("Look inside", icon=":material/visibility:", key="drill.look", on_click=_allow, args=(asked,))


def _allow(asked: str) -> None:
    state.clicked()
    st.session_state[asked] = True


def _facts(seen: DrillDown) -> None:
    """Draw what it costs and what became of its values."""
    shares = {part.name: part for part in seen.parts}
    basis = "estimated, this tensor alone" if seen.estimated else "measured in the archive"
    keyframe = (
        f" A block that stands alone would take {bytes_text(seen.keyframe_nbytes)}."
        if seen.keyframe_nbytes is not None and seen.kind == "delta"
        else ""
    )
    cards = [
        (
            "Bits per weight",
            _number(seen.bits_per_weight),
            f"{seen.kind.capitalize()} block, {basis}.{keyframe}",
        ),
        ("Bytes", bytes_text(seen.nbytes), f"Of its block in the frame, {basis}.{keyframe}"),
        (
            "Entropy",
            _number(seen.entropy),
            "Bits a weight that its symbols carry, each given the one before; contexts may save more.",
        ),
        ("Pruned", share_text(shares["pruned"].share), _range_help(seen, "pruned")),
        ("Protected", share_text(shares["protected"].share), _range_help(seen, "protected")),
    ]
    with st.container(horizontal=True, gap="small"):
        for label, value, said in cards:
            st.metric(label, value, help=said, border=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _range_help(seen: DrillDown, name: str) -> str:
    """Say which magnitudes a part has."""
    part = next(part for part in seen.parts if part.name == name)
    if part.n == 0 or part.smallest is None or part.largest is None:
        return f"No value is {name}."
    return (
        f"{count_text(part.n)} of {count_text(seen.numel)} values, "
        f"|w| from {value_text(part.smallest)} to {value_text(part.largest)}."
    )
