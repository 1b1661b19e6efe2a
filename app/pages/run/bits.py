"""The drawer Bits: bits of every layer, by hand or by a search, and their cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Problem, ServiceError, Subject, loaded, toml_text
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import search
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board, Layers
from inshrink_app.pages.run.curve import AXES, Here, Marks, allocation_figure, clicked_point
from inshrink_app.services import Searched, SearchPoint
from inshrink_app.widgets import fmt, job_card, listing, modules, problem, quality
from inshrink_app.widgets.layout import chart, folded
from inshrink_app.widgets.modules import Node

_TABLE, _HANDLE, _CHART, _POINTS = "bits.layers", "bits.handle", "bits.curve", "bits.points"
_STEP = 2.0
"""A click halves or doubles a step size, which changes about one bit per weight."""

_TABLE_HEIGHT, _SHARE_WIDTH = 340, 105
_LABEL_WIDTH = 60
_MAX_NAMED = 5
_COLUMNS = {
    "configuration": "label",
    "figures": "basis",
    "ratio": "ratio",
    "drop": "drop",
    "divergence": "divergence",
    "restore cost": "restore_cost",
    "steps": "n_steps",
}
"""Columns of the table of points: heading, and field of a `SearchPoint`."""


def show(board: Board, nodes: Sequence[Node], tensors: Sequence[str], ticked: Sequence[str]) -> None:
    """Draw the drawer.

    Parameters
    ----------
    board
        The state of the place.
    nodes, tensors, ticked
        The rows of the map, the names of their tensors, and the ticked rows.
    """
    search.show(board)
    _estimates(board)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        if board.layers is not None:
            _show_table(board.layers, rows_of(board.layers, nodes, tensors), ticked)
        elif board.rates is not None or boards.number_of(str(board.config["codec"])) is None:
            st.caption("These settings are no single number for each layer; edit them as text, below.")
    with right:
        _show_curve(board)
        if board.layers is not None:
            _show_handles(board.layers)
    left, right = st.columns(2)
    with left:
        folded("All configurations", None, "bits.all", functools.partial(_show_points, board))
    with right:
        folded("Settings as text", None, "bits.settings", functools.partial(_settings, board))


def _estimates(board: Board) -> None:
    """Draw the progress of the estimates of layers, or offer to start them."""
    job = board.estimating
    if job_card.settled(job, "") and board.rates is None and boards.number_of(board.codec) is not None:
        is_calibrated = any(not point.is_estimated for point in board.points)
        work = services.estimating_work(board.shown, board.steps, board.codec, is_calibrated=is_calibrated)
        tip = "Encodes a sample of the weights from fine to coarse. No code of the run is executed."
        job_card.start_button("Estimate what layers take", work, "calculate", help=tip)


def rows_of(layers: Layers, nodes: Sequence[Node], tensors: Sequence[str]) -> tuple[Node, ...]:
    """Return the rows of the map with the positions of their tensors among the estimated ones.

    Parameters
    ----------
    layers
        The estimated layers.
    nodes, tensors
        The rows of the map, and the names of their tensors.
    """
    keys = {row.name: row.key for row in layers.shown.model_tensors}
    known = {key: place for place, key in enumerate(layers.rates.keys)}
    places = [known.get(keys.get(name, "")) for name in tensors]
    rows = (
        node._replace(members=tuple(p for m in node.members if (p := places[m]) is not None))
        for node in nodes
    )
    return tuple(row for row in rows if row.members)


def _show_handles(layers: Layers) -> None:
    """Draw the controls of all layers: the position on the curve, and the best bits for this size."""
    number = boards.number_of(layers.rates.codec)
    if number is None or number.within is None:
        return
    low, high = (round(2 * math.log2(end)) for end in number.within)
    options = [float(f"{2.0 ** (half / 2):.3g}") for half in range(low, high + 1)]
    # The geometric mean of the parameters, weighted by the sizes of the tensors.
    sizes = layers.rates.sizes / layers.rates.sizes.sum()
    middle = math.exp(float(np.log(np.asarray(layers.values)) @ sizes))
    nearest = min(range(len(options)), key=lambda place: abs(math.log(options[place] / middle)))
    st.session_state[_HANDLE] = options[nearest] = float(f"{middle:.3g}")
    st.select_slider(
        f"{number.label or number.settings[0]} of all unlocked layers",
        options,
        key=_HANDLE,
        format_func=lambda value: f"{value:g}",
        on_change=lambda: layers.scale(range(len(layers.values)), st.session_state[_HANDLE] / middle),
        help=f"In units of {number.unit}. Finer to the left, smaller to the right.",
    )
    st.button(
        "Best bits for this size",
        icon=":material/balance:",
        on_click=layers.distribute,
        help="Gives every layer that is not locked the same exchange rate of bytes for damage (the proxy "
        "judges), at the present size.",
    )


def _show_table(layers: Layers, rows: Sequence[Node], ticked: Sequence[str]) -> None:
    """Draw the layers, with buttons in each row and for the picked rows."""
    rates = layers.rates
    picked = {place for row in rows if row.name in ticked for place in row.members}
    actions: dict[str, tuple[str, str, int, str | None, Callable[[Collection[int]], None]]] = {
        "−": (
            "Fewer bits",
            "remove",
            48,
            "Fewer bits: twice the step size",
            lambda m: layers.scale(m, _STEP),
        ),
        "+": ("More bits", "add", 48, "More bits: half the step size", lambda m: layers.scale(m, 1 / _STEP)),
        "Lock": ("Lock or unlock", "lock", 90, None, layers.toggle),
    }
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        for label, icon, _, _, act in actions.values():
            st.button(label, icon=f":material/{icon}:", on_click=act, args=(picked,), disabled=not picked)
        modules.say_picked(len(picked), "tensor")
    if not rows:
        st.caption("No row matches. Clear the filter to see all of them.")
        return

    def click(key: str, act: Callable[[Collection[int]], None]) -> None:
        place = (st.session_state.get(key) or {}).get("row")
        if isinstance(place, int) and 0 <= place < len(rows):  # The browser is not trusted.
            act(rows[place].members)

    def button(heading: str, width: int, tip: str | None, act: Callable[[Collection[int]], None]) -> object:
        key = f"bits.row.{heading}"
        callback = functools.partial(click, key, act)
        return st.column_config.ButtonColumn(heading, width=width, key=key, on_click=callback, help=tip)

    weight, source = _weight(layers.shown)
    tips = {
        weight: f"Share of the total: ½ Σ h over all weights; h is {source}",
        "Share of bytes": "Of all layers, as estimated",
        "Share of damage": quality.DAMAGE,
    }
    modules.table(
        _frame(layers, rows, weight),
        [row.name for row in rows],
        _TABLE,
        ticked,
        lambda names: chosen.set_ticked(str(layers.shown.path), names),
        several=True,
        height=_TABLE_HEIGHT,
        alt=f"Layers with {weight.lower()}, bits per weight, share of the bytes, and buttons to change them",
        columns={
            "Bits per weight": st.column_config.NumberColumn("Bits", format="%.2f", width=60),
            **{name: listing.share_column(tip, width=_SHARE_WIDTH) for name, tip in tips.items()},
            **{name: button(name, width, tip, act) for name, (_, _, width, tip, act) in actions.items()},
        },
    )
    n_alike = int((~rates.is_sampled).sum())
    if n_alike:
        st.caption(f"{fmt.counted(n_alike, 'tensor')} not sampled: the mean of the layer type is shown.")


def _weight(shown: Subject) -> tuple[str, str]:
    """Return the weight that the proxy gives errors: as one word, and in full."""
    if services.told_metrics(shown)[0] == "fisher":
        return "Sensitivity", "Fisher (Adam's second moment)"
    return "Movement", "squared movement, as the checkpoints hold no second moments of Adam's"


def _frame(layers: Layers, rows: Sequence[Node], weight: str) -> pd.DataFrame:
    """Return the table. Shares are of all layers, including hidden ones."""
    rates, locked = layers.rates, layers.now.locked
    bits = layers.predicted.bits * rates.sizes
    carried = np.nan_to_num(rates.sensitivities * rates.sizes, nan=0.0)
    damage = np.nan_to_num(layers.predicted.damage, nan=0.0)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.array([values[list(row.members)].sum() for row in rows], np.float64)

    def shares(values: np.ndarray) -> np.ndarray:
        total = float(values.sum())
        return sums(values) / (total if 0 < total < math.inf else math.nan)

    is_locked = [{rates.keys[place] for place in row.members} <= locked for row in rows]
    return pd.DataFrame(
        {
            "Layer": modules.labels(rows),
            "Bits per weight": sums(bits) / sums(rates.sizes),
            "−": "−",
            "+": "+",
            "Lock": ["Locked" if locks else "Lock" for locks in is_locked],
            weight: shares(carried),
            "Share of bytes": shares(bits),
            "Share of damage": shares(damage),
        }
    )


def _show_curve(board: Board) -> None:
    """Draw size against error; during a search, its trials as they arrive."""
    job = board.search
    if job is not None and job.is_running:
        st.fragment(_live, run_every=2 * job_card.POLL_SECONDS)(board, job.job_id)
    else:
        _draw_curve(board)


def _live(board: Board, job_id: str) -> None:
    job = services.find_job(job_id)
    if job is None or not job.is_running:
        return
    found = services.searched(job, services.steps_of(job, board.shown))
    others = tuple(point for point in board.points if point.name or point.is_estimated)
    _draw_curve(dataclasses.replace(board, points=(*found.points, *others)))
    best = (
        "Nothing keeps the bound yet" if found.best is None else f"Best so far {fmt.ratio(found.best.ratio)}"
    )
    st.caption(f"{best} · about {fmt.counted(max(0, job.total - job.done), 'evaluation')} left")


def _draw_curve(board: Board) -> None:
    figure, points, now = board.figure, board.points, board.figures
    if not any(point.figure(figure) is not None for point in points):
        st.caption("The curve of size against error appears with the first estimate or trial.")
        return
    here = Here(None, None)
    if now is not None and now.ratio is not None:
        ratio = None if board.layers is None else board.layers.predicted.ratio_weights
        here = Here(ratio, getattr(now, figure), now.basis == boards.MEASURED)
    found, bound = board.found, board.now.bound
    marks = Marks(board.limit, f"Bound {bound.text}", found.default_ratio, found.target_ratio)
    raw = boards.weight_bytes(board.shown) * max(1, len(board.steps))
    drawn = allocation_figure(points, board.rates, here, figure, marks, raw, board.course(figure))
    chart(
        drawn,
        _CHART,
        f"Size of the weights against {AXES[figure].lower()}: equal settings, edited bits and "
        "measured points",
        on_select=functools.partial(_clicked, board),
        selection_mode=("points",),
    )
    st.caption(" ".join(_notes(board)), help=quality.HELPS.get(figure))


def _notes(board: Board) -> list[str]:
    """Return notes on how to read the curve."""
    notes = ["Click a point to edit its bits."]
    rates, bound = board.rates, board.now.bound
    if rates is not None and (rates.n_measured or rates.is_calibrated):
        n = rates.n_measured
        source = fmt.counted(n, "measurement") if n else "trials of this run"
        notes.append(f"The dotted curve is estimated, calibrated by {source}.")
    elif rates is not None:
        notes.append("The dotted curve is a rule of thumb until something is measured.")
    n_left = sum(not (point.is_complete or point.is_estimated or point.archive) for point in board.points)
    if n_left:
        notes.append(f"{fmt.counted(n_left, 'trial')} ended early and are in the table alone.")
    if bound.kind not in (board.figure, "none"):
        notes.append(f"A trial is needed to draw the {bound.kind.replace('_', ' ')}.")
    return notes


def _clicked(board: Board) -> None:
    points: Any = st.session_state[_CHART]["selection"]["points"]
    place = clicked_point(points, len(board.points))
    if place is not None:
        load(board, place)


def load(board: Board, place: int) -> None:
    """Load the configuration of a point for editing."""
    state.clicked()
    point = board.points[place] if 0 <= place < len(board.points) else None
    if point is not None and point.config:
        name = fmt.elided(point.name or point.label, _LABEL_WIDTH)
        services.change_bits(board.shown, point.config, name)
        st.toast(f"Loaded: {fmt.markdown(name)}. Undo goes back.", icon=":material/upload:")
    elif point is not None:
        st.toast("This archive has other settings at each step: there is no one configuration to load.")


def _show_points(board: Board) -> None:
    """List every configuration; a row loads it, like a click on its point."""
    points = board.points
    if not points:
        st.caption("Nothing was measured or estimated yet.")
        return
    table = pd.DataFrame({head: [getattr(row, name) for row in points] for head, name in _COLUMNS.items()})
    table["configuration"] = [point.name or point.label for point in points]
    table.insert(2, "verdict", [_verdict(board.found, point) for point in points])

    def chose() -> None:
        rows = st.session_state[_POINTS]["selection"]["rows"]
        if rows:
            load(board, int(rows[0]))

    listing.show(
        table,
        "search",
        alt="Configurations with ratio, worst drop, largest divergence and restore cost",
        key=_POINTS,
        on_select=chose,
        selection_mode="single-row",
    )


def _verdict(found: Searched, point: SearchPoint) -> str:
    """Return the state of a configuration in a few words."""
    if point.is_estimated:
        return "not measured"
    if point.name:
        return "published codec" if point.baseline else "archive"
    if point.is_best:
        return "best"
    if not point.is_complete:
        return "given up" if not point.keeps else "not finished"
    return found.verdict(point)


def _settings(board: Board) -> None:
    """Draw the configuration as a file to edit, paste or copy."""
    shown, now = board.shown, toml_text(board.config)
    text = st.text_area(
        "Configuration, as inshrink.toml has it", now, height=220, key=f"bits.text.{hash(now)}"
    )
    with st.container(horizontal=True):
        pressed = st.button("Use these settings", icon=":material/check:", disabled=text == now)
        listing.buttons(("TOML", "inshrink.toml", now.encode()))
    if not pressed:
        return
    try:
        config = loaded(text)
        services.check_config(config)
    except ValueError as error:
        problem.show(Problem(str(error), remedy="the button TOML shows how it is written"))
        return
    except ServiceError as error:
        problem.show(error.problem)
        return
    if unmatched := services.unmatched_overrides(shown, config):
        names = ", ".join(fmt.elided(name, 40) for name in unmatched[:_MAX_NAMED])
        problem.show(
            Problem(f"no tensor of this run matches {names}", remedy="change or delete these overrides")
        )
        return
    state.clicked()
    services.change_bits(shown, config, "text")
    st.rerun()
