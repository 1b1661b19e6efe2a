"""The rows of a measurement: which of them are on screen, as a table, and the tensors that one stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import METRICS, Sensitivity, Subject
from inshrink_app.pages.sensitivity import arranging, heatmap
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.widgets import fmt, listing, modules
from inshrink_app.widgets.choices import pick_one
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

from inshrink_core.analysis.findings import learning_rates
from inshrink_core.analysis.profile import Row

_FIND, _TABLE = "find", "sensitivity.table"

_RELATIVE, _ORDER = "norm", "sort"
_RELATIVE_HELP = (
    "Per weight: the value of one parameter, as the statistic has it. Share of the total: what a row's "
    "parameters carry together (mean × size), of what all carry at the step. Movement also per unit of the "
    "learning rate, summed over the steps since the checkpoint before."
)
_ORDER_HELP = (
    "The model's own order, or the largest first: by the share of the total, the value per weight, or "
    "parameters."
)

_MOST_FOUND = 5000
"""Names a search box can hold; the browser filters them."""

_MOST_ROWS = 5000
"""More rows than this make the browser slow, and nobody reads them."""

_TREND_POINTS = 40
_SHARE = "Share of the total"
_MOST_LISTED, _LISTED_WIDTH = 8, 40


class View(NamedTuple):
    """What of a measurement is on screen.

    Parameters
    ----------
    shown, tensors, level, statistic
        What was measured, and what of it is wanted.
    table, plain, nodes
        The rows as they are drawn, and per weight; and what they are: an open module, then what it holds.
    shares
        Of each row, what it carries of the total at the last step.
    is_tree
        Whether the rows stand as the model has them.
    relative
        What values are relative to.
    """

    shown: Subject
    tensors: Sensitivity
    level: str
    statistic: str
    table: Sensitivity
    plain: Sensitivity
    nodes: tuple[Node, ...]
    shares: NDArray[np.float32]
    is_tree: bool = True
    relative: str = "plain"

    @property
    def leaves(self) -> tuple[int, ...]:
        """Places of the rows that hold no other row: every tensor is in one of them."""
        return tuple(place for place, node in enumerate(self.nodes) if not node.is_open)

    @property
    def ranked(self) -> tuple[int, ...]:
        """The same, the largest share of the total first."""
        known = [place for place in self.leaves if np.isfinite(self.shares[place])]
        return tuple(sorted(known, key=lambda place: -self.shares[place]))


def tensors_of(tensors: Sensitivity, layer: str) -> tuple[int, ...]:
    """Return the places of the tensors that a row stands for: a tensor, a layer type, or a module."""
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
    return dataclasses.replace(heatmap.aggregate(tensors, nodes, tables[by]), by=by)


def narrowed(
    shown: Subject,
    tables: Mapping[str, Sensitivity],
    level: str,
    statistic: str,
    found: Selection | None = None,
) -> View:
    """Draw search, filters and order, and return what is left to be shown; what is selected can be seen."""
    tensors = tables["tensor"]
    rates = learning_rates_of(shown, tensors)
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        known = {key: word for key, word in arranging.NORMALISED.items() if key != "rate"}
        if rates is not None:  # First of all: movement follows the learning rate.
            known = {"rate": arranging.NORMALISED["rate"], **known}
        relative = _choice("Measure", _RELATIVE, known, _RELATIVE_HELP)
        _find_box([row.name for row in tensors.rows])
        with st.popover("Rows", icon=":material/filter_list:"):
            orders = dict(arranging.ORDERS)
            is_ordered = services.tells_order(shown, [row.name for row in tensors.rows])
            if not is_ordered:
                orders["forward"] = "Order of names"
            order = _choice("Sort rows by", _ORDER, orders, _ORDER_HELP)
            if not shown.is_ordered:
                st.caption(
                    "The files sort their tensors by name, so that they do not tell the model's order."
                )
            pattern, layers = _filters(tensors, level)
    above = frozenset() if found is None else frozenset({found.layer.rpartition(".")[0]} - {""})
    view = _matching(shown, tables, (level, statistic), (pattern, layers), above)
    places = tuple(range(len(view.nodes)))
    if order != "forward":
        by_order = arranging.ordered(view.plain, order, statistic)
        places = tuple(place for place in by_order if not view.nodes[place].is_open)
    plain = heatmap.take(view.plain, places)
    nodes = tuple(view.nodes[place] for place in places)
    if order != "forward":
        nodes = tuple(node._replace(depth=0) for node in nodes)
    return view._replace(
        table=arranging.normalised(plain, relative, tensors, rates),
        plain=plain,
        nodes=nodes,
        shares=view.shares[list(places)],
        is_tree=view.is_tree and order == "forward",
        relative=relative,
    )


def learning_rates_of(shown: Subject, table: Sensitivity) -> NDArray[np.float64] | None:
    """Return the learning rates that lead to the checkpoints, of movement where they were logged."""
    return learning_rates(shown.log, table.steps) if table.metric == "update" else None


def _choice(label: str, key: str, options: Mapping[str, str], tip: str) -> str:
    """Draw a choice that the address carries."""
    widget = f"rows.{key}.{next(iter(options))}"
    if st.session_state.get(widget) not in options:
        st.session_state[widget] = state.choice(key, list(options), next(iter(options)))
    chosen = str(
        pick_one(label, list(options), format_func=options.__getitem__, key=widget, help=tip, width=150)
    )
    if chosen == next(iter(options)):
        state.retract(key)
    else:
        state.publish(**{key: chosen})
    return chosen


def _matching(
    shown: Subject,
    tables: Mapping[str, Sensitivity],
    drawn: tuple[str, str],
    wanted: tuple[str, Sequence[str]],
    above: frozenset[str],
) -> View:
    """Return the rows that the filters leave, in the model's order: its tree, or layer types."""
    (level, statistic), (pattern, layers), tensors = drawn, wanted, tables[modules.TENSOR]
    names = [row.name for row in tensors.rows]
    if level == modules.LAYER_TYPE:
        kinds = modules.rows_at(names, [row.layer_type for row in tensors.rows], level)
        found = modules.matching([node.name for node in kinds], pattern)
        nodes = tuple(node for node in kinds if node.name in found)
        kept = tensors
        whole: Sensitivity | None = tables[level]
    else:
        found = modules.matching(names, pattern)
        matching = [
            i
            for i, name in enumerate(names)
            if name in found and (not layers or tensors.rows[i].layer_type in layers)
        ]
        kept = heatmap.take(tensors, matching)
        opened, closed = chosen.tree(str(shown.path))
        kept_names = [names[i] for i in matching]
        nodes = modules.outline(kept_names, level, opened=opened | above, closed=closed)
        whole = tables[modules.BLOCK] if len(matching) == len(names) else None
    table = heatmap.aggregate(kept, nodes, whole)
    shares = arranging.normalised(table, "share", tensors).values["mean"][:, -1]
    is_tree = level != modules.LAYER_TYPE
    return View(shown, tensors, level, statistic, table, table, nodes, shares, is_tree=is_tree)


def _find_box(names: Sequence[str]) -> None:
    """Offer every tensor by name: the way to one without a mouse."""
    found: Selection | None = st.session_state.get("sensitivity.selection")
    options = list(names[:_MOST_FOUND])
    st.session_state[_FIND] = found.layer if found is not None and found.layer in options else None
    pick_one(
        "Find a tensor",
        options,
        key=_FIND,
        on_change=_found,
        placeholder="Find a tensor",
        label_visibility="collapsed",
        width=200,
    )


def _found() -> None:
    name = st.session_state.get(_FIND)
    chosen.apply(Event("search", name) if name else Event("close"))


def _filters(tensors: Sensitivity, level: str) -> tuple[str, list[str]]:
    """Draw the filters; return the text and the layer types."""
    layers = sorted({row.layer_type for row in tensors.rows if row.layer_type})
    pattern = st.text_input(
        "Filter rows",
        placeholder="Filter by name",
        help=modules.PATTERN_HELP,
        key="row_filter",
        icon=":material/search:",
        label_visibility="collapsed",
        width=140,
    )
    picked: list[str] = []
    if len(layers) > 1 and level != modules.LAYER_TYPE:
        picked = st.pills(
            "Layer types",
            layers,
            selection_mode="multi",
            format_func=fmt.inked,
            key="layer_filter",
            label_visibility="collapsed",
        )
    return pattern, picked


def summary(view: View) -> pd.DataFrame:
    """Return a line a row: its share of what was measured and of the size, its values, and their course."""
    tensors, table = view.tensors, view.table
    values = table.values[view.statistic]
    known = pd.DataFrame(np.where(np.isfinite(values), values, np.nan))
    first, last = known.bfill(axis=1).iloc[:, 0], known.ffill(axis=1).iloc[:, -1]
    ends = pd.concat([first, last, known.min(axis=1), known.max(axis=1)], axis=1).to_numpy()
    trend = heatmap.bucket_steps(values, table.steps, _TREND_POINTS).values
    with np.errstate(divide="ignore", invalid="ignore"):
        trend = np.log10(trend, dtype=np.float64)
    n_values = max(1, sum(row.numel for row in tensors.rows))
    told = [
        (label, share, row.numel / n_values, row.layer_type, _extent(row), *own, course[np.isfinite(course)])
        for label, row, share, own, course in zip(
            modules.labels(view.nodes),
            table.rows,
            map(float, view.shares),
            ends.tolist(),
            trend,
            strict=True,
        )
    ]
    columns = ["Layer", _SHARE, "Size", "Type", "Shape", "First", "Last", "Smallest", "Largest", "Course"]
    return pd.DataFrame(told[:_MOST_ROWS], columns=columns)


def _extent(row: Row) -> str:
    """Return the shape of a tensor, or how many tensors a row has."""
    return fmt.shape(row.shape) if row.shape is not None else fmt.counted(row.n_tensors, "tensor")


def show_table(view: View, frame: pd.DataFrame, found: Selection | None) -> None:
    """Draw the table, with the line of what is selected marked, and offer every value as files.

    Parameters
    ----------
    view, frame
        What the heatmap shows, and the `summary` of it.
    found
        What is selected.
    """
    nodes = view.nodes
    table, metric = view.table, METRICS[view.table.metric]
    tip = arranging.NORMALISED[view.relative]
    ends = ("First", "Last", "Smallest", "Largest")
    form = listing.small(frame[[*ends]].to_numpy().ravel())
    number = st.column_config.NumberColumn(format=form, help=tip)
    modules.table(
        frame,
        [node.name for node in nodes[:_MOST_ROWS]],
        _TABLE,
        () if found is None else (found.layer,),
        lambda names: chosen.apply(Event("table", names[0] if names else None)),
        alt=f"{metric.label} per layer: share, size, first, last, smallest and largest value",
        columns=dict.fromkeys(ends, number)
        | {
            _SHARE: listing.share_column(
                f"What its values carry together at the last step, of the {metric.quantity.lower()} of all"
            ),
            "Size": listing.share_column("Of the parameters of the model"),
            "Course": st.column_config.LineChartColumn(
                width="medium", help="log₁₀ of the value over the steps"
            ),
        },
    )
    if len(nodes) > _MOST_ROWS:
        st.caption(f"The first {fmt.count(_MOST_ROWS)} of {fmt.count(len(nodes))} lines.")
    stem = f"sensitivity-{table.metric}"
    listing.buttons(
        ("Download all values as CSV", f"{stem}.csv", lambda: listing.csv_bytes(long_table(table))),
        ("As JSON", f"{stem}.json", lambda: long_table(table).to_json(orient="records").encode()),
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
    """List rows with what each carries at a step, the largest first; a click opens one."""
    names = [table.rows[place].name for place in places[:_MOST_LISTED]]
    with st.container(gap="xxsmall"):
        for place, name, label in zip(places, names, fmt.elided_all(names, _LISTED_WIDTH), strict=False):
            value = float(table.values["mean"][place, at])
            said = f"{fmt.percent(float(shares[place]))} · {fmt.value(value)} per weight"
            st.button(
                fmt.markdown(f"{label} · {said}"),
                key=f"{key}.{name}",
                type="tertiary",
                on_click=chosen.apply,
                args=(Event("table", name),),
            )


def show_group(view: View, found: Selection) -> None:
    """Offer to open a module in the picture, and list what it or a layer type holds at a step."""
    tensors, at = view.tensors, view.tensors.steps.index(found.step)
    key = arranging.normalised(tensors, "share").values["mean"][:, at]
    places = sorted(
        tensors_of(tensors, found.layer), key=lambda i: -key[i] if np.isfinite(key[i]) else np.inf
    )
    n, step = fmt.counted(len(places), "tensor"), fmt.count(found.step)
    st.caption(f"{n} at step {step}; the largest first, of the total.")
    node = next((one for one in view.nodes if one.name == found.layer), None)
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
