"""The rows of a measurement: which of them are on screen, as a table, and the tensors that one stands for."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.problem import ServiceError
from inshrink_app.model.sensitivity import METRICS, Sensitivity
from inshrink_app.model.subject import Subject
from inshrink_app.pages.sensitivity import arranging
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.widgets import fmt, heatmap, listing, modules
from inshrink_app.widgets.modules import Node
from numpy.typing import NDArray

if TYPE_CHECKING:
    from inshrink_core.analysis.profile import Row

_FIND, _TABLE = "find", "sensitivity.table"
_SCALES = {"log": "Log", "linear": "Linear"}

_RELATIVE, _ORDER = "norm", "sort"
_RELATIVE_HELP = (
    "As is; relative to the first value of each row, in colours around 1; or what a row's parameters carry "
    "together (mean × size), as a share of what all carry at the step."
)
_ORDER_HELP = (
    "The model's own order, or the largest first: by the last value, bits as archived, or parameters."
)

_MOST_FOUND = 5000
"""Names a search box can hold; the browser filters them."""

_MOST_ROWS = 5000
"""More rows than this make the browser slow, and nobody reads them."""

_TREND_POINTS = 40
_NAME_WIDTH = 60
_MOST_LISTED = 200
_LISTED_WITHOUT_SCROLLING = 6


class View(NamedTuple):
    """What of a measurement is on screen.

    Parameters
    ----------
    shown, tensors, level, statistic
        What was measured, and what of it is wanted.
    table, nodes
        The rows, as they are drawn, and what they are.
    kept
        The tensors that the filters leave; members of nodes are places in it.
    whole
        Rows that were measured as a whole.
    within
        The module that is opened; empty for all.
    is_tree
        Whether the rows stand as the model has them.
    clip, scale, relative
        How colours are chosen, and what values are relative to.
    """

    shown: Subject
    tensors: Sensitivity
    level: str
    statistic: str
    table: Sensitivity
    nodes: tuple[Node, ...]
    kept: Sensitivity
    whole: Sensitivity | None
    within: str = ""
    is_tree: bool = True
    clip: bool = True
    scale: str = "log"
    relative: str = "plain"


def tensors_of(tensors: Sensitivity, layer: str) -> tuple[int, ...]:
    """Return the places of the tensors that a row stands for: a tensor, a layer type, or a module."""
    for exact in ([row.name for row in tensors.rows], [row.layer_type for row in tensors.rows]):
        if layer in exact:
            return tuple(i for i, name in enumerate(exact) if name == layer)
    return modules.members_of([row.name for row in tensors.rows], layer) if layer else ()


def at_level(tables: Mapping[str, Sensitivity], level: str) -> Sensitivity:
    """Return a measurement with all rows of a level."""
    if level in tables:
        return tables[level]
    tensors = tables[modules.TENSOR]
    nodes = modules.rows_at([row.name for row in tensors.rows], (), level)
    return heatmap.aggregate(tensors, nodes, tables[modules.BLOCK])


def narrowed(shown: Subject, tables: Mapping[str, Sensitivity], level: str, statistic: str) -> View:
    """Draw search, filters, order and breadcrumb, and return what is left to be shown."""
    tensors = tables["tensor"]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        _find_box([row.name for row in tensors.rows])
        pattern, layers, clip, scale = _filters(tensors, level)
        relative = "plain"
        if not METRICS[tensors.metric].pooled:
            relative = _choice("Normalise", _RELATIVE, arranging.NORMALISED, _RELATIVE_HELP)
        orders = {**arranging.ORDERS, "sensitivity": METRICS[tensors.metric].quantity}
        order = _choice("Sort rows by", _ORDER, orders, _ORDER_HELP)
    view = _matching(shown, tables, level, statistic, (pattern, layers))
    bits = _bits_of(view) if order == "bits" else {}
    if order == "bits" and not bits:
        st.caption("Bits per weight need an archive of this run beside it; the rows are in forward order.")
        order = "forward"
    table = arranging.normalised(view.table, relative, tensors)
    places = arranging.ordered(table, order, statistic, bits)
    return view._replace(
        table=heatmap.take(table, places),
        nodes=tuple(view.nodes[place] for place in places),
        is_tree=view.is_tree and order == "forward",
        clip=clip,
        scale=scale,
        relative=relative,
    )


def _choice(label: str, key: str, options: Mapping[str, str], tip: str) -> str:
    """Draw a choice that the address carries."""
    widget = f"rows.{key}"
    if st.session_state.get(widget) not in options:
        st.session_state[widget] = state.choice(key, list(options), next(iter(options)))
    chosen = str(
        st.selectbox(label, list(options), format_func=options.__getitem__, key=widget, help=tip, width=150)
    )
    if chosen == next(iter(options)):
        state.retract(key)
    else:
        state.publish(**{key: chosen})
    return chosen


def _bits_of(view: View) -> dict[str, float]:
    """Return the bits per weight of the rows on screen, as archived; empty where that is not known."""
    try:
        known = services.archived_bits(view.shown)
    except ServiceError:
        return {}
    found = {}
    for row in view.table.rows:
        members = [view.tensors.rows[place] for place in tensors_of(view.tensors, row.name)]
        sizes = [(known[one.name], one.numel) for one in members if one.name in known]
        if sizes:
            total = sum(numel for _, numel in sizes)
            found[row.name] = sum(bits * numel for bits, numel in sizes) / total
    return found


def _matching(
    shown: Subject,
    tables: Mapping[str, Sensitivity],
    level: str,
    statistic: str,
    wanted: tuple[str, Sequence[str]],
) -> View:
    """Return the rows that the filters leave, in the model's order."""
    (pattern, layers), tensors = wanted, tables[modules.TENSOR]
    names = [row.name for row in tensors.rows]
    view = functools.partial(View, shown, tensors, level, statistic)
    if level == modules.LAYER_TYPE:
        kinds = modules.rows_at(names, [row.layer_type for row in tensors.rows], level)
        nodes = tuple(node for node in kinds if pattern in node.name.casefold())
        table = heatmap.aggregate(tensors, nodes, tables[level])
        return view(table, nodes, tensors, tables[level], is_tree=False)
    within = chosen.within()
    inside = modules.members_of(names, within)
    if not inside:
        within, inside = "", tuple(range(len(names)))
    _breadcrumb(within)
    matching = [
        i
        for i in inside
        if pattern in names[i].casefold() and (not layers or tensors.rows[i].layer_type in layers)
    ]
    kept = heatmap.take(tensors, matching)
    nodes = modules.rows_at([names[i] for i in matching], (), level, within)
    whole = tables[modules.BLOCK] if len(matching) == len(inside) else None
    return view(heatmap.aggregate(kept, nodes, whole), nodes, kept, whole, within)


def _find_box(names: Sequence[str]) -> None:
    """Offer every tensor by name: the way to one without a mouse."""
    found: Selection | None = st.session_state.get("sensitivity.selection")
    options = list(names[:_MOST_FOUND])
    st.session_state[_FIND] = found.layer if found is not None and found.layer in options else None
    st.selectbox(
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


def _filters(tensors: Sensitivity, level: str) -> tuple[str, list[str], bool, str]:
    """Draw the filters; return the text, the layer types, whether to clip, and the scale."""
    layers = sorted({row.layer_type for row in tensors.rows if row.layer_type})
    metric = METRICS[tensors.metric]
    pattern = st.text_input(
        "Filter rows",
        placeholder="Filter by name",
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
    clip = st.toggle(
        "Clip outliers",
        value=True,
        key="clip",
        help="Spread the colours between the 1st and 99th percentile.",
    )
    key = f"scale.{'pooled' if metric.pooled else 'plain'}.{metric.scale}"
    st.session_state.setdefault(key, metric.scale)
    scale = st.segmented_control(
        "Colours",
        list(_SCALES),
        format_func=lambda name: fmt.inked(_SCALES[name]),
        key=key,
        required=True,
        label_visibility="collapsed",
        help="Colours by the logarithm of a value, or by the value.",
    )
    return pattern.casefold(), picked, clip, scale or "log"


def _breadcrumb(within: str) -> None:
    """Show which modules are open, and lead back out of them."""
    if not within:
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="xxsmall"):
        st.button("All", key="crumb.", type="tertiary", on_click=chosen.go_within, args=("",))
        for module in modules.trail(within):
            st.markdown("›", width="content")
            last = module.rpartition(".")[2]
            st.button(
                fmt.markdown(fmt.elided(last, 24)),
                key=f"crumb.{module}",
                type="tertiary",
                on_click=chosen.go_within,
                args=(module,),
                disabled=module == within,
            )


def lines(view: View, found: Selection | None) -> tuple[Node, ...]:
    """Return what the table lists: the tree down to the level and to what is selected, or the rows alone.

    The rows alone where the tree says nothing: sorted otherwise than by the model, or by layer type.
    """
    if not view.is_tree:
        return view.nodes
    names = [row.name for row in view.kept.rows]
    opened = () if found is None else (found.layer,)
    return modules.outline(names, view.level, within=view.within, opened=opened)


def summary(view: View, nodes: Sequence[Node]) -> pd.DataFrame:
    """Return a line a node: its share of what was measured and of the size, its values, and their course."""
    tensors, measured = view.tensors, heatmap.aggregate(view.kept, nodes, view.whole)
    shares = arranging.normalised(measured, "share", tensors).values["mean"][:, -1]
    table = arranging.normalised(measured, view.relative, tensors)
    values = table.values[view.statistic]
    trend = heatmap.bucket_steps(values, table.steps, _TREND_POINTS).values
    if METRICS[table.metric].scale == "log":
        with np.errstate(divide="ignore", invalid="ignore"):
            trend = np.log10(trend, dtype=np.float64)
    n_values = max(1, sum(row.numel for row in tensors.rows))
    told = [
        (label, share, row.numel / n_values, row.layer_type, _extent(row), *ends, course[np.isfinite(course)])
        for label, row, share, ends, course in zip(
            modules.labels(nodes), table.rows, map(float, shares), _ends(values).tolist(), trend, strict=True
        )
    ]
    columns = [
        "Layer",
        METRICS[table.metric].quantity,
        "Size",
        "Type",
        "Shape",
        "First",
        "Last",
        "Smallest",
        "Largest",
        "Course",
    ]
    frame = pd.DataFrame(told[:_MOST_ROWS], columns=columns)
    return frame.drop(columns=columns[1]) if METRICS[table.metric].pooled else frame


def _extent(row: Row) -> str:
    """Return the shape of a tensor, or how many tensors a row has."""
    return fmt.shape(row.shape) if row.shape is not None else fmt.counted(row.n_tensors, "tensor")


def _ends(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the first, last, smallest and largest finite value of each row ``[rows, 4]``; NaN for none."""
    known = np.isfinite(values)
    rows = np.arange(len(values))
    ends = np.stack(
        [
            values[rows, known.argmax(axis=1)],
            values[rows, values.shape[1] - 1 - known[:, ::-1].argmax(axis=1)],
            np.where(known, values, np.inf).min(axis=1),
            np.where(known, values, -np.inf).max(axis=1),
        ],
        axis=1,
    )
    ends[~known.any(axis=1)] = np.nan
    return ends


def show_table(view: View, nodes: Sequence[Node], frame: pd.DataFrame, found: Selection | None) -> None:
    """Draw the table, with the line of what is selected marked, and offer every value as files.

    Parameters
    ----------
    view
        What the heatmap shows.
    nodes, frame
        The `lines` below it, and their `summary`.
    found
        What is selected.
    """
    table, metric = view.table, METRICS[view.table.metric]
    number = st.column_config.NumberColumn(format=listing.SMALL if metric.scale == "log" else "%.3f")
    course = "log₁₀ of the value over the steps" if metric.scale == "log" else "Over the steps"
    modules.table(
        frame,
        [node.name for node in nodes[:_MOST_ROWS]],
        _TABLE,
        () if found is None else (found.layer,),
        lambda names: chosen.apply(Event("table", names[0] if names else None)),
        alt=f"{metric.label} per layer: share, size, first, last, smallest and largest value",
        columns=dict.fromkeys(("First", "Last", "Smallest", "Largest"), number)
        | {
            metric.quantity: modules.share_column("What its values carry together at the last step, of all"),
            "Size": modules.share_column("Of the parameters of the model"),
            "Course": st.column_config.LineChartColumn(width="medium", help=course),
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


def show_group(view: View, found: Selection) -> None:
    """List the tensors of a block or a layer type at a step, the largest value first; a click opens one."""
    tensors = view.tensors
    places = tensors_of(tensors, found.layer)
    values = tensors.values[view.statistic][:, tensors.steps.index(found.step)]
    order = sorted(places, key=lambda i: -values[i] if np.isfinite(values[i]) else np.inf)[:_MOST_LISTED]
    said = f"{fmt.counted(len(places), 'tensor')}, by {METRICS[tensors.metric].symbol} at step "
    st.caption(fmt.markdown(f"{said}{fmt.count(found.step)}, the largest first."))
    if len(places) > 1 and view.level != modules.LAYER_TYPE:
        st.button(
            "Show its rows",
            icon=":material/zoom_in:",
            on_click=chosen.go_within,
            args=(found.layer,),
            help="The heatmap of this module alone.",
        )
    names = [tensors.rows[i].name for i in order]
    scrolls = len(order) > _LISTED_WITHOUT_SCROLLING
    with st.container(height=260 if scrolls else "content", border=False, gap="xxsmall"):
        for i, name, label in zip(order, names, fmt.elided_all(names, _NAME_WIDTH), strict=True):
            st.button(
                fmt.markdown(f"{label} · {fmt.value(float(values[i]))}"),
                key=f"group.{name}",
                type="tertiary",
                on_click=chosen.apply,
                args=(Event("table", name),),
            )
    if len(places) > _MOST_LISTED:
        st.caption(f"{fmt.count(len(places) - _MOST_LISTED)} more are not listed; find them by name above.")
