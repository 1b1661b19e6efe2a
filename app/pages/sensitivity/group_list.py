"""The tensors of a block or a layer type at one step, the largest value first; a click looks into one."""

from __future__ import annotations

import numpy as np
import streamlit as st
from inshrink_app.pages.sensitivity import grouping
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event, Selection
from inshrink_app.widgets.formatting import count_text, elide, markdown_text, value_text
from inshrink_app.widgets.tables import METRICS, Sensitivity

__all__ = ["show"]

_NAME_WIDTH = 60
_MOST_LISTED = 200
_ROWS_WITHOUT_SCROLLING = 6


def show(tensors: Sensitivity, statistic: str, found: Selection, *, by_block: bool) -> None:
    """List a group's tensors.

    Parameters
    ----------
    tensors
        A metric by tensor.
    statistic
        A key of its values.
    found
        The group, and the step.
    by_block
        Whether the heatmap can be narrowed to the group.
    """
    names = [row.name for row in tensors.rows]
    places = grouping.members_of(names, found.layer)
    if not places:
        places = tuple(i for i, row in enumerate(tensors.rows) if row.layer == found.layer)
    column = tensors.steps.index(found.step)
    values = tensors.values[statistic][:, column]
    order = sorted(places, key=lambda i: -values[i] if np.isfinite(values[i]) else np.inf)
    symbol = METRICS[tensors.metric].symbol
    said = (
        f"{count_text(len(places))} tensors, by {symbol} at step {count_text(found.step)}, the largest first."
    )
    st.caption(markdown_text(said))
    if len(places) > 1 and by_block:
        st.button(
            "Show its rows",
            icon=":material/zoom_in:",
            on_click=chosen.go_within,
            args=(found.layer,),
            help="The heatmap of this block alone.",
        )
    with st.container(
        height=260 if len(order) > _ROWS_WITHOUT_SCROLLING else "content", border=False, gap="xxsmall"
    ):
        for i in order[:_MOST_LISTED]:
            label = f"{elide(names[i], _NAME_WIDTH)} · {value_text(float(values[i]))}"
            st.button(
                markdown_text(label),
                key=f"group.{names[i]}",
                type="tertiary",
                on_click=chosen.apply,
                args=(Event("table", names[i]),),
            )
    if len(order) > _MOST_LISTED:
        st.caption(f"{count_text(len(order) - _MOST_LISTED)} more are not listed; find them by name above.")
