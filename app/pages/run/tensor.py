"""The panel of the selected tensor: its sensitivity, its values over time, and its storage."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.run import tensor_figures
from inshrink_app.widgets import ending, fmt, listing
from inshrink_app.widgets.choices import codec_labels, one_of_few, pick_one
from inshrink_app.widgets.layout import allowed, answer, chart
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy, ValueHistogram

_WAY, _LOG, _OVER = "panel.way", "panel.log", "panel.over"
_VIEWS = {"time": "Time", "values": "Values", "course": "Course"}
_LEVELLESS = {
    "exact": "Stored bit for bit: there are no levels.",
    "rounded": "Each value is rounded to bfloat16.",
    "other": "The codec stores the difference from the step before, so there are no fixed levels.",
}


def show(shown: Subject, table: Sensitivity, tensor: str, step: int) -> None:
    """Draw the panel of one tensor at one step.

    Parameters
    ----------
    shown
        The run or archive.
    table
        The metric of the map, by tensor.
    tensor, step
        The name of the tensor, and the step.
    """
    way = _chosen_way(shown, step)
    # The cost covers the tensor, its previous step, and the optimizer state of both.
    asked, cost = f"panel.asked.{tensor}", services.drill_cost(shown, tensor)
    if not allowed(asked, cost, "Look inside", ":material/visibility:"):
        return
    metric = table.metric if table.metric in ("taylor", "fisher", "update") else None
    seen = answer(lambda: _look(shown, step, tensor, way, metric), "Looking inside")
    if seen is None:
        return
    st.markdown(f":small[{why(shown, table, seen)}]")
    st.caption(_stored(seen))
    views = _VIEWS if len(table.steps) > 1 else {"values": _VIEWS["values"]}
    view = one_of_few(
        "panel", "Figure", "view", views, next(iter(views)), label_visibility="collapsed", required=True
    )
    if view == "time":
        _over_time(shown, seen)
    elif view == "values":
        _histogram(shown, seen, table.steps)
    else:
        _course(shown, seen)
    _take_away(seen)


def _look(shown: Subject, step: int, tensor: str, way: str, metric: str | None) -> Anatomy:
    """Analyse the tensor by a metric, or by an available one if the checkpoint lacks it."""
    seen = services.drill_down(shown, step, tensor, way, metric)
    if metric is not None and seen.sensitivity is None:
        return services.drill_down(shown, step, tensor, way, None)
    return seen


def why(shown: Subject, table: Sensitivity, seen: Anatomy) -> str:
    """Return a sentence about the share of a tensor, and its reason."""
    names = [row.name for row in table.rows]
    name = f"**{fmt.markdown(fmt.elided(seen.spec.name, 48))}**"
    total = max(1, shown.n_parameters)
    shares = [f"{name} is {fmt.percent(seen.spec.numel / total)} of the weights"]
    if seen.spec.name in names and table.metric in ("fisher", "taylor", "magnitude", "update"):
        carried = table.carried()[:, table.steps.index(seen.step)]
        share = carried[names.index(seen.spec.name)] / (np.nansum(carried) or np.nan)
        if np.isfinite(share):
            quantity = METRICS[table.metric].quantity.lower()
            shares.append(f"carries {fmt.percent(float(share))} of the {quantity}")
    text = " and ".join(shares)
    more = []
    moved = _moved(shown, seen)
    if moved is not None:
        more.append(f"it moves {fmt.percent(moved)} from the previous checkpoint")
    if seen.places is not None and (half := half_in(seen.places.rows)):
        more.append(f"half of its sensitivity lies in {fmt.share(half)} of its rows")
    return f"{text}; {' and '.join(more)}." if more else f"{text}."


def _moved(shown: Subject, seen: Anatomy) -> float | None:
    """Return the movement of a tensor at a step, relative to its size; None if unknown."""
    if len(shown.steps) < 2:
        return None
    course = answer(lambda: services.course(shown, seen.spec.key))
    if course is None or seen.step not in course.steps:
        return None
    value = float(course.relative_movement[course.steps.index(seen.step)])
    return value if np.isfinite(value) else None


def _stored(seen: Anatomy) -> str:
    """Return a description of the stored form."""
    shares = {part.name: part.share for part in seen.histogram.parts}
    bits = "" if seen.bits_per_weight is None else f"{fmt.value(seen.bits_per_weight)} bits per weight"
    parts = [bits, f"{fmt.size(seen.nbytes)} {'estimated alone' if seen.estimated else 'as archived'}"]
    if seen.entropy is not None:
        parts.append(f"entropy {fmt.value(seen.entropy)} bits")
    if seen.relative_error is not None:
        parts.append(f"rounding error {fmt.percent(seen.relative_error)}")
    parts += [f"{fmt.share(shares[name])} {name}" for name in ("pruned", "protected") if shares.get(name)]
    return " · ".join(filter(None, parts))


def _chosen_way(shown: Subject, step: int) -> str:
    """Return the form to show: as archived, or as the chosen codec would store it."""
    ways = services.stored_ways(shown, step)
    if st.session_state.get(_WAY) not in ways:
        st.session_state[_WAY] = ways[0]
    return str(st.session_state[_WAY])


def _ways(shown: Subject, step: int) -> None:
    """Draw the choice of the stored form."""
    ways = services.stored_ways(shown, step)
    if len(ways) > 1:
        names = {services.ARCHIVE: "As archived", **codec_labels()}
        tip = "As the archive beside this run has it, or as a codec would store this tensor alone."
        now = ways.index(_chosen_way(shown, step))
        way = pick_one("Stored", ways, now, format_func=names.__getitem__, width=150, help=tip)
        if way != st.session_state[_WAY]:
            st.session_state[_WAY] = way
            st.rerun()


def _over_time(shown: Subject, seen: Anatomy) -> None:
    """Draw the distribution of the values over the steps."""
    values = answer(lambda: services.values_over_time(shown, seen.spec.key), "Reading values")
    if values is None:
        return
    n_steps = len(values[0])
    figure = tensor_figures.over_time_figure(*values, seen.step)
    chart(figure, "panel.time", f"Histogram of the values over {n_steps} steps")
    if n_steps < len(shown.steps):
        st.caption(f"{fmt.counted(n_steps, 'step')} of {fmt.count(len(shown.steps))}, evenly spread.")


def _histogram(shown: Subject, seen: Anatomy, steps: Sequence[int]) -> None:
    """Draw the values with their partition and levels, and those of another step as an overlay."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        _ways(shown, seen.step)
        other = _overlay(shown, seen, steps)
        log = st.toggle("Log counts", key=_LOG, width="content")
    chart(
        tensor_figures.histogram_figure(seen, log=log, other=other),
        "panel.histogram",
        f"Histogram of {fmt.count(seen.spec.numel)} values by what became of them, with the levels",
    )
    st.caption(_levels_text(seen))


def _overlay(shown: Subject, seen: Anatomy, steps: Sequence[int]) -> tuple[int, ValueHistogram] | None:
    """Draw the choice of an overlaid step; return None without one."""
    others = [step for step in steps if step != seen.step]
    if not others:
        return None
    if st.session_state.get(_OVER) not in others:
        st.session_state.pop(_OVER, None)
    step = pick_one("Compare with step", others, index=None, key=_OVER, placeholder="None", width=150)
    if step is None:
        return None
    counted_there = answer(lambda: services.values_at(shown, step, seen.spec.key))
    return None if counted_there is None else (step, counted_there)


def half_in(line: NDArray[np.float64]) -> float:
    """Return the smallest share of entries that hold half of the sum; 0 if the sum is zero.

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
    """Return the meaning of the lines, and which levels are not drawn."""
    whose = "Restored" if seen.restored else "Original"
    parts = [f"{whose} values, rms {fmt.value(seen.histogram.rms)}."]
    drawn = tensor_figures.level_lines(seen).size
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


def _course(shown: Subject, seen: Anatomy) -> None:
    """Draw the statistics of the tensor over the steps."""
    every = bool(st.session_state.get("panel.every"))
    course = answer(lambda: services.course(shown, seen.spec.key, every=every))
    if course is None:
        return
    chart(
        tensor_figures.course_figure(course, seen.step),
        "panel.course",
        f"Size, movement and cost of the tensor over {len(course.steps)} steps",
    )
    n_left_out = len(shown.steps) - len(course.steps)
    if n_left_out or every:
        cost = seen.spec.nbytes * len(shown.steps)
        st.toggle(
            f"Read every step ({fmt.size(cost)})",
            key="panel.every",
            help=f"{fmt.count(n_left_out)} steps were skipped to read less; each movement spans the steps "
            "between two points.",
        )


def _take_away(seen: Anatomy) -> None:
    """Offer the data on screen as files."""
    values = seen.histogram
    stem = f"anatomy-step-{seen.step}"
    bins = pd.DataFrame(
        {
            "from": values.edges[:-1],
            "to": values.edges[1:],
            **{part.name: counts for part, counts in zip(values.parts, values.counts, strict=True)},
        }
    )
    listing.buttons(
        ("Histogram as CSV", f"{stem}.csv", listing.csv_bytes(bins)),
        ("All as JSON", f"{stem}.json", json.dumps(seen.to_json(), indent=1).encode()),
    )


def code(shown: Subject, tensor: str, step: int, metric: str) -> None:
    """Draw the command closest to the panel, and Python lines that give exactly its data."""
    path, way = str(shown.path), st.session_state.get(_WAY, services.ARCHIVE)
    opened, arguments = repr(path), f"run, {step}, {tensor!r}"
    if way == services.ARCHIVE and shown.kind == "run" and shown.archive is not None:
        opened = repr(str(shown.archive.path))
        arguments += f", against={path!r}"
    elif way != services.ARCHIVE:
        arguments += f", {way!r}"
    ending.snippets(
        f"inshrink sensitivity {shlex.quote(path)} --metric {metric} --by tensor --steps {step}",
        f"import inshrink_core\n\nrun = inshrink_core.open({opened})\n"
        f"seen = inshrink_core.analysis.anatomy({arguments})\n"
        "print(seen.bits_per_weight, seen.entropy, seen.histogram.parts)\n"
        f"print(inshrink_core.analysis.trajectory(run, {tensor!r}).relative_movement)",
    )
