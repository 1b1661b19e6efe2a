"""The strip that stays visible: size, ratio, bits and costs of the choice, each with its change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import streamlit as st
from inshrink_app.pages.run.board import MEASURED, Board, Figures, edit_bits, undo_bits
from inshrink_app.widgets import fmt
from inshrink_app.widgets.quality import COSTS, HELPS

_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "nbytes": ("Archive", fmt.size),
    "ratio": ("Ratio", fmt.ratio),
    "bits": ("Bits", fmt.value),
    **{kind: (cost.label, cost.text) for kind, cost in COSTS.items()},
}


def show(board: Board) -> None:
    """Draw the strip: figures, *Undo*, and *Automatic*, which returns the choice to the bound."""
    now, before = board.figures, None
    if board.now.before and board.is_by_hand:
        before = board.figures_of(board.now.before[-1][0])
    with (
        st.container(key="strip"),
        st.container(horizontal=True, vertical_alignment="center", gap="small"),
    ):
        if now is not None:
            _figures(board, now, before)
        look: dict[str, Any] = {"type": "tertiary", "args": (board.shown,)}
        with st.container(horizontal=True, horizontal_alignment="right", gap="small", key="undo"):
            look |= {"icon": ":material/undo:", "disabled": not board.now.before}
            tip = "Takes back the last change of bits (u)."
            st.button("Undo", key="strip.undo", on_click=undo_bits, help=tip, **look)
        if board.now.config:
            look |= {"icon": ":material/auto_mode:", "args": (board.shown, {}), "disabled": False}
            tip = "Each step gets the bits that keep the bound."
            st.button("Automatic", key="strip.automatic", on_click=edit_bits, help=tip, **look)


def _figures(board: Board, now: Figures, before: Figures | None) -> None:
    """Draw the known figures, and whether they are measured or estimated."""
    bound = board.now.bound
    is_kept = bound.is_kept(bound.of(now))
    for name, (label, text) in _FIGURES.items():
        value, earlier = getattr(now, name), getattr(before, name, None)
        if value is None or (name == "divergence" != bound.kind):
            continue
        change = ""
        if (
            earlier is not None
            and text(value) != text(earlier)
            and not math.isclose(value, earlier, rel_tol=1e-3)
        ):
            change = f" :small[({'+' if value > earlier else '−'}{text(abs(value - earlier))})]"
        shown = text(value) if is_kept or name != bound.kind else f":red[{text(value)}]"
        st.markdown(f":small[{label}] **{shown}**{change}", width="content", help=HELPS.get(name))
    is_measured = now.basis == MEASURED
    icon = ":material/check:" if is_measured else ":material/calculate:"
    st.badge(now.basis, icon=icon, color="green" if is_measured else "gray")
    if not is_kept:
        st.badge("beyond the bound", icon=":material/warning:", color="red")
