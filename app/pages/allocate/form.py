"""The controls of a search: what is promised, what is searched and how, and on which steps."""

from __future__ import annotations

import math
from typing import Any

import streamlit as st
from inshrink_app.model import Subject
from inshrink_app.widgets import quality
from inshrink_app.widgets.choices import (
    codec_labels,
    device,
    ends_of_range,
    one_of_few,
    one_of_many,
)

from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, DEFAULT_MAX_RESTORE_COST
from inshrink_core.verbs.search import Search

_GOALS = {"restore_cost": "Restore cost", "drop": "Drop", "divergence": "Divergence", "ratio": "Ratio"}
_WHICH = {"all": "All steps", "recent": "The last 8", "range": "A range"}
_RECENT = 8
_DROP, _RATIO = 0.01, 30.0
"""Limits to begin with."""

_GOAL, _CHAIN, _CODEC = "goal", "chain", "codec"
_CODEC_HELP = (
    "Lattice is the default: one coarseness for all tensors. Inshrinkerator is the published codec, on its "
    "published grid."
)


def show(shown: Subject, before: tuple[int, ...]) -> Search:
    """Draw the controls and return what they ask for; by default on the steps of the search before."""
    goal = one_of_few("search", "Bound", _GOAL, _GOALS, "restore_cost")
    fields = _limits(goal)
    names = codec_labels(searched=True)
    fields["codec"] = one_of_many("search", "Codec", _CODEC, names, next(iter(names)), _CODEC_HELP)
    steps = _steps(shown, before)
    if goal != "ratio":
        fields["budget"] = st.number_input(
            "Most configurations to try",
            1,
            10_000,
            None,
            key="search.budget",
            placeholder="No limit",
            help="Each is measured on every step, until one breaks a bound. Without a limit the search "
            "says when it is enough.",
        )
    fields["steps"] = None if steps == shown.steps else steps
    return Search(str(shown.path), device=device("search"), **fields)


def _limits(goal: str) -> dict[str, Any]:
    """Draw the limit that counts; return it by the engine's name for it."""
    if goal == "restore_cost":
        tip = "How much the loss may be expected to rise when training goes on from a restored step."
        return {"max_restore_cost": _percent("Restore cost allowed, %", DEFAULT_MAX_RESTORE_COST, goal, tip)}
    if goal == "drop":
        tip = "No restored step may be worse than its original by more."
        return {"max_drop": _percent("Drop allowed, %", _DROP, goal, tip), "max_divergence": _beside()}
    if goal == "divergence":
        return {"max_divergence": _divergence("search.divergence")}
    ratio = st.number_input("Target ratio of the weights", 1.0, 100_000.0, _RATIO, 1.0, key="search.ratio")
    st.caption("Of all configurations that reach it, the one of the smallest divergence is found.")
    return {"target_ratio": ratio}


def _percent(label: str, usual: float, goal: str, tip: str) -> float:
    """Draw a limit in percent; return it as a share."""
    return round(
        0.01 * st.number_input(label, 0.0, 100.0, 100 * usual, 0.1, key=f"search.{goal}", help=tip), 9
    )


def _beside() -> float | None:
    """Draw the divergence that is bound together with the drop; None leaves it to the engine."""
    besides = {"default": f"{DEFAULT_MAX_DIVERGENCE:g} nats", "own": "Another", "none": "None"}
    chosen = one_of_few(
        "search",
        "Bound on the divergence",
        "beside",
        besides,
        "default",
        tip="A drop alone is also kept by weights that were never stored, so the divergence is bound too. "
        "The default counts where the evaluator returns `log_probs`; another one is asked for in any case.",
    )
    if chosen == "default":
        return None
    if chosen == "none":
        return math.inf
    return _divergence("search.beside.value")


def _divergence(key: str) -> float:
    """Draw a bound on the divergence."""
    return st.number_input(
        "Divergence allowed, nats",
        0.0,
        100.0,
        DEFAULT_MAX_DIVERGENCE,
        0.001,
        format="%.4f",
        key=key,
        help=quality.NATS,
    )


def _steps(shown: Subject, before: tuple[int, ...]) -> tuple[int, ...]:
    """Draw which steps the chain has; neighbours, as it is neighbours that deltas are small between."""
    if len(shown.steps) == 1:
        st.caption("The run has one checkpoint: what is searched is a keyframe alone.")
        return shown.steps
    options = {name: _WHICH[name] for name in _WHICH if name != "recent" or len(shown.steps) > _RECENT}
    usual = {shown.steps: "all", shown.steps[-_RECENT:]: "recent"}.get(before, "range")
    which = one_of_few("search", "Steps", _CHAIN, options, usual if usual in options else "all")
    if which == "recent":
        return shown.steps[-_RECENT:]
    if which == "all":
        return shown.steps
    first, last = ends_of_range("search", shown.steps, before)
    return tuple(step for step in shown.steps if first <= step <= last)
