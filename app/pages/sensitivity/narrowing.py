"""What of a measurement is on screen: search, filters and the modules that are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import streamlit as st
from inshrink_app.pages.sensitivity import grouping
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.widgets.formatting import elide, inked, markdown_text
from inshrink_app.widgets.tables import METRICS, Sensitivity, Subject

__all__ = ["View", "narrowed"]

_FIND = "find"
_SCALES = {"log": "Log", "linear": "Linear"}
_MOST_FOUND = 5000
"""Names a search box can hold; the browser filters them."""


class View(NamedTuple):
    """What of a measurement is on screen."""

    shown: Subject
    tensors: Sensitivity
    table: Sensitivity
    groups: tuple[grouping.Group, ...]
    statistic: str
    clip: bool
    scale: str

    @property
    def metric(self) -> str:
        """A key of `METRICS`."""
        return self.table.metric


def narrowed(shown: Subject, tables: Mapping[str, Sensitivity], by: str, statistic: str) -> View:
    """Draw search, filters and breadcrumb, and return what is left to be shown."""
    tensors = tables["tensor"]
    within = chosen.within() if by == "block" else ""
    names = [row.name for row in tensors.rows]
    if within and not grouping.members_of(names, within):
        within = ""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        _find_box(names)
        pattern, layers, clip, scale = _filters(tensors, by)
    if by == "layer_type":
        kept = [i for i, row in enumerate(tables[by].rows) if pattern in row.name.casefold()]
        table = grouping.take(tables[by], kept)
        return View(shown, tensors, table, (), statistic, clip, scale)
    if by == "block":
        _breadcrumb(within)
    inside = grouping.members_of(names, within)
    matching = [
        i
        for i in inside
        if pattern in names[i].casefold() and (not layers or tensors.rows[i].layer in layers)
    ]
    kept_table = grouping.take(tensors, matching)
    if by == "tensor":
        groups = tuple(grouping.Group(names[i], (place,)) for place, i in enumerate(matching))
        return View(shown, tensors, kept_table, groups, statistic, clip, scale)
    whole = len(matching) == len(inside)
    groups = grouping.groups_within([names[i] for i in matching], within)
    table = grouping.aggregate(kept_table, groups, tables["block"] if whole else None)
    return View(shown, tensors, table, groups, statistic, clip, scale)


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
        width=300,
    )


def _found() -> None:
    name = st.session_state.get(_FIND)
    chosen.apply(Event("search", name) if name else Event("close"))


def _filters(tensors: Sensitivity, by: str) -> tuple[str, list[str], bool, str]:
    """Draw the filters; return the text, the layer types, whether to clip, and the scale."""
    layers = sorted({row.layer for row in tensors.rows if row.layer})
    pattern = st.text_input(
        "Filter rows",
        placeholder="Filter by name",
        key="row_filter",
        icon=":material/search:",
        label_visibility="collapsed",
        width=190,
    )
    picked: list[str] = []
    if len(layers) > 1 and by != "layer_type":
        picked = st.pills(
            "Layer types",
            layers,
            selection_mode="multi",
            format_func=inked,
            key="layer_filter",
            label_visibility="collapsed",
        )
    clip = st.toggle(
        "Clip outliers",
        value=True,
        key="clip",
        help="Spread the colours between the 1st and 99th percentile.",
    )
    key = f"scale.{'pooled' if METRICS[tensors.metric].pooled else 'plain'}.{METRICS[tensors.metric].scale}"
    if key not in st.session_state:
        st.session_state[key] = METRICS[tensors.metric].scale
    scale = st.segmented_control(
        "Colours",
        list(_SCALES),
        format_func=lambda name: inked(_SCALES[name]),
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
        for module in grouping.trail(within):
            st.markdown("›", width="content")
            last = module.rpartition(".")[2]
            st.button(
                markdown_text(elide(last, 24)),
                key=f"crumb.{module}",
                type="tertiary",
                on_click=chosen.go_within,
                args=(module,),
                disabled=module == within,
            )
