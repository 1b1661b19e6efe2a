"""The rows of the map: their choice and order, their table, and the tensors of each."""

from __future__ import annotations

import functools
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
from inshrink_app.widgets.figures import main_curve
from inshrink_app.widgets.layout import remembered
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

_TABLE = "map.table"
FILTER = "row_filter"

ORDERS: Mapping[str, str] = {"forward": "Model's order", "share": "Largest share first"}
"""Orders of the rows."""

COLOURS: Mapping[str, str] = {
    "sensitivity": "Sensitivity",
    "ratio": "Update / weight",
    "bits": "Bits",
    "error": "Error",
}
"""Colours of the map; sensitivity is measured by one of several metrics."""

STATISTICS: Mapping[str, str] = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}

_MAX_ROWS = 5000
"""Largest number of rows in the browser; more make it slow."""

_MAX_CURVES = 3
_KEYS = "`/` filters rows, arrows move the selected cell, `p` pins its row, `u` undoes a change of bits."
_SHARE = "Share of the total"
_MAX_LISTED, _LISTED_WIDTH, _NAME_WIDTH, _TABLE_HEIGHT = 5, 40, 48, 380


class Look(NamedTuple):
    """The display options of the map.

    Parameters
    ----------
    colour, metric
        Keys of `COLOURS` and `METRICS`; the metric measures a sensitivity.
    level, statistic, order
        The level of rows (`modules.levels`), and keys of `STATISTICS` and `ORDERS`.
    pattern
        Filter of row names; empty for all rows.
    curves
        Training metrics above the map.
    """

    colour: str
    metric: str
    level: str
    statistic: str = "mean"
    order: str = "forward"
    pattern: str = ""
    curves: tuple[str, ...] = ()


class View(NamedTuple):
    """The part of a measurement on screen.

    Parameters
    ----------
    shown, tensors, look
        The run, its measurement by tensor, and the display options.
    table, nodes
        The rows, and their nodes; an open module precedes its parts.
    shares
        Share of each row of the total at the last step.
    is_tree
        Whether the rows follow the tree of modules.
    """

    shown: Subject
    tensors: Sensitivity
    look: Look
    table: Sensitivity
    nodes: tuple[Node, ...]
    shares: NDArray[np.float64]
    is_tree: bool = True

    @property
    def ranked(self) -> list[int]:
        """Indices of the rows that contain no other row, the largest share of the total first."""
        leaves = [place for place, node in enumerate(self.nodes) if not node.is_open]
        known = [place for place in leaves if np.isfinite(self.shares[place])]
        return sorted(known, key=lambda place: -self.shares[place])


def controls(shown: Subject) -> Look:
    """Draw the display options and return them."""
    names = tuple(dict.fromkeys(row.name for row in shown.tensors if row.role == "weight"))
    known = services.available_metrics(shown)
    usual = next(key for key in (*known, "magnitude") if key != "update" or "taylor" not in known)
    colours = {key: word for key, word in COLOURS.items() if key != "ratio" or len(shown.steps) > 1}
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        colour = one_of_few("map", "Colour", "colour", colours, "sensitivity", label_visibility="collapsed")
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
            labels = {key: METRICS[key].label for key in known}
            metric = one_of_many("map", "Measure of sensitivity", state.METRIC, labels, usual)
            st.caption(f"{METRICS[metric].symbol}: {METRICS[metric].meaning} {_missing(shown)}")
            level = modules.level_slider(names)
            statistic = one_of_few("map", "Statistic", state.STATISTIC, STATISTICS, "mean")
            order = "Model's order" if services.has_model_order(shown, names) else "Order of names"
            order = one_of_few("map", "Order", "sort", {**ORDERS, "forward": order}, "forward")
            curves: list[str] = []
            if shown.log:
                first = main_curve(shown.log)
                curves = pick_several(
                    "Curves above the map",
                    list(shown.log),
                    default=[first] if first else [],
                    max_selections=_MAX_CURVES,
                    key=f"map.curves.{shown.path}",
                )
            _metrics_file()
        with st.popover("?", type="tertiary", key="keys", help="Keys of the map"):
            st.markdown(_KEYS)
    if colour in ("bits", "error"):
        statistic = "mean"
    metric = metric if colour == "sensitivity" else colour
    return Look(colour, metric, level, statistic, order, pattern, tuple(curves))


def _metrics_file() -> None:
    """Draw the choice of another file of training metrics."""
    used = state.choice_text(state.LOG)
    typed = st.text_input(
        "Curves from another file",
        used,
        key=f"map.log.{used}",
        placeholder="runs/my-training/history.csv",
        help="CSV, JSON lines or TensorBoard events. Leave it empty for the run's own log.",
    ).strip()
    if typed != used:
        state.publish(log=typed)
        st.rerun()


def _missing(shown: Subject) -> str:
    """Return which metrics are unavailable, and why; empty if all are available."""
    why: dict[str, list[str]] = {}
    for key in services.missing_metrics(shown):
        why.setdefault(METRICS[key].needs, []).append(METRICS[key].label)
    parts = [f"No {' or '.join(names)}: {reason}" for reason, names in why.items()]
    if METRICS["fisher"].needs in why:
        roles = ", ".join(role.replace("_", " ") for role in services.optimizer_state(shown))
        parts.append(f"Optimizer state found: {roles or 'none'}.")
    return " ".join(parts)


def tensors_of(tensors: Sensitivity, layer: str) -> tuple[int, ...]:
    """Return the indices of the tensors of a row: a tensor, a layer type, or a module."""
    names = [row.name for row in tensors.rows]
    for exact in (names, [row.layer_type for row in tensors.rows]):
        if layer in exact:
            return tuple(i for i, name in enumerate(exact) if name == layer)
    return modules.members_of(names, layer) if layer else ()


def narrowed(shown: Subject, tensors: Sensitivity, look: Look, found: Selection | None = None) -> View:
    """Return the filtered rows in order; the selection stays visible."""
    names = [row.name for row in tensors.rows]
    kinds = modules.rows_at(names, [row.layer_type for row in tensors.rows], modules.LAYER_TYPE)
    is_tree = look.level != modules.LAYER_TYPE
    matches = modules.matching(names if is_tree else [node.name for node in kinds], look.pattern)
    opened, closed = chosen.tree(str(shown.path))
    opened |= frozenset() if found is None else {found.layer.rpartition(".")[0]} - {""}

    def narrow() -> View:
        nodes = tuple(node for node in kinds if node.name in matches)
        if is_tree:
            places = [place for place, name in enumerate(names) if name in matches]
            listed = [names[place] for place in places]
            nodes = modules.outline(listed, look.level, opened=opened, closed=closed)
            nodes = tuple(node._replace(members=tuple(places[m] for m in node.members)) for node in nodes)
        table = heatmap.aggregate(tensors, nodes, {"mean", look.statistic})
        shares = table.shares(tensors)[:, -1]
        view = View(shown, tensors, look, table, nodes, shares, is_tree)
        if look.order == "share":
            order = view.ranked
            order += [place for place, node in enumerate(nodes) if not node.is_open and place not in order]
            nodes = tuple(nodes[place]._replace(depth=0) for place in order)
            table = heatmap.take(table, order)
            view = view._replace(table=table, nodes=nodes, shares=shares[order], is_tree=False)
        return view

    key = (str(shown.path), look, matches, opened, closed)
    return remembered("map.view", tensors, key, narrow)._replace(shown=shown)


def summary(view: View) -> pd.DataFrame:
    """Return one line per row: its shares of the total and of the size, and its values."""
    table = view.table
    values = table.values[view.look.statistic]
    known = pd.DataFrame(np.where(np.isfinite(values), values, np.nan))
    n_values = max(1, view.shown.n_parameters)
    return pd.DataFrame(
        {
            "Layer": modules.labels(view.nodes),
            _SHARE: 100 * view.shares.astype(float),
            "Size": [100 * row.numel / n_values for row in table.rows],
            "Type": [row.layer_type for row in table.rows],
            "Shape": [
                fmt.counted(row.n_tensors, "tensor") if row.shape is None else fmt.shape(row.shape)
                for row in table.rows
            ],
            "First": known.bfill(axis=1).iloc[:, 0],
            "Last": known.ffill(axis=1).iloc[:, -1],
            "Smallest": known.min(axis=1),
            "Largest": known.max(axis=1),
        }
    ).head(_MAX_ROWS)


def show_table(view: View, ticked: Sequence[str]) -> None:
    """Draw the table, with the rows drawn as lines picked, and offer every value as files."""
    run, frame = str(view.shown.path), summary(view)
    names = [node.name for node in view.nodes[:_MAX_ROWS]]

    def picked(places: list[int]) -> None:
        chosen.tick(run, names, places)
        if new := [names[place] for place in places if names[place] not in ticked]:
            chosen.select(new[-1])

    table, metric = view.table, METRICS[view.table.metric]
    ends = ("First", "Last", "Smallest", "Largest")
    form = listing.small(frame[[*ends]].to_numpy().ravel())
    number = st.column_config.NumberColumn(format=form, help="Per weight")
    share = f"Share of the total {metric.quantity.lower()} at the last step"
    listing.pickable(
        frame,
        {
            **dict.fromkeys(ends, number),
            _SHARE: listing.share_column(share),
            "Size": listing.share_column("Share of the parameters"),
        },
        f"{metric.label} per layer: share, size, first, last, smallest and largest value",
        _TABLE,
        [place for place, name in enumerate(names) if name in ticked],
        picked,
        height=_TABLE_HEIGHT,
    )
    if len(view.nodes) > _MAX_ROWS:
        st.caption(f"The first {fmt.count(_MAX_ROWS)} of {fmt.count(len(view.nodes))} rows.")

    listing.table_buttons(functools.partial(long_table, view), f"sensitivity-{table.metric}")


def long_table(view: View) -> pd.DataFrame:
    """Return every value with its row and step, all statistics side by side."""
    table = heatmap.aggregate(view.tensors, view.nodes)
    n_rows, n_steps = len(table.rows), len(table.steps)
    columns = {
        "layer": np.repeat([row.name for row in table.rows], n_steps),
        "step": np.tile(table.steps, n_rows),
    }
    return pd.DataFrame(columns | {name: values.ravel() for name, values in table.values.items()})


def show_ranked(
    table: Sensitivity, places: Sequence[int], shares: NDArray[np.float64], at: int, key: str
) -> None:
    """List rows with the share of each at a step, the largest first; a click opens one."""
    names = [table.rows[place].name for place in places[:_MAX_LISTED]]
    with st.container(gap="xxsmall"):
        for place, name, label in zip(places, names, fmt.clipped_all(names, _LISTED_WIDTH), strict=False):
            value = float(table.values["mean"][place, at])
            text = f"{fmt.percent(float(shares[place]))} · {fmt.value(value)} per weight"
            st.button(
                fmt.markdown(f"{label} · {text}"),
                key=f"{key}.{name}",
                type="tertiary",
                on_click=chosen.select,
                args=(name,),
            )


def carried(shown: Subject, metric: str, name: str, n_values: int, share: float) -> str:
    """Return what a tensor or group holds of the weights, and carries of a metric; without a full stop.

    `share` is NaN if it is not measured.
    """
    held = fmt.percent(n_values / max(1, shown.n_parameters))
    text = f"**{fmt.markdown(fmt.clipped(name, _NAME_WIDTH))}** holds {held} of the weights"
    if metric not in ("fisher", "taylor", "magnitude", "update") or not np.isfinite(share):
        return text
    return f"{text} and carries {fmt.percent(share)} of the {METRICS[metric].quantity.lower()}"


def show_group(view: View, found: Selection) -> None:
    """Offer to open a module in the map, and list the tensors of the module or layer type at a step."""
    tensors, at = view.tensors, view.tensors.steps.index(found.step)
    shares = tensors.shares()[:, at]
    order = np.argsort(-shares, kind="stable")  # NaN comes last.
    members = set(tensors_of(tensors, found.layer))
    places = [place for place in order.tolist() if place in members]
    share, n_values = float(shares[places].sum()), sum(tensors.rows[place].numel for place in places)
    text = carried(view.shown, tensors.metric, found.layer, n_values, share)
    if share > 0 and len(places) > 1:
        most = fmt.markdown(fmt.clipped(tensors.rows[places[0]].name, _NAME_WIDTH))
        text += f", {fmt.percent(float(shares[places[0]]) / share)} of that in {most}"
    st.markdown(f":small[{text}.]")
    st.caption(f"{fmt.counted(len(places), 'tensor')}, the largest share of the total first.")
    node = next((row for row in view.nodes if row.name == found.layer), None)
    if node is not None and node.is_open is not None and view.is_tree:
        st.button(
            "Close this module" if node.is_open else "Open this module",
            icon=":material/unfold_less:" if node.is_open else ":material/unfold_more:",
            on_click=chosen.fold,
            args=(str(view.shown.path), node.name),
            kwargs={"is_open": node.is_open},
            help="In the map and the table. A click on its name in the map does the same.",
        )
    show_ranked(tensors, places, shares, at, "group")
