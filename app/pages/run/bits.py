"""The drawer Bits: bits for every layer, by hand or by a search, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Problem, ServiceError, Subject, loaded, toml_text
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import search
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board, Figures
from inshrink_app.pages.run.curve import AXES, Here, Marks, allocation_figure, clicked_point
from inshrink_app.services import Chosen, Searched, SearchPoint
from inshrink_app.widgets import fmt, job_card, listing, modules, problem, quality
from inshrink_app.widgets.layout import chart, folded
from inshrink_app.widgets.modules import Node

from inshrink_core.verbs.search import Search

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates

_PATTERN, _TABLE, _HANDLE = "bits.pattern", "bits.layers", "bits.handle"
_CHART, _POINTS = "bits.curve", "bits.points"
_STEP = 2.0
"""A click halves or doubles a spacing, which is worth about a bit a weight."""

_TABLE_HEIGHT, _SHARE_WIDTH = 420, 105
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
"""What stands in the table of a `SearchPoint`, by heading."""


def show(board: Board, now: Figures | None, ticked: Sequence[str]) -> Search:
    """Draw the drawer; return what a search would ask for.

    Parameters
    ----------
    board
        What is known.
    now
        What the bits that are edited come to.
    ticked
        Rows of the map, which are picked here too.
    """
    request = search.show(board)
    search.result(board)
    _estimates(board)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _show_table(board, ticked)
    with right:
        _show_curve(board, now)
        _show_handles(board)
    left, right = st.columns(2)
    with left:
        folded("All configurations", None, "bits.all", lambda: _show_points(board))
    with right:
        folded("Settings as text", None, "bits.settings", lambda: _settings(board))
    return request


def _estimates(board: Board) -> None:
    """Draw how far the estimates of the layers are, or offer them."""
    job = board.estimating
    if job is not None and job.is_running:
        job_card.running(job)
    elif job is not None and job.state != "finished":
        job_card.stopped(job, primary=False)
    elif board.rates is None and boards.number_of(board.codec) is not None:
        is_calibrated = any(not one.is_estimated for one in board.points)
        steps = board.found.steps or board.shown.steps
        work = services.estimating_work(board.shown, steps, board.codec, is_calibrated=is_calibrated)
        tip = "Encodes a sample of the weights from fine to coarse. No code of the run is executed."
        job_card.start_button("Estimate what layers take", work, "calculate", help=tip)


class _Layers(NamedTuple):
    """What every button of the table needs: the run, what is edited, and what its layers cost."""

    shown: Subject
    now: Chosen
    config: Mapping[str, Any]
    rates: Rates
    values: Sequence[float]
    predicted: Predicted

    def scaled(self, members: Sequence[int], factor: float) -> None:
        """Make tensors coarser or finer, but for those that are locked, within what the codec allows."""
        number = boards.number_of(str(self.config["codec"]))
        low, high = (0.0, math.inf) if number is None or number.within is None else number.within
        changed = list(self.values)
        for place in members:
            if self.rates.keys[place] not in self.now.locked:
                changed[place] = min(max(changed[place] * factor, low), high)
        self.take(changed)

    def take(self, values: Sequence[float]) -> None:
        """Take in other numbers."""
        state.clicked()
        config = boards.with_allocation(self.shown, self.config, self.rates.keys, values)
        services.change_bits(self.shown, config, "by hand")

    def toggle(self, members: Sequence[int]) -> None:
        """Lock tensors, or unlock them where all are locked."""
        state.clicked()
        keys = {self.rates.keys[place] for place in members}
        locked = self.now.locked - keys if keys <= self.now.locked else self.now.locked | keys
        services.choose(self.shown, locked=frozenset(locked))


def _layers(board: Board) -> _Layers | None:
    """Return them; None where the codec has no single number, or nothing is estimated yet."""
    rates, config = board.rates, board.config
    told = boards.predicted(board.shown, rates, config)
    if rates is None or told is None:
        return None
    values = boards.allocation_of(board.shown, config, rates.keys)
    return _Layers(board.shown, board.now, config, rates, values, told)


def rows_of(rates: Rates, level: str, picked: Collection[str] = (), pattern: str = "") -> tuple[Node, ...]:
    """Return the lines of the table: the tree of modules, layer types, or those whose names match.

    Parameters
    ----------
    rates
        Whose tensors they are.
    level
        One of `modules.levels`.
    picked
        Modules that are opened whatever the level.
    pattern
        Lines that match it stand side by side.
    """
    if level == modules.LAYER_TYPE:
        lines = modules.rows_at(rates.keys, rates.layer_types, level)
    else:
        lines = modules.outline(rates.keys, level, opened=picked)
    if not pattern:
        return lines
    found = modules.matching([line.name for line in lines], pattern)
    return tuple(line._replace(depth=0) for line in lines if line.name in found)


def _show_handles(board: Board) -> None:
    """Draw what moves all layers: the number along the curve, and the best bits for this size."""
    found, number = _layers(board), boards.number_of(str(board.config["codec"]))
    if found is None or number is None or number.within is None:
        return
    low, high = (round(2 * math.log2(end)) for end in number.within)
    options = [float(f"{2.0 ** (half / 2):.3g}") for half in range(low, high + 1)]
    # The geometric mean of the numbers, by the size of the tensors.
    sizes = found.rates.sizes / found.rates.sizes.sum()
    middle = math.exp(float(np.log(np.asarray(found.values)) @ sizes))
    nearest = min(options, key=lambda one: abs(math.log(one / middle)))
    st.session_state[_HANDLE] = options[options.index(nearest)] = float(f"{middle:.3g}")

    def moved() -> None:
        found.scaled(range(len(found.values)), st.session_state[_HANDLE] / middle)

    def best() -> None:
        is_locked = [key in found.now.locked for key in found.rates.keys]
        found.take(found.rates.distribute(found.predicted.nbytes, found.values, is_locked))

    st.select_slider(
        f"{number.label or number.settings[0]} of all unlocked layers",
        options,
        key=_HANDLE,
        format_func=lambda one: f"{one:g}",
        on_change=moved,
        help=f"In units of {number.unit}. Finer to the left, smaller to the right.",
    )
    st.button(
        "Best bits for this size",
        icon=":material/balance:",
        on_click=best,
        help="Gives every layer that is not locked the same exchange rate of bytes for damage (the proxy "
        "judges), at the size that stands here.",
    )


def _show_table(board: Board, ticked: Sequence[str]) -> None:
    """Draw the layers, with buttons in each line and for those that are picked."""
    found = _layers(board)
    if found is None:
        if board.rates is not None or boards.number_of(str(board.config["codec"])) is None:
            st.caption("These settings are no single number for each layer; edit them as text, below.")
        return
    rates = found.rates
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        level = modules.level_slider("bits", rates.keys)
        pattern = st.text_input(
            "Only names like", placeholder="*.attn.*", key=_PATTERN, width=200, help=modules.PATTERN_HELP
        )
        rows = rows_of(rates, level, ticked, pattern)
        _change_picked(found, [row for row in rows if row.name in ticked])
    if not rows:
        st.caption("No row matches. Clear the pattern to see all of them.")
        return

    def button(label: str, key: str, width: int, tip: str | None, act: Callable[[Node], None]) -> object:
        def clicked() -> None:
            click = st.session_state.get(key)
            place = None if click is None else click["row"]
            if isinstance(place, int) and 0 <= place < len(rows):  # The browser's word is checked.
                act(rows[place])

        return st.column_config.ButtonColumn(label, width=width, key=key, on_click=clicked, help=tip)

    weight, told = _weight(found.shown)
    modules.table(
        _frame(found, rows).rename(columns={"Sensitivity": weight}),
        [row.name for row in rows],
        _TABLE,
        ticked,
        lambda names: chosen.set_ticked(str(board.shown.path), names),
        several=True,
        height=_TABLE_HEIGHT,
        alt=f"Layers with {weight.lower()}, bits per weight, share of the bytes, and buttons to change them",
        columns={
            weight: listing.share_column(
                f"Share of the total: ½ Σ h over all weights; h is {told}", width=_SHARE_WIDTH
            ),
            "Bits per weight": st.column_config.NumberColumn("Bits", format="%.2f", width=60),
            "Share of bytes": listing.share_column("Of all layers, as estimated", width=_SHARE_WIDTH),
            "Share of damage": listing.share_column(quality.DAMAGE, width=_SHARE_WIDTH),
            "−": button(
                "−",
                "bits.fewer",
                48,
                "Fewer bits: twice the spacing",
                lambda row: found.scaled(row.members, _STEP),
            ),
            "+": button(
                "+",
                "bits.more",
                48,
                "More bits: half the spacing",
                lambda row: found.scaled(row.members, 1 / _STEP),
            ),
            "Lock": button("Lock", "bits.lock", 90, None, lambda row: found.toggle(row.members)),
        },
    )
    n_alike = int((~rates.is_sampled).sum())
    if n_alike:
        st.caption(f"{fmt.counted(n_alike, 'tensor')} of no sample take the mean of their layer type.")


def _weight(shown: Subject) -> tuple[str, str]:
    """Return what the proxy weights errors with: in a word, and in full."""
    if services.told_metrics(shown)[0] == "fisher":
        return "Sensitivity", "Fisher (Adam's second moment)"
    return "Movement", "squared movement, as the checkpoints hold no second moments of Adam's"


def _frame(found: _Layers, rows: Sequence[Node]) -> pd.DataFrame:
    """Return the table: shares are of all layers, whichever are shown."""
    rates, locked = found.rates, found.now.locked
    stored = found.predicted.bits * rates.sizes
    carried = np.nan_to_num(rates.sensitivities * rates.sizes, nan=0.0)
    damage = np.nan_to_num(found.predicted.damage, nan=0.0)
    lines = []
    for label, row in zip(modules.labels(rows), rows, strict=True):
        members = list(row.members)
        sizes = float(rates.sizes[members].sum())
        lines.append(
            (
                label,
                float(stored[members].sum()) / sizes if sizes else math.nan,
                "−",
                "+",
                "Locked" if {rates.keys[place] for place in members} <= locked else "Lock",
                _share(carried, members),
                _share(stored, members),
                _share(damage, members),
            )
        )
    shares = ["Sensitivity", "Share of bytes", "Share of damage"]
    return pd.DataFrame(lines, columns=["Layer", "Bits per weight", "−", "+", "Lock", *shares])


def _share(parts: np.ndarray, members: Sequence[int]) -> float:
    total = float(parts.sum())
    return float(parts[members].sum()) / total if 0 < total < math.inf else math.nan


def _change_picked(found: _Layers, picked: Sequence[Node]) -> None:
    """Change the picked layers together: what the buttons of a line do, which no key reaches."""
    members = sorted({place for row in picked for place in row.members})
    act = {
        "Fewer bits": (":material/remove:", lambda: found.scaled(members, _STEP)),
        "More bits": (":material/add:", lambda: found.scaled(members, 1 / _STEP)),
        "Lock or unlock": (":material/lock:", lambda: found.toggle(members)),
    }
    for label, (icon, do) in act.items():
        st.button(label, icon=icon, on_click=do, disabled=not members)
    modules.say_picked(len(members), "tensor")


def _show_curve(board: Board, now: Figures | None) -> None:
    """Draw size against error; while a search runs, its trials as they arrive."""
    job = board.search
    if job is not None and job.is_running:
        st.fragment(_live, run_every=2 * job_card.POLL_SECONDS)(board, now, job.job_id)
    else:
        _draw_curve(board, now)


def _live(board: Board, now: Figures | None, job_id: str) -> None:
    job = services.find_job(job_id)
    if job is None or not job.is_running:
        return
    found = services.searched(job, services.steps_of(job, board.shown))
    others = tuple(one for one in board.points if one.name or one.is_estimated)
    _draw_curve(board._replace(points=(*found.points, *others)), now)
    best = (
        "Nothing keeps the bound yet" if found.best is None else f"Best so far {fmt.ratio(found.best.ratio)}"
    )
    st.caption(f"{best} · about {fmt.counted(max(0, job.total - job.done), 'evaluation')} left")


def _draw_curve(board: Board, now: Figures | None) -> None:
    figure, points = board.figure, board.points
    if not any(one.figure(figure) is not None for one in points):
        st.caption("The curve of size against error appears with the first estimate or trial.")
        return
    here = Here(None, None)
    if now is not None and now.ratio is not None:
        told = boards.predicted(board.shown, board.rates, board.config)
        value = getattr(now, figure)
        here = Here(None if told is None else told.ratio_weights, value, now.basis == boards.MEASURED)
    limit = board.limit
    raw = boards.weight_bytes(board.shown) * max(1, len(board.found.steps or board.shown.steps))
    marks = Marks(limit, f"Bound {board.now.bound.text}", board.found.default_ratio, board.found.target_ratio)
    drawn = allocation_figure(points, board.rates, here, figure, marks, raw, boards.course(board, figure))
    st.session_state["bits.n_points"] = len(points)
    chart(
        drawn,
        _CHART,
        f"Size of the weights against {AXES[figure].lower()}: equal settings, edited bits and "
        "measured points",
        on_select=lambda: _clicked(board),
        selection_mode=("points",),
    )
    st.caption(" ".join(_read(board, figure)), help=quality.HELPS.get(figure))


def _read(board: Board, figure: str) -> list[str]:
    """Say how the curve is to be read."""
    said = ["Click a point to edit its bits."]
    rates = board.rates
    if rates is not None:
        n, is_sure = rates.n_measured, rates.n_measured or rates.is_calibrated
        source = f"{fmt.counted(n, 'measurement')}" if n else "trials of this run"
        said.append(
            f"The dotted curve is estimated, calibrated by {source}."
            if is_sure
            else "The dotted curve is a rule of thumb until something is measured."
        )
    left = [one for one in board.points if not one.whole and not one.is_estimated and not one.archive]
    if left:
        said.append(f"{fmt.counted(len(left), 'trial')} ended early and are in the table alone.")
    if figure != board.now.bound.kind and board.now.bound.kind != "none":
        said.append(f"A trial is needed to draw the {board.now.bound.kind.replace('_', ' ')}.")
    return said


def _clicked(board: Board) -> None:
    """Take in a click on the curve."""
    points: Any = st.session_state[_CHART]["selection"]["points"]
    place = clicked_point(points, st.session_state["bits.n_points"])
    if place is not None:
        load(board, place)


def load(board: Board, place: int) -> None:
    """Edit the configuration of a point from now on."""
    state.clicked()
    point = board.points[place] if 0 <= place < len(board.points) else None
    if point is not None and point.config:
        name = fmt.elided(point.name or point.label, _LABEL_WIDTH)
        services.change_bits(board.shown, point.config, name)
        st.toast(f"Loaded: {fmt.markdown(name)}. Undo goes back.", icon=":material/upload:")
    elif point is not None:
        st.toast("This archive has other settings at each step: there is no one configuration to load.")


def _show_points(board: Board) -> None:
    """List every configuration; a row loads it, as a click on its point does."""
    points = board.points
    if not points:
        st.caption("Nothing was measured or estimated yet.")
        return
    listed = pd.DataFrame({head: [getattr(one, name) for one in points] for head, name in _COLUMNS.items()})
    listed["configuration"] = [one.name or one.label for one in points]
    listed.insert(2, "verdict", [_word(board.found, one) for one in points])

    def chose() -> None:
        rows = st.session_state[_POINTS]["selection"]["rows"]
        if rows:
            load(board, int(rows[0]))

    listing.show(
        listed,
        "search",
        alt="Configurations with ratio, worst drop, largest divergence and restore cost",
        key=_POINTS,
        on_select=chose,
        selection_mode="single-row",
    )


def _word(found: Searched, point: SearchPoint) -> str:
    """Say in a few words what a configuration is."""
    if point.is_estimated:
        return "not measured"
    if point.name:
        return "published codec" if point.baseline else "archive"
    if point.is_best:
        return "best"
    if not point.whole:
        return "given up" if not point.keeps else "not finished"
    return found.verdict(point)


def _settings(board: Board) -> None:
    """Draw the configuration as a file: to be edited, pasted or taken away."""
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
        listed = ", ".join(fmt.elided(one, 40) for one in unmatched[:_MAX_NAMED])
        problem.show(
            Problem(f"no tensor of this run matches {listed}", remedy="change or delete these overrides")
        )
        return
    state.clicked()
    services.change_bits(shown, config, "text")
    st.rerun()
