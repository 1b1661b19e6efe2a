"""The rows of the map: their choice and order, their table, and the tensors of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.run import heatmap
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.selection import Selection
from inshrink_app.widgets import fmt, listing, modules
from inshrink_app.widgets.choices import one_of_few, one_of_many, pick_several
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row

_TABLE = "map.table"
FILTER = "row_filter"

NORMALISED: Mapping[str, str] = {
    "plain": "Per weight",
    "share": "Share of the total",
}
"""References of the values."""

ORDERS: Mapping[str, str] = {
    "forward": "Model's order",
    "share": "Largest share first",
}
"""Orders of the rows."""

COLOURS: Mapping[str, str] = {
    "sensitivity": "Sensitivity",
    "ratio": "Update / weight",
    "bits": "Bits",
    "error": "Error",
}
"""Colours of the map; sensitivity is measured by one of several metrics."""

STATISTICS: Mapping[str, str] = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}

_RELATIVE_HELP = (
    "Per weight: the value of one parameter. Share of the total: mean times size, of what all rows carry at "
    "the step."
)

_MOST_ROWS = 5000
"""Largest number of rows in the browser; more make it slow."""

_MOST_CURVES = 3
_TREND_POINTS = 40
_SHARE = "Share of the total"
_MOST_LISTED, _LISTED_WIDTH = 8, 40


class Look(NamedTuple):
    """The display options of the map.

    Parameters
    ----------
    colour, metric
        Keys of `COLOURS` and `METRICS`; the metric measures a sensitivity.
    level, statistic, relative, order
        The level of rows (`modules.levels`), and keys of `STATISTICS`, `NORMALISED` and `ORDERS`.
    pattern
        Filter of row names; empty for all rows.
    curves
        Training metrics above the map.
    """

    colour: str
    metric: str
    level: str
    statistic: str = "mean"
    relative: str = "plain"
    order: str = "forward"
    pattern: str = ""
    curves: tuple[str, ...] = ()


class View(NamedTuple):
    """The part of a measurement on screen.

    Parameters
    ----------
    shown, tensors, look
        The run, its measurement by tensor, and the display options.
    table, plain, nodes
        The rows as drawn, the same per weight, and their nodes; an open module precedes its parts.
    shares
        Share of each row of the total at the last step.
    is_tree
        Whether the rows follow the tree of modules.
    """

    shown: Subject
    tensors: Sensitivity
    look: Look
    table: Sensitivity
    plain: Sensitivity
    nodes: tuple[Node, ...]
    shares: NDArray[np.float32]
    is_tree: bool = True

    @property
    def leaves(self) -> tuple[int, ...]:
        """Indices of the rows that contain no other row; together they hold every tensor."""
        return tuple(place for place, node in enumerate(self.nodes) if not node.is_open)

    @property
    def ranked(self) -> tuple[int, ...]:
        """The same, the largest share of the total first."""
        known = [place for place in self.leaves if np.isfinite(self.shares[place])]
        return tuple(sorted(known, key=lambda place: -self.shares[place]))


def controls(shown: Subject) -> Look:
    """Draw the display options and return them."""
    names = tuple(dict.fromkeys(row.name for row in shown.tensors if row.role == "weight"))
    known = services.told_metrics(shown)
    telling = {key: METRICS[key].label for key in known}
    usual = next(key for key in (*known, "magnitude") if key != "update" or "taylor" not in known)
    offered = dict(COLOURS)
    if len(shown.steps) < 2:
        del offered["ratio"]
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        colour = one_of_few(
            "map", "Colour", "colour", offered, "sensitivity", label_visibility="collapsed", required=True
        )
        pattern = st.text_input(
            "Filter rows",
            placeholder="Filter: part, *.glob or /regex/",
            help=f"{modules.PATTERN_HELP} Press / to come here.",
            key=FILTER,
            icon=":material/search:",
            label_visibility="collapsed",
            width=220,
        )
        with st.popover("View", icon=":material/tune:", help="Rows, order, metric and curves"):
            metric = one_of_many("map", "Sensitivity is told by", state.METRIC, telling, usual)
            if metric not in telling:
                metric = usual
            st.caption(f"{METRICS[metric].symbol}: {METRICS[metric].meaning} {_untold(shown)}")
            level = modules.level_slider("map", names)
            relative = one_of_few("map", "Values", "norm", NORMALISED, "plain", _RELATIVE_HELP)
            statistic = one_of_few("map", "Statistic", state.STATISTIC, STATISTICS, "mean")
            forward = "Model's order" if services.tells_order(shown, names) else "Order of names"
            order = one_of_few("map", "Order", "sort", {**ORDERS, "forward": forward}, "forward")
            first = heatmap.training_loss(shown.log)
            curves: list[str] = []
            if shown.log:
                curves = pick_several(
                    "Curves above the map",
                    list(shown.log),
                    default=[first] if first else [],
                    max_selections=_MOST_CURVES,
                    key=f"map.curves.{shown.path}",
                )
    metric = metric if colour == "sensitivity" else colour
    if colour in ("bits", "error"):
        relative, statistic = "plain", "mean"
    return Look(colour, metric, level, statistic, relative, order, pattern, tuple(curves))


def _untold(shown: Subject) -> str:
    """Return which metrics are unavailable, and why; empty if all are available."""
    why: dict[str, list[str]] = {}
    for key in services.untold_metrics(shown):
        why.setdefault(METRICS[key].needs, []).append(METRICS[key].label)
    parts = [f"{' and '.join(names)} off: {reason}" for reason, names in why.items()]
    if METRICS["fisher"].needs in why:
        roles = ", ".join(role.replace("_", " ") for role in services.optimizer_state(shown))
        parts.append(f"Their optimizer state: {roles or 'none'}.")
    return " ".join(parts)


def normalised(table: Sensitivity, how: str, tensors: Sensitivity | None = None) -> Sensitivity:
    """Return a table relative to a reference.

    Parameters
    ----------
    table
        The measured table.
    how
        A key of `NORMALISED`. The share of row i at a step is m_i·n_i / Σ_j m_j·n_j, with mean m and size n.
    tensors
        All tensors, if the table has only some of the rows.

    Examples
    --------
    >>> from inshrink_core.analysis.profile import Row
    >>> rows = tuple(Row(name, "", "linear", "weight", 1, n, (n,)) for name, n in (("a", 3), ("b", 1)))
    >>> values = {"mean": np.array([[1.0, 2.0], [1.0, 2.0]], np.float32)}
    >>> table = Sensitivity(metric="fisher", by="tensor", rows=rows, steps=(1, 2), values=values)
    >>> normalised(table, "share").values["mean"][:, 0].tolist()
    [0.75, 0.25]
    """
    if how != "share":
        return table
    carried = table.carried()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        totals = np.nansum(carried if tensors is None else tensors.carried(), axis=0)
        shares = np.where(totals > 0, carried / totals, np.nan).astype(np.float32)
    return dataclasses.replace(table, values=dict.fromkeys(table.values, shares))


def tensors_of(tensors: Sensitivity, layer: str) -> tuple[int, ...]:
    """Return the indices of the tensors of a row: a tensor, a layer type, or a module."""
    for exact in ([row.name for row in tensors.rows], [row.layer_type for row in tensors.rows]):
        if layer in exact:
            return tuple(i for i, name in enumerate(exact) if name == layer)
    return modules.members_of([row.name for row in tensors.rows], layer) if layer else ()


def at_level(tables: Mapping[str, Sensitivity], level: str) -> Sensitivity:
    """Return a measurement with all rows of a level."""
    tensors = tables[modules.TENSOR]
    if level == modules.TENSOR:
        return tensors
    layers = [row.layer_type for row in tensors.rows]
    nodes = modules.rows_at([row.name for row in tensors.rows], layers, level)
    by = level if level == modules.LAYER_TYPE else modules.BLOCK
    return dataclasses.replace(heatmap.aggregate(tensors, nodes, tables.get(by)), by=by)


def narrowed(
    shown: Subject, tables: Mapping[str, Sensitivity], look: Look, found: Selection | None = None
) -> View:
    """Return the filtered rows in order; the selection stays visible."""
    tensors = tables[modules.TENSOR]
    names = [row.name for row in tensors.rows]
    is_tree = look.level != modules.LAYER_TYPE
    groups = tables.get(look.level)
    if is_tree:
        matches = modules.matching(names, look.pattern)
        places = [place for place, name in enumerate(names) if name in matches]
        groups = tables.get(modules.BLOCK) if len(places) == len(names) else None
        opened, closed = chosen.tree(str(shown.path))
        above = frozenset() if found is None else frozenset({found.layer.rpartition(".")[0]} - {""})
        names = [names[place] for place in places]
        nodes = modules.outline(names, look.level, opened=opened | above, closed=closed)
        nodes = tuple(node._replace(members=tuple(places[m] for m in node.members)) for node in nodes)
    else:
        nodes = modules.rows_at(names, [row.layer_type for row in tensors.rows], look.level)
        matches = modules.matching([node.name for node in nodes], look.pattern)
        nodes = tuple(node for node in nodes if node.name in matches)
    plain = heatmap.aggregate(tensors, nodes, groups)
    shares = normalised(plain, "share", tensors).values["mean"][:, -1]
    if look.order == "share":
        leaves = [place for place, node in enumerate(nodes) if not node.is_open]
        leaves.sort(key=lambda place: -shares[place] if np.isfinite(shares[place]) else np.inf)
        nodes = tuple(nodes[place]._replace(depth=0) for place in leaves)
        plain, shares, is_tree = heatmap.take(plain, leaves), shares[leaves], False
    table = normalised(plain, look.relative, tensors)
    return View(shown, tensors, look, table, plain, nodes, shares, is_tree)


def summary(view: View) -> pd.DataFrame:
    """Return one line per row: its shares of the total and of the size, its values, and their course."""
    table = view.table
    values = table.values[view.look.statistic]
    known = pd.DataFrame(np.where(np.isfinite(values), values, np.nan))
    with np.errstate(divide="ignore", invalid="ignore"):
        course = heatmap.StepAxis.of(table.steps, limit=_TREND_POINTS).merged(values)
        course = np.log10(course, dtype=np.float64)
    n_values = max(1, view.shown.n_parameters)
    return pd.DataFrame(
        {
            "Layer": modules.labels(view.nodes),
            _SHARE: view.shares.astype(float),
            "Size": [row.numel / n_values for row in table.rows],
            "Type": [row.layer_type for row in table.rows],
            "Shape": [_extent(row) for row in table.rows],
            "First": known.bfill(axis=1).iloc[:, 0],
            "Last": known.ffill(axis=1).iloc[:, -1],
            "Smallest": known.min(axis=1),
            "Largest": known.max(axis=1),
            "Course": [row[np.isfinite(row)] for row in course],
        }
    ).head(_MOST_ROWS)


def _extent(row: Row) -> str:
    """Return the shape of a tensor, or the number of tensors of a row."""
    return fmt.shape(row.shape) if row.shape is not None else fmt.counted(row.n_tensors, "tensor")


def show_table(view: View, ticked: Sequence[str]) -> None:
    """Draw the table, with the ticked rows picked, and offer every value as files.

    Parameters
    ----------
    view
        The rows of the map.
    ticked
        The rows drawn as lines.
    """
    run, frame = str(view.shown.path), summary(view)

    def picked(names: list[str]) -> None:
        new = [name for name in names if name not in ticked]
        chosen.set_ticked(run, names)
        if new:
            chosen.select(new[-1])

    table, metric = view.table, METRICS[view.table.metric]
    ends = ("First", "Last", "Smallest", "Largest")
    form = listing.small(frame[[*ends]].to_numpy().ravel())
    number = st.column_config.NumberColumn(format=form, help=NORMALISED[view.look.relative])
    share = f"What its values carry together at the last step, of the {metric.quantity.lower()} of all"
    modules.table(
        frame,
        [node.name for node in view.nodes[:_MOST_ROWS]],
        _TABLE,
        ticked,
        picked,
        several=True,
        alt=f"{metric.label} per layer: share, size, first, last, smallest and largest value",
        columns={
            **dict.fromkeys(ends, number),
            _SHARE: listing.share_column(share),
            "Size": listing.share_column("Of the parameters of the model"),
            "Course": st.column_config.LineChartColumn(
                width="medium", help="log₁₀ of the value over the steps"
            ),
        },
    )
    if len(view.nodes) > _MOST_ROWS:
        st.caption(f"The first {fmt.count(_MOST_ROWS)} of {fmt.count(len(view.nodes))} lines.")
    stem = f"sensitivity-{table.metric}"
    listing.buttons(
        ("CSV", f"{stem}.csv", lambda: listing.csv_bytes(long_table(table))),
        ("JSON", f"{stem}.json", lambda: long_table(table).to_json(orient="records").encode()),
    )


def long_table(table: Sensitivity) -> pd.DataFrame:
    """Return every value with its row and step, all statistics side by side."""
    n_rows, n_steps = len(table.rows), len(table.steps)
    columns = {
        "layer": np.repeat([row.name for row in table.rows], n_steps),
        "step": np.tile(table.steps, n_rows),
    }
    return pd.DataFrame(columns | {name: values.ravel() for name, values in table.values.items()})


def show_ranked(
    table: Sensitivity, places: Sequence[int], shares: NDArray[np.float32], at: int, key: str
) -> None:
    """List rows with the share of each at a step, the largest first; a click opens one."""
    names = [table.rows[place].name for place in places[:_MOST_LISTED]]
    with st.container(gap="xxsmall"):
        for place, name, label in zip(places, names, fmt.elided_all(names, _LISTED_WIDTH), strict=False):
            value = float(table.values["mean"][place, at])
            text = f"{fmt.percent(float(shares[place]))} · {fmt.value(value)} per weight"
            st.button(
                fmt.markdown(f"{label} · {text}"),
                key=f"{key}.{name}",
                type="tertiary",
                on_click=chosen.select,
                args=(name,),
            )


def show_group(view: View, found: Selection) -> None:
    """Offer to open a module in the map, and list the tensors of the module or layer type at a step."""
    tensors, at = view.tensors, view.tensors.steps.index(found.step)
    key = normalised(tensors, "share").values["mean"][:, at]
    places = sorted(
        tensors_of(tensors, found.layer), key=lambda i: -key[i] if np.isfinite(key[i]) else np.inf
    )
    n, step = fmt.counted(len(places), "tensor"), fmt.count(found.step)
    st.caption(f"{n} at step {step}; the largest first, of the total.")
    node = next((row for row in view.nodes if row.name == found.layer), None)
    if node is not None and node.is_open is not None and view.is_tree:
        st.button(
            "Close this module" if node.is_open else "Open this module",
            icon=":material/unfold_less:" if node.is_open else ":material/unfold_more:",
            on_click=chosen.fold,
            args=(str(view.shown.path), node.name),
            kwargs={"is_open": node.is_open},
            help="In the picture and the table; a click on its name in the picture does the same.",
        )
    show_ranked(tensors, places, key, at, "group")
