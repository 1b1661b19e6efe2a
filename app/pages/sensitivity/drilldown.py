"""The inside of one tensor: its values, levels, sensitivity, course and cost, and all of it to take away."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.sensitivity import drill_figures
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event
from inshrink_app.widgets import ending, fmt, layout, listing
from inshrink_app.widgets.choices import codec_labels, pick_one
from inshrink_app.widgets.layout import allowed, answer, chart, facts
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy, ValueHistogram

_REST = 1000
"""Pixels of what stands below the histogram, about."""

_WAY, _LOG, _STEP, _OVER = "drill.way", "drill.log", "inside.step", "drill.over"
_LEVELS = {
    "codebook": "codebook",
    "lattice": "lattice",
    "grid": "uniform levels",
    "rounded": "bfloat16",
    "exact": "bit for bit",
    "other": "no levels of its own",
}

_LEVELLESS = {
    "exact": "Stored bit for bit: there are no levels.",
    "rounded": "Each value is rounded to bfloat16.",
    "other": "The codec stores the difference from the step before, so there are no fixed levels.",
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
        st.toggle(
            "Log counts", key=_LOG, width="content", help="Show the histogram's counts on a logarithmic axis."
        )
    # The tensor, the same one step earlier, and the optimizer state of both.
    asked, cost = f"drill.asked.{tensor}", services.drill_cost(shown, tensor)
    if not allowed(asked, cost, "Look inside", ":material/visibility:"):
        return
    metric = table.metric if table.metric in ("taylor", "fisher", "update") else None
    seen = answer(lambda: _look(shown, step, tensor, way, metric), "Looking inside…")
    if seen is None:
        return
    _facts(seen)
    _histogram(shown, seen, table.steps)

    def rest() -> None:
        _profile(seen)
        _score_map(seen)
        _course(shown, seen)
        _take_away(shown, seen, way, metric)

    layout.below("drill", rest, height=_REST, about=(str(shown.path), tensor, step, way, metric))


def _look(shown: Subject, step: int, tensor: str, way: str, metric: str | None) -> Anatomy:
    """Look inside by a metric, or by the one that is known where the checkpoint does not tell it."""
    seen = services.drill_down(shown, step, tensor, way, metric)
    if metric is not None and seen.sensitivity is None:
        return services.drill_down(shown, step, tensor, way, None)
    return seen


def _step_slider(steps: Sequence[int], step: int) -> None:
    """Let the step be moved."""
    if len(steps) < 2:
        return
    st.session_state[_STEP] = step
    st.select_slider(
        "Step",
        steps,
        key=_STEP,
        format_func=fmt.count,
        on_change=lambda: chosen.apply(Event("step", step=st.session_state[_STEP])),
        width=300,
    )


def _way(shown: Subject, step: int) -> str:
    """Let the reader choose how the tensor is stored."""
    ways = services.stored_ways(shown, step)
    if len(ways) == 1:
        return ways[0]
    if st.session_state.get(_WAY) not in ways:
        st.session_state[_WAY] = ways[0]
    names = {services.ARCHIVE: "As archived", **codec_labels()}
    tip = (
        "Where the levels come from: the archive beside this run, or a codec that is tried on this tensor "
        "alone."
    )
    return str(pick_one("Stored", ways, format_func=names.__getitem__, key=_WAY, width=180, help=tip))


def _facts(seen: Anatomy) -> None:
    """Draw what it costs and what became of its values."""
    shares = {part.name: part for part in seen.histogram.parts}
    basis = "estimated, this tensor alone" if seen.estimated else "measured in the archive"
    keyframe = (
        f" A block that stands alone would take {fmt.size(seen.keyframe_nbytes)}."
        if seen.keyframe_nbytes is not None and seen.kind == "delta"
        else ""
    )
    bits, entropy = (
        "–" if value is None else fmt.value(value) for value in (seen.bits_per_weight, seen.entropy)
    )
    cards = [
        ("Bits per weight", bits, f"{seen.kind.capitalize()} block, {basis}.{keyframe}"),
        ("Bytes", fmt.size(seen.nbytes), f"The tensor's block in the frame, {basis}.{keyframe}"),
        (
            "Entropy",
            entropy,
            "Bits per weight in its symbols, each given the one before; more context takes less.",
        ),
        ("Pruned", fmt.share(shares["pruned"].share), _range_help(seen, "pruned")),
        ("Protected", fmt.share(shares["protected"].share), _range_help(seen, "protected")),
    ]
    if seen.relative_error is not None:
        told = f"Of the values as they come back, relative to their norm, with {seen.codec}; {basis}."
        cards.insert(2, ("Rounding error", fmt.percent(seen.relative_error), told))
    facts((label, value, None, said) for label, value, said in cards)


def _range_help(seen: Anatomy, name: str) -> str:
    """Say which magnitudes a part has."""
    part = next(part for part in seen.histogram.parts if part.name == name)
    if part.n == 0 or part.smallest is None or part.largest is None:
        return f"No value is {name}."
    return (
        f"{fmt.count(part.n)} of {fmt.count(seen.spec.numel)} values, "
        f"|w| from {fmt.value(part.smallest)} to {fmt.value(part.largest)}."
    )


def _histogram(shown: Subject, seen: Anatomy, steps: Sequence[int]) -> None:
    """Draw the values with their partition and levels, and over them those of another step."""
    st.markdown("**Values and levels**")
    other = _overlay(shown, seen, steps)
    chart(
        drill_figures.histogram_figure(seen, log=bool(st.session_state.get(_LOG)), other=other),
        "drill.histogram",
        f"Histogram of {fmt.count(seen.spec.numel)} values by what became of them, with the levels of "
        f"the {_LEVELS[seen.level_kind]}",
    )
    st.caption(_levels_text(seen))


def _overlay(shown: Subject, seen: Anatomy, steps: Sequence[int]) -> tuple[int, ValueHistogram] | None:
    """Let another step be laid over the values; None where none is wanted."""
    others = [step for step in steps if step != seen.step]
    if not others:
        return None
    if st.session_state.get(_OVER) not in others:
        st.session_state.pop(_OVER, None)
    step = pick_one(
        "Values of another step over them",
        others,
        index=None,
        key=_OVER,
        placeholder="None",
        width=300,
    )
    if step is None:
        return None
    counted_there = answer(lambda: services.values_at(shown, step, seen.spec.key))
    return None if counted_there is None else (step, counted_there)


def _profile(seen: Anatomy) -> None:
    """Draw where in the matrix the sensitivity sits."""
    places, told = seen.places, seen.sensitivity
    if places is None or told is None or not np.isfinite(places.rows).any():
        return
    st.markdown("**Where in the matrix**")
    n_rows, n_columns = places.shape
    chart(
        drill_figures.profile_figure(places, METRICS[told.metric].symbol),
        "drill.profile",
        f"Mean {METRICS[told.metric].word} by row and by column of {n_rows} by {n_columns} values",
    )
    st.caption(
        f"Half of it sits in {fmt.share(half_in(places.rows))} of {fmt.counted(n_rows, 'row')} and in "
        f"{fmt.share(half_in(places.columns))} of {fmt.counted(n_columns, 'column')}."
    )


def half_in(line: NDArray[np.float64]) -> float:
    """Return the least share of places that hold half of what all hold together; 0 where there is nothing.

    Examples
    --------
    >>> half_in(np.array([1.0, 1.0, 1.0, 97.0])), half_in(np.ones(10))
    (0.25, 0.5)
    """
    known = np.sort(line[np.isfinite(line)])[::-1]
    with np.errstate(over="ignore"):
        total = float(known.sum())
    if not known.size or not 0 < total < np.inf:
        return 0.0
    return (int(np.searchsorted(np.cumsum(known), total / 2 * (1 - 1e-12))) + 1) / known.size


def _levels_text(seen: Anatomy) -> str:
    """Say what the lines are, and what is not drawn."""
    whose = "Restored" if seen.restored else "Original"
    parts = [f"{whose} values, rms {fmt.value(seen.histogram.rms)}."]
    drawn = drill_figures.level_lines(seen).size
    if seen.level_kind in _LEVELLESS:
        parts.append(_LEVELLESS[seen.level_kind])
    elif seen.spacing is not None:
        lines = "" if drawn else ", too fine to be drawn"
        parts.append(f"Levels with a spacing of {fmt.value(seen.spacing)}{lines}.")
    else:
        parts.append(f"Lines: the {fmt.count(seen.points.size)} codebook entries in use.")
    if seen.histogram.n_nonfinite:
        parts.append(f"{fmt.count(seen.histogram.n_nonfinite)} values are NaN or infinite.")
    return fmt.markdown(" ".join(parts))


def _score_map(seen: Anatomy) -> None:
    """Draw sensitivity, or what is known in its place, against magnitude."""
    told = seen.sensitivity
    st.markdown(f"**{METRICS[told.metric].quantity if told else 'Sensitivity'} against magnitude**")
    if told is None:
        st.write(
            "No sensitivity is known at this step: the checkpoint holds neither gradients nor Adam's "
            "moments, and there is no earlier step of this shape."
        )
        return
    chart(
        drill_figures.map_figure(told),
        "drill.map",
        f"How many values have which magnitude and which {METRICS[told.metric].word}",
    )
    together = ""
    if told.correlation is not None:
        # Adding zero turns a negative zero into a positive one.
        together = f"Correlation of the logarithms {round(told.correlation, 2) + 0.0:.2f}. "
    source = "Adam's first moment stands for the gradient. " if told.source == "exp_avg" else ""
    zeros = (
        f"Not drawn because one of the two is zero: {fmt.counted(told.n_zero, 'value')}."
        if told.n_zero
        else ""
    )
    st.caption(fmt.markdown(f"{METRICS[told.metric].symbol} over |w|. {together}{source}{zeros}"))


def _course(shown: Subject, seen: Anatomy) -> None:
    """Draw the tensor over the steps."""
    every = bool(st.session_state.get("drill.every"))
    told = answer(lambda: services.course(shown, seen.spec.key, every=every))
    if told is None:
        return
    if len(told.steps) < 2:
        st.caption("A curve over the steps needs two checkpoints.")
        return
    st.markdown("**Over the steps**")
    chart(
        drill_figures.course_figure(told, seen.step),
        "drill.course",
        f"Size, movement and cost of the tensor over {len(told.steps)} steps",
    )
    n_left_out = len(shown.steps) - len(told.steps)
    if n_left_out or every:
        cost = seen.spec.nbytes * len(shown.steps)
        st.toggle(
            f"Read every step ({fmt.size(cost)})",
            key="drill.every",
            help=f"{fmt.count(n_left_out)} steps were skipped to read less; each movement spans the steps "
            "between two points.",
        )


def _take_away(shown: Subject, seen: Anatomy, way: str, metric: str | None) -> None:
    """Offer what is on screen as files, and the lines that give the same."""
    values = seen.histogram
    stem = f"anatomy-step-{seen.step}"
    bins = pd.DataFrame(
        {
            "from": values.edges[:-1],
            "to": values.edges[1:],
            **{part.name: counts for part, counts in zip(values.parts, values.counts, strict=True)},
        }
    )
    document = json.dumps(seen.to_json(), indent=1)
    listing.buttons(
        ("Histogram as CSV", f"{stem}.csv", listing.csv_bytes(bins)),
        ("All as JSON", f"{stem}.json", document.encode()),
    )
    _snippets(shown, seen, way, metric)


def _snippets(shown: Subject, seen: Anatomy, way: str, metric: str | None) -> None:
    """Show the command nearest to this, and the lines that give it exactly."""
    path = str(shown.path)
    quoted = repr(path)
    arguments = f"run, {seen.step}, {seen.spec.key!r}"
    if way == "archive" and shown.kind == "run" and shown.archive is not None:
        quoted = repr(str(shown.archive.path))
        arguments += f", against={path!r}"
    elif way != "archive":
        arguments += f", {way!r}"
    if metric is not None and seen.sensitivity is not None and seen.sensitivity.metric == metric:
        arguments += f", metric={metric!r}"
    options = f"--metric {metric or 'magnitude'} --by tensor --steps {seen.step}"
    ending.snippets(
        f"inshrink sensitivity {shlex.quote(path)} {options}",
        f"import inshrink_core\n\nrun = inshrink_core.open({quoted})\n"
        f"seen = inshrink_core.analysis.anatomy({arguments})\n"
        "print(seen.bits_per_weight, seen.entropy, seen.histogram.parts)\n"
        f"print(inshrink_core.analysis.trajectory(run, {seen.spec.key!r}).relative_movement)",
        key="drill.snippets",
    )
