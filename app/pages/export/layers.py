"""The layers of an export of weights as a tree: which of them are written, and buttons to choose them."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import METRICS, Subject
from inshrink_app.services import ExportRequest
from inshrink_app.widgets import fmt, listing, modules
from inshrink_app.widgets.modules import Node

KEEP, LEAVE_OUT = "export.tensors", "export.without"
"""Keys of the names and patterns that the form holds."""

_PICK, _PATTERN = "export.picked", "export.pattern"


def show(shown: Subject, request: ExportRequest) -> None:
    """Draw the tree, with what would be written of each module.

    Parameters
    ----------
    shown
        The run.
    request
        Which of its layers are kept.
    """
    model = shown.model_tensors
    names = [row.name for row in model]
    kept = set(request.keeps(names))
    with st.expander(
        f"Layers that are kept ({fmt.count(len(kept))} of {fmt.count(len(model))})",
        icon=":material/account_tree:",
        expanded=True,
    ):
        with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
            level = modules.level_slider("export", names, types=False)
            pattern = st.text_input("Only names like", key=_PATTERN, width=240, help=modules.PATTERN_HELP)
        found = modules.matching(names, pattern)
        picked = st.session_state.get(_PICK, [])
        nodes = modules.outline(names, modules.TENSOR if pattern else level, opened=picked)
        if pattern:
            nodes = tuple(node._replace(depth=0) for node in nodes if node.name in found)
        chosen = [node.name for node in nodes if node.name in picked]
        added = chosen or [pattern] * bool(pattern and found)
        with st.container(horizontal=True, vertical_alignment="center"):
            for label, key, icon in (
                ("Keep these", KEEP, ":material/check:"),
                ("Leave these out", LEAVE_OUT, ":material/block:"),
            ):
                st.button(label, icon=icon, on_click=_add, args=(key, added), disabled=not added)
            if pattern and not chosen:
                st.caption(f"Matching: {fmt.counted(len(found), 'tensor')}, all listed.", width="content")
            else:
                modules.say_picked(len(chosen), "row")
        metric, carried = services.known_shares(shown)
        quantity = METRICS[metric].quantity if metric else ""
        modules.table(
            _frame(shown, nodes, kept, quantity, carried),
            [node.name for node in nodes],
            "export.tree",
            picked,
            lambda found: st.session_state.update({_PICK: found}),
            several=True,
            alt="Layers with what is exported of them, what they carry, size, shape and bytes",
            columns={
                "Layer": st.column_config.TextColumn(width=240),
                quantity: listing.share_column("Of all, as the page Sensitivity has measured it"),
                "Size": listing.share_column("Of the bytes of all weights"),
            },
        )
        files = pd.DataFrame(
            [(row.name, fmt.shape(row.shape), row.dtype, row.nbytes) for row in model if row.name in kept],
            columns=["tensor", "shape", "dtype", "raw bytes"],
        )
        listing.table_buttons(files, "layers")


def _add(key: str, names: list[str]) -> None:
    """Put layers among those that are kept, or left out; a callback."""
    state.clicked()
    st.session_state[key] = list(dict.fromkeys([*st.session_state.get(key, []), *names]))
    st.session_state[_PICK] = []


def _frame(
    shown: Subject, nodes: tuple[Node, ...], kept: set[str], quantity: str, carried: Mapping[str, float]
) -> pd.DataFrame:
    """Return a line a node."""
    model = shown.model_tensors
    total = max(1, sum(row.nbytes for row in model))
    told = []
    for label, node in zip(modules.labels(nodes), nodes, strict=True):
        rows = [model[place] for place in node.members]
        states = {row.name in kept for row in rows}
        nbytes = sum(row.nbytes for row in rows)
        told.append(
            (
                label,
                "in part" if len(states) > 1 else "yes" if True in states else "no",
                sum(carried.get(row.name, 0.0) for row in rows),
                nbytes / total,
                fmt.shape(rows[0].shape) if node.is_open is None else fmt.counted(len(rows), "tensor"),
                fmt.size(nbytes),
            )
        )
    frame = pd.DataFrame(told, columns=["Layer", "Exported", quantity, "Size", "Shape", "Raw bytes"])
    return frame if carried else frame.drop(columns=quantity)
