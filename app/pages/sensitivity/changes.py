"""Two steps of a run, and two runs: how a metric differs, and how far the weights moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.sensitivity import METRICS, Sensitivity
from inshrink_app.model.subject import Subject
from inshrink_app.theme import DIVERGING
from inshrink_app.widgets import ending, fmt, listing, sides
from inshrink_app.widgets.figures import colour_bar, lay_out, log_figure, log_ticks
from inshrink_app.widgets.heatmap import bucket_steps, cells, row_labels
from inshrink_app.widgets.layout import allow, answer, chart, is_allowed, section
from numpy.typing import NDArray

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import Row
    from inshrink_core.verbs.diff import StepDiff


_ROW_PIXELS = 19
_SMALLEST_END = 0.05
"""A scale narrower than this would blow noise up to full colour: 2^0.05 is four percent."""

_MOST_DRAWN = 30
_NAMES_LISTED = 20

_FIRST, _SECOND = "a", "b"
_OTHER, _TENSOR = "other", "runs.tensor"
_PATH_WIDTH, _NAME_WIDTH = 90, 30


class Changes(NamedTuple):
    """Changes in octaves, the largest at the last step first.

    Parameters
    ----------
    names, layers
        Of each row.
    steps
        Of each column.
    values
        float64 ``[rows, steps]``; NaN where one of the two has no value.
    first, second
        What each row is compared by: the values at both steps, or of both runs at the last common step.
    only_first, only_second
        Tensors that only one of the two has.
    """

    names: tuple[str, ...]
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()


def octaves(before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the base-2 logarithm of a quotient; NaN where one of the two is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> octaves(np.array([1.0, 0.0]), np.array([4.0, 1.0])).tolist()
    [2.0, nan]
    """
    first, second = np.broadcast_arrays(before.astype(np.float64), after.astype(np.float64))
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    quotient = np.divide(second, first, out=np.ones(first.shape), where=sound)
    return np.where(sound, np.log2(quotient), np.nan)


def between_steps(table: Sensitivity, statistic: str, first: int, second: int) -> Changes:
    """Return how rows changed from one step to every step up to another.

    Parameters
    ----------
    table
        One metric.
    statistic
        A key of its values.
    first, second
        Any two steps of it, in any order.
    """
    values = table.values[statistic]
    a, b = table.steps.index(first), table.steps.index(second)
    columns = slice(min(a, b), max(a, b) + 1)
    has_first, has_second = np.isfinite(values[:, a]), np.isfinite(values[:, b])
    found = _ordered(
        table.rows, table.steps[columns], values[:, [a]], values[:, columns], 0 if b < a else b - a
    )
    return found._replace(
        only_first=_named(table, has_first & ~has_second), only_second=_named(table, has_second & ~has_first)
    )


def between_runs(mine: Sensitivity, other: Sensitivity, statistic: str) -> Changes:
    """Return how rows of one run differ from those of the same name in another, at their common steps."""
    names, others = ({row.name: i for i, row in enumerate(table.rows)} for table in (mine, other))
    common = [name for name in names if name in others]
    steps = tuple(step for step in mine.steps if step in set(other.steps))
    first, second = (
        table.values[statistic][
            np.ix_([places[name] for name in common], [table.steps.index(s) for s in steps])
        ]
        for table, places in ((mine, names), (other, others))
    )
    found = _ordered([mine.rows[names[name]] for name in common], steps, first, second, -1)
    return found._replace(
        only_first=tuple(name for name in names if name not in others),
        only_second=tuple(name for name in others if name not in names),
    )


def _ordered(
    rows: Sequence[Row],
    steps: tuple[int, ...],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    at: int,
) -> Changes:
    """Put the rows with the largest change at a column first, in either direction; unknown ones come last."""
    change = octaves(first, second)
    if not steps:
        change = first = second = np.full((len(rows), 1), np.nan)
    first = np.broadcast_to(first, change.shape)
    last = change[:, at]
    order = np.argsort(np.where(np.isfinite(last), -np.abs(last), np.inf), kind="stable")
    return Changes(
        names=tuple(rows[i].name for i in order),
        layers=tuple(rows[i].layer_type for i in order),
        steps=steps,
        values=change[order, : len(steps)],
        first=first[order, at].astype(np.float64),
        second=second[order, at].astype(np.float64),
    )


def _named(table: Sensitivity, which: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(row.name for row, chosen in zip(table.rows, which, strict=True) if chosen)


def changes_figure(
    names: Sequence[str], steps: Sequence[int], changes: NDArray[np.float64], what: str
) -> go.Figure:
    """Draw changes in octaves, red for less and blue for more, white for none.

    Parameters
    ----------
    names, steps
        Rows and columns.
    changes
        ``[rows, steps]``, base-2 logarithms of quotients; NaN where there is none.
    what
        Names the colour scale.
    """
    columns = bucket_steps(changes.astype(np.float32), steps)
    finite = np.abs(columns.values[np.isfinite(columns.values)])
    end = max(_SMALLEST_END, float(np.percentile(finite, 99)) if finite.size else 1.0)
    # The outermost stand a little inside: at the very end they would touch the title.
    ticks = [part * end for part in (-0.94, -0.5, 0.0, 0.5, 0.94)]
    texts = [f"× {fmt.value(2.0**tick)}" for tick in ticks]
    rows = [f"<b>{fmt.html(name)}</b>" for name in names]
    missing = "%{y}<br>step %{x}<br>no value in one of the two<extra></extra>"
    figure = cells(
        columns,
        rows,
        np.exp2(columns.values.astype(np.float64)),
        f"%{{y}}<br>step %{{x}}<br>times %{{customdata:{fmt.d3_format(())}}}<extra></extra>",
        missing=missing,
        zmin=-end,
        zmax=end,
        colorscale=DIVERGING,
        colorbar=colour_bar(what, {"tickvals": ticks, "ticktext": texts}),
    )
    lay_out(figure, max(192, len(names) * _ROW_PIXELS + 62))
    figure.update_yaxes(tickvals=rows, ticktext=row_labels(names))
    return figure


def _draw(found: Changes, unit: str, alt: str) -> None:
    """Draw the rows that differ most."""
    if not found.names or not found.steps:
        st.caption("There is nothing to compare.")
        return
    n = min(_MOST_DRAWN, len(found.names))
    chart(changes_figure(found.names[:n], found.steps, found.values[:n], unit), "changes", alt)
    rest = len(found.names) - n
    said = f"; {fmt.count(rest)} others differ less." if rest else "."
    st.caption(
        f"The {fmt.count(n)} tensors that differ most{said} Blue: larger. Red: smaller. White: the same. "
        "Grey: no value."
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
            "layer type": found.layers,
            first: found.first,
            second: found.second,
            "times": times,
        }
    )


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
        with section("There is one checkpoint"):
            st.write("A difference needs two steps.")
        return
    first, second = _steps(table.steps)
    if first == second:
        st.info("Choose two different steps.", icon=":material/info:")
        return
    found = between_steps(table, statistic, first, second)
    label = METRICS[table.metric].label
    with st.container(border=True):
        _draw(found, f"vs step {first:,}", f"{label} of tensors, as a multiple of step {first:,}")
        _list_names(found.only_first, f"Only at step {fmt.count(first)}")
        _list_names(found.only_second, f"Only at step {fmt.count(second)}")
    moved = _moved(shown, first, second)
    _steps_table(found, moved, (first, second), label)
    if moved is not None:
        _list_names(moved.reshaped, "With another shape or dtype")
    from inshrink_core.verbs.diff import Diff

    ending.requests([Diff(str(shown.path), steps=(first, second))])


def _steps(steps: Sequence[int]) -> tuple[int, int]:
    """Draw the two pickers, beginning with what the link says; by default the first and the last step."""
    chosen = {}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        for key, label, default in ((_FIRST, "From step", steps[0]), (_SECOND, "To step", steps[-1])):
            widget = f"steps.{key}"
            if st.session_state.get(widget) not in steps:
                known = state.choice(key, [str(step) for step in steps], str(default))
                st.session_state[widget] = int(known)
            chosen[key] = st.selectbox(label, steps, key=widget, format_func=fmt.count, width=170)
        st.button("Swap", icon=":material/swap_horiz:", on_click=_swap)
    state.publish(**{key: str(step) for key, step in chosen.items()})
    return chosen[_FIRST], chosen[_SECOND]


def _swap() -> None:
    keys = (f"steps.{_FIRST}", f"steps.{_SECOND}")
    st.session_state[keys[0]], st.session_state[keys[1]] = (st.session_state[key] for key in reversed(keys))


def _moved(shown: Subject, first: int, second: int) -> StepDiff | None:
    """Measure the movement of the weights; ask first where much must be read."""
    cost = services.diff_cost(shown)
    asked = f"diff.asked.{shown.path}"
    if not is_allowed(asked, cost):
        label = f"Measure movement (reads {fmt.size(cost)})"
        st.button(label, icon=":material/play_arrow:", on_click=allow, args=(asked,))
        return None
    return answer(lambda: services.moved_between(shown, first, second), "Comparing both steps…")


def _steps_table(found: Changes, moved: StepDiff | None, steps: tuple[int, int], label: str) -> None:
    """List every tensor, the largest change first."""
    before, after = (f"{label.lower()} at {step}" for step in steps)
    frame = _table_of(found, before, after)
    if moved is not None:
        rows = {row.spec.key: row for row in moved.tensors}
        known = [rows.get(name) for name in found.names]
        frame.insert(2, "shape", [fmt.shape(row.spec.shape) if row else "" for row in known])
        for column, name in (("moved", "relative"), ("cosine", "cosine"), ("changed", "changed")):
            frame[column] = [getattr(row.movement, name) if row else None for row in known]
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
            "times": "The value at the second step divided by that at the first",
            "moved": "Norm of the difference divided by the norm at the first step",
            "cosine": "Between the values at both steps",
            "changed": "Share of values of which any bit changed",
        },
    )


Measured = Callable[[Subject], Mapping[str, Sensitivity] | None]
"""Returns a metric of a run by grouping, or draws how to come to it."""


def two_runs(
    shown: Subject, tables: Mapping[str, Sensitivity], statistic: str, level: str, measured: Measured
) -> None:
    """Put a second run beside this one, and over it: the same metric, tensors matched by name.

    Parameters
    ----------
    shown
        The run or archive on screen.
    tables
        A metric of it by grouping.
    statistic
        What of its values is compared.
    level
        What a row is, where both stand side by side.
    measured
        Measures the same metric of the second run.
    """
    other = _other(shown)
    if other is None:
        return
    mine = tables["tensor"]
    metric = METRICS[mine.metric]
    is_untold = mine.metric in services.untold_metrics(other)
    if is_untold and services.sensitivity_job(str(other.path), mine.metric) is None:
        st.info(f"{metric.label} is not known of the second run. {metric.needs}", icon=":material/info:")
        return
    second = measured(other)
    if second is None:
        return
    theirs = second["tensor"]
    found = between_runs(mine, theirs, statistic)
    with st.container(border=True):
        sides.show(mine, theirs, (shown.name, other.name), statistic, level)
    names = (fmt.elided(shown.name, _NAME_WIDTH), fmt.elided(other.name, _NAME_WIDTH))
    with st.container(border=True):
        if found.steps:
            _draw(found, f"vs {names[0]}", f"{metric.label} of the second run, as a multiple of the first")
        elif found.names:
            st.caption("The two runs have no step in common; their curves can still be compared below.")
        _list_names(found.only_first, f"Only in {fmt.markdown(names[0])}")
        _list_names(found.only_second, f"Only in {fmt.markdown(names[1])}")
    if found.names:
        _overlaid(found, (mine, theirs), names, statistic)
    sides.runs_snippet(shown, other, mine.metric, statistic)


def _other(shown: Subject) -> Subject | None:
    """Let the reader choose the second run, from recent ones, neighbours and samples."""
    options = [str(path) for path in services.other_runs(shown)]
    widget = f"runs.{_OTHER}"
    wanted = st.session_state.get(widget) or state.choice_text(_OTHER)
    if wanted not in options and wanted and wanted != str(shown.path):
        # It was chosen, or a link names it: other runs that were opened since do not displace it.
        options.append(wanted)
    if not options:
        with section("There is no second run"):
            st.write("You can compare this run with any run opened recently, or in the same folder.")
        return None
    labels = dict(zip(options, fmt.elided_all(options, _PATH_WIDTH), strict=True))
    st.session_state[widget] = wanted if wanted in options else options[0]
    chosen = st.selectbox("Second run", options, key=widget, format_func=labels.__getitem__, width=700)
    state.publish(**{_OTHER: chosen})
    return answer(lambda: services.load_subject(chosen), "Reading headers…")


def _overlaid(
    found: Changes, tables: tuple[Sensitivity, Sensitivity], names: tuple[str, str], statistic: str
) -> None:
    """Draw one tensor's course in both runs, and list all tensors."""
    # Told to the browser each time: of another metric the tensors stand in another order.
    kept = st.session_state.get(f"{_TENSOR}.kept")
    st.session_state[_TENSOR] = st.session_state.get(_TENSOR, kept)
    if st.session_state[_TENSOR] not in found.names:
        st.session_state[_TENSOR] = found.names[0]
    tensor = st.selectbox("Tensor", found.names, key=_TENSOR, width=420)
    st.session_state[f"{_TENSOR}.kept"] = tensor
    metric = METRICS[tables[0].metric]
    curves = {}
    for table, name, side in zip(tables, names, ("", " (second)" * (names[0] == names[1])), strict=True):
        values = table.values[statistic][[row.name for row in table.rows].index(tensor)]
        curves[name + side] = list(zip(table.steps, map(float, values), strict=True))
    drawn = log_figure(curves, {metric.symbol: list(curves)})
    if metric.scale == "log":
        drawn.update_yaxes(type="log", **log_ticks(value for curve in curves.values() for _, value in curve))
    chart(
        drawn,
        f"runs.course.{tensor}",
        f"{metric.label} of {tensor} in both runs, over the steps",
    )
    listing.show(
        _table_of(found, "first run", "second run"),
        "two-runs",
        alt="Tensors by how much they differ between both runs at the last common step",
        formats={"first run": listing.SMALL, "second run": listing.SMALL, "times": "%.3f"},
        helps={"times": "The value in the second run divided by that in the first"},
    )
