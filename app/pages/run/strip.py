"""The strip that stays visible: size, ratio, bits and costs of the choice, each with its change."""

from __future__ import annotations

import math
from collections.abc import Callable

import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.run.board import COSTS, MEASURED, Board, Figures
from inshrink_app.widgets import fmt

_SIZES: dict[str, tuple[str, Callable[[float], str]]] = {
    "nbytes": ("Archive", fmt.size),
    "ratio": ("Ratio", fmt.ratio),
    "bits": ("Bits", fmt.value),
}


def show(board: Board) -> None:
    """Draw the strip."""
    now, before = board.figures, None
    if board.now.before and board.intent.is_by_hand:
        before = board.figures_of(board.now.before[-1][0])
    with (
        st.container(key="strip"),
        st.container(horizontal=True, vertical_alignment="center", gap="small"),
    ):
        if now is not None:
            _figures(board, now, before)
        _buttons(board)


def _figures(board: Board, now: Figures, before: Figures | None) -> None:
    """Draw the known figures, and whether they are measured or estimated."""
    bound = board.now.bound
    costs = {kind: (COSTS[kind], fmt.percent if kind != "divergence" else fmt.value) for kind in COSTS}
    if bound.kind != "divergence":
        del costs["divergence"]
    for name, (label, text) in {**_SIZES, **costs}.items():
        value = getattr(now, name)
        if value is not None:
            shown = f":red[{text(value)}]" if name == bound.kind and not bound.is_kept(value) else text(value)
            change = _change(value, getattr(before, name, None), text)
            st.markdown(f":small[{label}] **{shown}**{change}", width="content")
    if now.basis == MEASURED:
        st.badge("measured", icon=":material/check:", color="green")
    else:
        st.badge("estimated", icon=":material/calculate:", color="gray")
    if not bound.is_kept(bound.of(now)):
        st.badge("beyond the bound", icon=":material/warning:", color="red")


def _change(now: float, before: float | None, text: Callable[[float], str]) -> str:
    """Return a signed change against the previous value; empty for none."""
    if before is None or text(now) == text(before) or math.isclose(now, before, rel_tol=1e-3):
        return ""
    return f" :small[({'+' if now > before else '−'}{text(abs(now - before))})]"


def _buttons(board: Board) -> None:
    """Draw *Undo*, and *Automatic*, which returns the choice to the bound."""
    now, shown = board.now, board.shown

    def undo() -> None:
        state.clicked()
        services.undo_bits(shown)

    def automatic() -> None:
        state.clicked()
        services.change_bits(shown, {}, "")

    with st.container(horizontal=True, horizontal_alignment="right", gap="small", key="undo"):
        st.button(
            "Undo",
            icon=":material/undo:",
            on_click=undo,
            disabled=not now.before,
            key="strip.undo",
            type="tertiary",
            help="Takes back the last change of bits (u).",
        )
    if now.config:
        st.button(
            "Automatic",
            icon=":material/auto_mode:",
            on_click=automatic,
            key="strip.automatic",
            type="tertiary",
            help="Each step gets the bits that keep the bound.",
        )
