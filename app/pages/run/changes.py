"""Comparison of two steps or of two runs: differences of a metric, and movement of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.run import heatmap
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.heatmap import heatmap_figure
from inshrink_app.widgets import ending, fmt, listing
from inshrink_app.widgets.choices import one_of_many, pick_one
from inshrink_app.widgets.figures import log_figure, log_ticks
from inshrink_app.widgets.layout import allowed, answer, chart, section
from numpy.typing import NDArray

from inshrink_core.analysis import Moved

_MOST_DRAWN = 30
_NAMES_LISTED = 20

_FIRST, _SECOND = "a", "b"
_OTHER = "other"
_PATH_WIDTH, _NAME_WIDTH = 90, 30


class Changes(NamedTuple):
    """Differences of a metric by tensor, the largest change at the last step first.

    Parameters
    ----------
    table
        Quotients of values and their reference; NaN where one of the two is not positive.
    first, second
        The compared values of each tensor: at both steps, or of both runs at the last common step.
    only_first, only_second
        Tensors that only one side has.
    """

    table: Sensitivity
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(row.name for row in self.table.rows)


def between_steps(table: Sensitivity, statistic: str, first: int, second: int) -> Changes:
    """Return how tensors changed from one step to every step up to another.

    Parameters
    ----------
    table
        Table of one metric.
    statistic
        A key of its values.
    first, second
        Any two of its steps, in any order.
    """
    values = table.values[statistic]
    a, b = table.steps.index(first), table.steps.index(second)
    columns = slice(min(a, b), max(a, b) + 1)
    has_first, has_second = np.isfinite(values[:, a]), np.isfinite(values[:, b])
    shown = dataclasses.replace(table, steps=table.steps[columns], values={statistic: values[:, columns]})
    return _compared(shown, statistic, values[:, [a]], 0 if b < a else b - a)._replace(
        only_first=_named(table, has_first & ~has_second), only_second=_named(table, has_second & ~has_first)
    )


def between_runs(mine: Sensitivity, other: Sensitivity, statistic: str) -> Changes:
    """Return how tensors of another run differ from those of the same name, at the common steps."""
    places, others = ({row.name: i for i, row in enumerate(table.rows)} for table in (mine, other))
    common = [name for name in places if name in others]
    steps = tuple(step for step in mine.steps if step in set(other.steps))
    first, second = (
        table.values[statistic][np.ix_([at[name] for name in common], list(map(table.steps.index, steps)))]
        for table, at in ((mine, places), (other, others))
    )
    rows = tuple(mine.rows[places[name]] for name in common)
    shown = dataclasses.replace(mine, rows=rows, steps=steps, values={statistic: second})
    return _compared(shown, statistic, first, -1)._replace(
        only_first=tuple(name for name in places if name not in others),
        only_second=tuple(name for name in others if name not in places),
    )


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


def _named(table: Sensitivity, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(row.name for row, chosen in zip(table.rows, which, strict=True) if chosen)


def _draw(found: Changes, statistic: str, alt: str) -> None:
    """Draw the tensors that differ most."""
    if not found.names or not found.table.steps:
        st.caption("There is nothing to compare.")
        return
    n = min(_MOST_DRAWN, len(found.names))
    most = heatmap.take(found.table, range(n))
    chart(heatmap_figure(most, statistic, relative="times"), "changes", alt)
    rest = len(found.names) - n
    others = f"; {fmt.count(rest)} others differ less." if rest else "."
    st.caption(
        f"{alt}. The {fmt.count(n)} tensors that differ most{others} Blue: larger. Red: smaller. White: the "
        "same. Grey: no value."
    )


def _list_names(names: Sequence[str], label: str) -> None:
    """List tensors that one side lacks."""
    if not names:
        return
    listed = "\n".join(names[:_NAMES_LISTED])
    more = f"\n… and {fmt.count(len(names) - _NAMES_LISTED)} more" if len(names) > _NAMES_LISTED else ""
    st.markdown(f"**{label}** ({fmt.count(len(names))})")
    st.code(listed + more, language=None, wrap_lines=True)


def _table_of(found: Changes, first: str, second: str) -> pd.DataFrame:
    """List every tensor with both values, the largest change first."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times = found.second / found.first
    return pd.DataFrame(
        {
            "tensor": found.names,
            "layer type": [row.layer_type for row in found.table.rows],
            first: found.first,
            second: found.second,
            "times": times,
        }
    )


def two_steps(shown: Subject, tables: Mapping[str, Sensitivity], statistic: str) -> None:
    """Compare any two steps of a run: a metric by tensor, and the movement of the weights.

    Parameters
    ----------
    shown
        The run or archive.
    tables
        A metric by grouping.
    statistic
        The compared statistic.
    """
    table = tables["tensor"]
    if len(table.steps) < 2:
        with section("There is one checkpoint"):
            st.write("A difference needs two steps.")
        return
    first, second = _steps(table.steps)
    if first == second:
        st.info("Choose two different steps.", icon=":material/info:")
        return
    found = between_steps(table, statistic, first, second)
    metric = METRICS[table.metric]
    _draw(found, statistic, f"{metric.label} as a multiple of that at step {fmt.count(first)}")
    _list_names(found.only_first, f"Only at step {fmt.count(first)}")
    _list_names(found.only_second, f"Only at step {fmt.count(second)}")
    moved = _moved(shown, first, second)
    _steps_table(found, moved, (first, second), metric.word)
    if moved is not None:
        _list_names(moved.reshaped, "With another shape or dtype")


def _steps(steps: Sequence[int]) -> tuple[int, int]:
    """Draw the two pickers, which start with the link's steps, else with the first and the last one."""
    labels = {str(step): fmt.count(step) for step in steps}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        first = one_of_many("steps", "From step", _FIRST, labels, str(steps[0]), width=170)
        second = one_of_many("steps", "To step", _SECOND, labels, str(steps[-1]), width=170)
        st.button("Swap", icon=":material/swap_horiz:", on_click=_swap)
    return int(first), int(second)


def _swap() -> None:
    keys = (f"steps.{_FIRST}", f"steps.{_SECOND}")
    st.session_state[keys[0]], st.session_state[keys[1]] = (st.session_state[key] for key in reversed(keys))


def _moved(shown: Subject, first: int, second: int) -> Moved | None:
    """Measure the movement of the weights; ask first if it reads much."""
    asked, cost = f"diff.asked.{shown.path}", services.diff_cost(shown)
    if not allowed(asked, cost, "Measure movement", ":material/play_arrow:"):
        return None
    return answer(lambda: services.moved_between(shown, first, second), "Comparing both steps")


def _steps_table(found: Changes, moved: Moved | None, steps: tuple[int, int], label: str) -> None:
    """List every tensor, the largest change first."""
    before, after = (f"{label} at step {fmt.count(step)}" for step in steps)
    frame = _table_of(found, before, after)
    if moved is not None:
        known = [moved.tensors.get(name, (None, None)) for name in found.names]
        frame.insert(2, "shape", [fmt.shape(spec.shape) if spec else "" for spec, _ in known])
        for column, name in (("moved", "relative"), ("cosine", "cosine"), ("changed", "changed")):
            frame[column] = [getattr(row, name) if row else None for _, row in known]
    listing.show(
        frame,
        f"difference-{steps[0]}-{steps[1]}",
        alt=f"Tensors by their change from step {steps[0]} to step {steps[1]}",
        formats={
            before: listing.SMALL,
            after: listing.SMALL,
            "moved": "%.4f",
            "cosine": "%.4f",
            "changed": listing.SHARE,
        },
        helps={
            "times": "The value at the second step divided by that at the first",
            "moved": "Norm of the difference divided by the norm at the first step",
            "cosine": "Between the values at both steps",
            "changed": "Share of values of which any bit changed",
        },
    )


Measured = Callable[[Subject], Mapping[str, Sensitivity] | None]
"""Return a metric of a run by grouping, or draw how to measure it."""


def two_runs(shown: Subject, tables: Mapping[str, Sensitivity], statistic: str, measured: Measured) -> None:
    """Compare with a second run: the same metric, tensors matched by name.

    Parameters
    ----------
    shown
        The run or archive on screen.
    tables
        A metric of it by grouping.
    statistic
        The compared statistic.
    measured
        Measures the same metric of the second run.
    """
    other = _other(shown)
    if other is None:
        return
    mine = tables["tensor"]
    metric = METRICS[mine.metric]
    is_unknown = mine.metric in services.untold_metrics(other)
    if is_unknown and services.sensitivity_job(str(other.path), mine.metric) is None:
        st.info(f"{metric.label} is not known of the second run. {metric.needs}", icon=":material/info:")
        return
    second = measured(other)
    if second is None:
        return
    theirs = second["tensor"]
    found = between_runs(mine, theirs, statistic)
    if not found.names:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
        return
    if found.table.steps:
        _draw(found, statistic, f"{metric.label} of the second run as a multiple of that of the first")
    else:
        st.caption("The two runs have no step in common; their curves can still be compared below.")
    names = tuple(fmt.elided(run.name, _NAME_WIDTH) for run in (shown, other))
    _list_names(found.only_first, f"Only in {fmt.markdown(names[0])}")
    _list_names(found.only_second, f"Only in {fmt.markdown(names[1])}")
    ticked = [name for name in chosen.ticked(str(shown.path)) if name in found.names]
    _overlaid(ticked or found.names[:1], (mine, theirs), names, statistic)
    listing.show(
        _table_of(found, "first run", "second run"),
        "two-runs",
        alt="Tensors by how much they differ between both runs at the last common step",
        formats={"first run": listing.SMALL, "second run": listing.SMALL},
        helps={"times": "The value in the second run divided by that in the first"},
    )
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
        with section("There is no second run"):
            st.write("You can compare this run with any run opened recently, or in the same folder.")
        return None
    labels = dict(zip(options, fmt.elided_all(options, _PATH_WIDTH), strict=True))
    st.session_state[widget] = wanted if wanted in options else options[0]
    path = pick_one("Second run", options, key=widget, format_func=labels.__getitem__, width=700)
    state.publish(**{_OTHER: path})
    return answer(lambda: services.load_subject(path), "Reading headers")


def _overlaid(
    tensors: Sequence[str], tables: tuple[Sensitivity, Sensitivity], names: Sequence[str], statistic: str
) -> None:
    """Draw tensors of both runs over the steps: the ticked ones, else the one that differs most."""
    metric = METRICS[tables[0].metric]
    sides = names if names[0] != names[1] else [names[0], f"{names[1]} (second)"]
    panels: dict[str, list[str]] = {}
    curves = {}
    for tensor in tensors:
        panels[tensor] = [f"{side}, {tensor}" for side in sides]
        for table, label in zip(tables, panels[tensor], strict=True):
            values = table.values[statistic][[row.name for row in table.rows].index(tensor)]
            curves[label] = list(zip(table.steps, map(float, values), strict=True))
    figure = log_figure(curves, panels)
    figure.update_yaxes(type="log", tickmode="auto")
    for place, labels in enumerate(panels.values()):
        ticks = log_ticks(value for label in labels for _, value in curves[label])
        figure.update_yaxes(ticks, selector=place)
    chart(figure, "runs.course", f"{metric.label} of {', '.join(tensors)} in both runs, over the steps")
