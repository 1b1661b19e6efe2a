"""Comparison of two steps or of two runs: differences of a metric, and movement of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.run import heatmap, picture
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.heatmap import heatmap_figure
from inshrink_app.widgets import ending, fmt, header, listing
from inshrink_app.widgets.choices import one_of_many, pick_one
from inshrink_app.widgets.layout import allowed, answer, chart
from numpy.typing import NDArray

from inshrink_core.analysis import Moved

_MAX_DRAWN, _TABLE_HEIGHT = 20, 260
_NAMES_LISTED = 20

_FIRST, _SECOND = "a", "b"
_OTHER = "other"
_PATH_WIDTH, _NAME_WIDTH = 90, 30
_FORMATS = {"moved": "%.4f", "cosine": "%.4f", "changed": listing.SHARE}
_HELPS = {
    "times": "The second value divided by the first",
    "moved": "Norm of the difference divided by the norm at the first step",
    "cosine": "Between the values at both steps",
    "changed": "Share of values of which any bit changed",
}


class Changes(NamedTuple):
    """Differences of a metric by tensor, the largest change at the last step first.

    Parameters
    ----------
    table
        Quotients of values and their reference; NaN where one of the two is not positive, or is missing.
    first, second
        The compared values of each tensor: at both steps, or of both runs at the last common step.
    """

    table: Sensitivity
    first: NDArray[np.float64]
    second: NDArray[np.float64]

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [row.name for row in self.table.rows]


def between_steps(table: Sensitivity, statistic: str, first: int, second: int) -> Changes:
    """Return how tensors changed from one step to every step up to another, in any order."""
    values = table.values[statistic]
    a, b = table.steps.index(first), table.steps.index(second)
    columns = slice(min(a, b), max(a, b) + 1)
    shown = dataclasses.replace(table, steps=table.steps[columns], values={statistic: values[:, columns]})
    return _compared(shown, statistic, values[:, [a]], 0 if b < a else b - a)


def between_runs(mine: Sensitivity, other: Sensitivity, statistic: str) -> Changes:
    """Return how tensors of another run differ from those of the same name, at the common steps."""
    rows = {row.name: row for table in (other, mine) for row in table.rows}
    places = {name: place for place, name in enumerate(rows)}
    steps = tuple(step for step in mine.steps if step in set(other.steps))

    def values(table: Sensitivity) -> NDArray[np.float32]:
        found = np.full((len(rows), len(steps)), np.nan, np.float32)
        columns = [table.steps.index(step) for step in steps]
        found[[places[row.name] for row in table.rows]] = table.values[statistic][:, columns]
        return found

    shown = dataclasses.replace(
        mine, rows=tuple(rows.values()), steps=steps, values={statistic: values(other)}
    )
    return _compared(shown, statistic, values(mine), -1)


def _compared(table: Sensitivity, statistic: str, first: NDArray[np.float32], at: int) -> Changes:
    """Divide values by a reference, and sort by the change at a column in either direction."""
    second = table.values[statistic].astype(np.float64)
    first = np.broadcast_to(first.astype(np.float64), second.shape)
    if not table.steps:
        nothing = np.full(len(table.rows), np.nan)
        return Changes(dataclasses.replace(table, sizes=None), nothing, nothing)
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    times = np.divide(second, first, out=np.full(second.shape, np.nan), where=sound)
    change = np.abs(np.log2(times[:, at]))
    order = np.argsort(np.where(np.isfinite(change), -change, np.inf), kind="stable")
    with np.errstate(over="ignore"):
        shown = dataclasses.replace(table, values={statistic: times.astype(np.float32)}, sizes=None)
    return Changes(heatmap.take(shown, order.tolist()), first[order, at], second[order, at])


def _show(found: Changes, about: str, columns: tuple[str, str], moved: Moved | None = None) -> None:
    """Draw the tensors that differ most, and list all of them.

    Parameters
    ----------
    found
        The differences.
    about
        Description of the quotients.
    columns
        Headings of the compared values.
    moved
        Movement of the weights between the steps, if it was measured.
    """
    n = min(_MAX_DRAWN, len(found.names))
    if n and found.table.steps:
        most = heatmap.take(found.table, range(n))
        chart(heatmap_figure(most, next(iter(most.values)), is_ratio=True), "changes", about)
        rest = len(found.names) - n
        others = f"; {fmt.count(rest)} others differ less." if rest else "."
        colours = "Blue is larger, red smaller, white equal, and grey has no value."
        st.caption(f"{about}. The {fmt.count(n)} tensors that differ most{others} {colours}")
    with np.errstate(divide="ignore", invalid="ignore"):
        times = found.second / found.first
    types = [row.layer_type for row in found.table.rows]
    values = {columns[0]: found.first, columns[1]: found.second, "times": times}
    frame = pd.DataFrame({"tensor": found.names, "layer type": types, **values})
    if moved is not None:
        if moved.reshaped:
            names = fmt.markdown(", ".join(moved.reshaped[:_NAMES_LISTED]))
            st.caption(f"Another shape or dtype: {fmt.counted(len(moved.reshaped), 'tensor')}, {names}.")
        known = [moved.tensors.get(name, (None, None)) for name in found.names]
        frame.insert(2, "shape", [fmt.shape(spec.shape) if spec else "" for spec, _ in known])
        for column, name in (("moved", "relative"), ("cosine", "cosine"), ("changed", "changed")):
            frame[column] = [getattr(row, name) if row else None for _, row in known]
    listing.show(
        frame,
        "differences",
        alt="Tensors by how much they differ",
        formats={**dict.fromkeys(columns, listing.SMALL), **_FORMATS},
        helps=_HELPS,
        height=_TABLE_HEIGHT,
    )


def two_steps(shown: Subject, table: Sensitivity, statistic: str) -> None:
    """Compare any two steps of a run: a statistic of a metric by tensor, and the movement of the weights."""
    if len(table.steps) < 2:
        st.caption("There is one checkpoint. A difference needs two.")
        return
    first, second = _steps(table.steps)
    if first == second:
        st.info("Choose two different steps.", icon=":material/info:")
        return
    metric, at = METRICS[table.metric], [f"at step {fmt.count(step)}" for step in (first, second)]
    asked, cost, moved = f"diff.asked.{shown.path}", services.diff_cost(shown), None
    if allowed(asked, cost, "Measure movement", ":material/play_arrow:"):
        moved = answer(lambda: services.moved_between(shown, first, second), "Comparing both steps")
    _show(
        between_steps(table, statistic, first, second),
        f"{metric.label} as a multiple of that {at[0]}",
        (f"{metric.word} {at[0]}", f"{metric.word} {at[1]}"),
        moved,
    )


def _steps(steps: Sequence[int]) -> tuple[int, int]:
    """Draw the two pickers, which start with the link's steps, else with the first and the last one."""
    labels = {str(step): fmt.count(step) for step in steps}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        first = one_of_many("steps", "From step", _FIRST, labels, str(steps[0]), width=170)
        second = one_of_many("steps", "To step", _SECOND, labels, str(steps[-1]), width=170)
    return int(first), int(second)


def two_runs(
    shown: Subject, mine: Sensitivity, statistic: str, measured: Callable[[Subject], Sensitivity | None]
) -> None:
    """Compare with a second run: the same metric, tensors matched by name.

    Parameters
    ----------
    shown, mine
        The run or archive on screen, and its metric.
    statistic
        The compared statistic.
    measured
        Returns the same metric of the second run, or draws how to measure it.
    """
    other = _other(shown)
    if other is None:
        return
    metric = METRICS[mine.metric]
    is_missing = mine.metric in services.missing_metrics(other)
    if is_missing and services.job_of(services.sensitivity_work(other, mine.metric)) is None:
        st.info(f"The second run has no {metric.word}. {metric.needs}", icon=":material/info:")
        return
    theirs = measured(other)
    if theirs is None:
        return
    found = between_runs(mine, theirs, statistic)
    common = {row.name for row in mine.rows} & {row.name for row in theirs.rows}
    if not common:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
        return
    if not found.table.steps:
        st.caption("The two runs have no common step. Their curves are compared below.")
    names = [fmt.clipped(run.name, _NAME_WIDTH) for run in (shown, other)]
    names[1] += " (second)" if names[0] == names[1] else ""
    about = f"{metric.label} of the second run as a multiple of that of the first"
    _show(found, about, ("first run", "second run"))
    # The ticked tensors as lines, else the one that differs most.
    ticked = [name for name in chosen.ticked(str(shown.path)) if name in common]
    curves = [
        (f"{side}, {tensor}", table.steps, values)
        for tensor in ticked or [name for name in found.names if name in common][:1]
        for side, table in zip(names, (mine, theirs), strict=True)
        for row, values in zip(table.rows, table.values[statistic], strict=True)
        if row.name == tensor
    ]
    picture.draw_lines(mine.metric, curves, len(names))
    ending.requests([services.sensitivity_request(run, mine.metric, "tensor") for run in (shown, other)])


def _other(shown: Subject) -> Subject | None:
    """Let the user choose the second run from recent ones, neighbours and samples."""
    options = [str(path) for path in services.other_runs(shown)]
    widget = f"runs.{_OTHER}"
    wanted = st.session_state.get(widget) or state.choice_text(_OTHER)
    if wanted not in options and wanted and wanted != str(shown.path):
        # The user or a link chose it, so runs opened since do not displace it.
        options.append(wanted)
    if not options:
        st.caption("There is no second run, neither opened recently nor in the same folder.")
        return None
    labels = dict(zip(options, fmt.clipped_all(options, _PATH_WIDTH), strict=True))
    st.session_state[widget] = wanted if wanted in options else options[0]
    path = pick_one("Second run", options, key=widget, format_func=labels.__getitem__, width=700)
    state.publish(**{_OTHER: path})
    other = answer(lambda: services.load_subject(path), "Reading headers")
    if other is not None and other.n_unread:
        header.rest(other)
        return None
    return other
