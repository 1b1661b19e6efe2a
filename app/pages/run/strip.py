"""The strip that stays in sight: size, ratio, bits and costs of what is chosen, each with its change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import shrinking
from inshrink_app.pages.run.board import MEASURED, Board, Figures
from inshrink_app.widgets import fmt


class _Figure(NamedTuple):
    """A figure of the strip: its name, its value and its change as text."""

    label: str
    value: str
    change: str


def show(board: Board, now: Figures | None) -> None:
    """Draw the strip."""
    before = None
    if board.now.before and shrinking.is_by_hand(board.now):
        before = boards.figures(board, board.now.before[-1][0])
    with (
        st.container(key="strip"),
        st.container(horizontal=True, vertical_alignment="center", gap="small"),
    ):
        if now is None:
            waits = board.trial is not None and board.trial.is_running
            said = "Sizes are being estimated." if waits else "No size is known yet."
            st.markdown(said, width="content")
        for one in [] if now is None else _figures(board, now, before):
            changed = f" :small[({one.change})]" if one.change else ""
            st.markdown(f":small[{one.label}] **{one.value}**{changed}", width="content")
        if now is not None:
            _mark(board, now)
        _buttons(board)


def _figures(board: Board, now: Figures, before: Figures | None) -> list[_Figure]:
    """Return the figures that are known."""
    kind = board.now.bound.kind
    found = []
    if now.nbytes is not None:
        change = _change(now.nbytes, None if before is None else before.nbytes, fmt.size)
        found.append(_Figure("Archive", fmt.size(now.nbytes), change))
    if now.ratio is not None:
        change = _change(now.ratio, None if before is None else before.ratio, fmt.ratio)
        found.append(_Figure("Ratio", fmt.ratio(now.ratio), change))
    if now.bits is not None:
        change = _change(now.bits, None if before is None else before.bits, fmt.value)
        found.append(_Figure("Bits", fmt.value(now.bits), change))
    told = dict.fromkeys([kind, "restore_cost", "drop"])
    names = {
        "restore_cost": "Restore cost",
        "drop": "Largest drop",
        "divergence": "Divergence",
    }
    for name in told:
        value = None if name == "none" else getattr(now, name)
        if value is None:
            continue
        text = fmt.percent if name != "divergence" else fmt.value
        over = name == kind and not board.now.bound.is_kept(value)
        shown = f":red[{text(value)}]" if over else text(value)
        change = _change(value, None if before is None else getattr(before, name), text)
        found.append(_Figure(names[name], shown, change))
    return found


def _change(now: float, before: float | None, text: Callable[[float], str]) -> str:
    """Return a change against the value before, with its sign; empty for none."""
    if before is None or text(now) == text(before) or math.isclose(now, before, rel_tol=1e-3):
        return ""
    return f"{'+' if now > before else '−'}{text(abs(now - before))}"


def _mark(board: Board, now: Figures) -> None:
    """Say whether the figures were measured, and whether they break the bound."""
    if now.basis == MEASURED:
        st.badge("measured", icon=":material/check:", color="green")
    else:
        st.badge("estimated", icon=":material/calculate:", color="gray")
    if not board.now.bound.is_kept(board.now.bound.of(now)):
        st.badge("beyond the bound", icon=":material/warning:", color="red")


def _buttons(board: Board) -> None:
    """Offer the way back, and to let the bound decide each step again."""
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
