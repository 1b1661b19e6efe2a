"""The card that writes an archive: its estimated size, its contents, progress and result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Requests, Work
from inshrink_app.model import Problem
from inshrink_app.pages.run.board import MEASURED, Board, Figures, edit_bits, undo_bits
from inshrink_app.pages.run.shrinking import KEEPS, Written
from inshrink_app.widgets import fmt, job_card, problem
from inshrink_app.widgets.quality import COSTS, HELPS, bound_text

_MAX_PROBLEMS = 5


def show(board: Board) -> Requests:
    """Draw the card; return the requests of its button."""
    suggestion = services.suggested_name(board.shown, board.archive)
    target = str(st.session_state.get(f"shrink.target.{suggestion}") or suggestion)
    job = board.writing

    def work() -> Work:
        return board.work(str(services.export_target(target, board.archive)))

    with st.container(border=True, gap="small", key="shrink"):
        _size(board)
        _keep(board)
        with st.container(horizontal=True, vertical_alignment="center"):
            look: dict[str, Any] = {"type": "primary", "help": _help(board), "key": "shrink.write"}
            job_card.start_button("Write archive", work, "compress", job=job, **look)
            with st.popover("More", icon=":material/more_horiz:"):
                _more(board, suggestion)
        if job_card.settled(job, ""):
            if board.written is not None:
                _result(board, board.written)
            else:
                _basis(board)
    return board.requests(target)


def _size(board: Board) -> None:
    before, now = fmt.size(board.shown.raw_nbytes), board.figures
    if now is None or now.nbytes is None:
        st.markdown(f"#### {before}")
        return
    st.markdown(f"#### {before} → {_about(board)}{fmt.size(now.nbytes)} · {fmt.ratio(now.ratio)}")


def _about(board: Board) -> str:
    """Return ``about`` for a size, unless it is that of the written archive."""
    return "" if board.written is not None and board.written.is_of(board) else "about "


def _keep(board: Board) -> None:
    """Draw the choice of contents."""
    names, now = list(KEEPS), board.now
    keep = st.radio(
        "Keep",
        names,
        names.index(now.keep) if now.keep in names else 1,
        format_func=lambda name: KEEPS[name].label,
        horizontal=True,
        label_visibility="collapsed",
        key=f"shrink.keep.{now.keep}",
    )
    if keep != now.keep:
        state.clicked()
        services.choose(board.shown, keep=keep)
        st.rerun()
    bits = ""
    if board.is_by_hand:
        bits = f"Bits: {fmt.markdown(now.origin or 'by hand')}."
    elif board.is_bounded:
        bits = f"Each step: {bound_text(now.bound)}."
    elif now.keep != "exact":
        bits = "Default settings."
        if now.bound.kind != "none":
            bits = "Default settings: a bound needs an evaluator that you trust."
    st.caption(f"{KEEPS[now.keep].price} {bits}")


def _help(board: Board) -> str:
    steps = fmt.all_steps(len(board.shown.steps))
    compares = board.evaluator is None or board.now.keep == "exact"
    against = "every tensor with the run" if compares else "the evaluator's metric with the run's"
    return f"Writes {steps}, decodes every tensor, and compares {against}."


def _more(board: Board, suggestion: str) -> None:
    """Draw the target, and the way to other exports."""
    st.text_input("Write to", suggestion, key=f"shrink.target.{suggestion}")
    if st.button("A range, one step, or a pack", icon=":material/tune:", key="shrink.export"):
        state.go_to("archives", panel="write")


def _basis(board: Board) -> None:
    """Draw the basis of the size, or the progress of the trial."""
    trial, result = board.trial, board.tried
    if trial is not None and not job_card.settled(trial, ""):
        if trial.is_running:
            st.caption("Two steps are compressed in memory to estimate the size.")
    elif result is not None:
        steps = " and ".join(fmt.count(int(step)) for step in result["tried"])
        text = f"Estimated from {'steps' if len(result['tried']) > 1 else 'step'} {steps}."
        if why := result.get("not_evaluated"):
            verb = "fails" if result.get("evaluator_failed") else "gives no restore cost"
            text += f" The evaluator {verb}: {why}."
        st.caption(fmt.markdown(text))
    elif not state.was_asked_for():
        st.caption("A link alone starts nothing.")
        if st.button("Estimate the size", icon=":material/science:", key="shrink.try"):
            state.clicked()
            st.rerun()


def _result(board: Board, made: Written) -> None:
    """Draw the latest archive: whether it is intact, and its cost."""
    known = {path for path, _ in board.shown.unreadable}  # The top of the page lists them.
    place = services.place_of(board.shown.path)
    lost = {services.path_inside(place, path): why for path, why in made.unreadable.items()}
    new = [row for row in lost.items() if row[0] not in known]
    problem.show_unreadable(new, "The archive does not hold them: keep their files.")
    bound, chain = board.now.bound, made.chain
    cost = made.cost(bound.kind)
    name = fmt.markdown(fmt.clipped(chain.path.name, 40))
    size = f"{fmt.size(chain.nbytes)}, {fmt.ratio(chain.ratio_total)}"
    if made.problems:
        n_problems = fmt.counted(len(made.problems), "problem")
        st.error(f"{name} is damaged: {n_problems}.", icon=":material/error:")
        for finding in made.problems[:_MAX_PROBLEMS]:
            problem.show(Problem(finding["what"], finding["where"], finding["remedy"]))
    elif not bound.is_kept(cost):
        broken = COSTS[bound.kind]
        exceeds = f"its {broken.word} of {broken.text(cost or 0.0)} exceeds the bound"
        warning = f"{name} is intact ({size}), but {exceeds}."
        st.warning(warning, icon=":material/warning:")
    else:
        old = "" if made.is_new else " It held every step already, so nothing was written anew."
        st.success(f"{name}: {size}. Decoded and compared.{old}", icon=":material/check_circle:")
    with st.container(horizontal=True):
        if st.button("Open in Archives", icon=":material/inventory_2:", key="shrink.open"):
            state.go_to("archives", archive=str(chain.path), panel="frames")
        compare: dict[str, Any] = {"icon": ":material/compare_arrows:", "type": "tertiary"}
        if made.comparison is not None and st.button("Compare", key="shrink.compare", **compare):
            state.go_to("archives", archive=str(chain.path), panel="compare")


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "nbytes": ("Archive", fmt.size),
    "ratio": ("Ratio", fmt.ratio),
    "bits": ("Bits", fmt.value),
    **{kind: (cost.label, cost.text) for kind, cost in COSTS.items()},
}


def show_figures(board: Board) -> None:
    """Draw the figures of the choice, *Undo*, and *Automatic*, which returns the choice to the bound."""
    now, before = board.figures, None
    if now is None and not board.now.before:
        return
    if board.now.before and board.is_by_hand:
        before = board.figures_of(board.now.before[-1][0])
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
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
        value, old = getattr(now, name), getattr(before, name, None)
        if value is None or (name == "divergence" != bound.kind):
            continue
        change = ""
        if old is not None and text(value) != text(old) and not math.isclose(value, old, rel_tol=1e-3):
            change = f" :small[({'+' if value > old else '−'}{text(abs(value - old))})]"
        about = _about(board) if name == "nbytes" else ""
        shown = f"{about}{text(value)}" if is_kept or name != bound.kind else f":red[{text(value)}]"
        st.markdown(f":small[{label}] **{shown}**{change}", width="content", help=HELPS.get(name))
    is_measured = now.basis == MEASURED
    icon = ":material/check:" if is_measured else ":material/calculate:"
    st.badge(now.basis, icon=icon, color="green" if is_measured else "gray")
    if not is_kept:
        st.badge("beyond the bound", icon=":material/warning:", color="red")
