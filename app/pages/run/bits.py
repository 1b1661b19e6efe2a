"""The drawer Bits: bits of every layer, by hand or by a search, and their cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import METRICS, Subject, config_text
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board
from inshrink_app.pages.run.curve import allocation_figure, clicked_point
from inshrink_app.pages.run.rows import View
from inshrink_app.services import Chosen, EvaluatorCode, SearchPoint
from inshrink_app.widgets import fmt, job_card, listing, modules, quality
from inshrink_app.widgets.choices import codec_labels, ends_of_range, one_of_many
from inshrink_app.widgets.layout import answer, chart, folded
from inshrink_app.widgets.modules import Node

from inshrink_core.request import listed
from inshrink_core.verbs.search import Search

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates

_TABLE, _HANDLE, _CHART, _POINTS = "bits.layers", "bits.handle", "bits.curve", "bits.points"
_STEP = 2.0
"""A click halves or doubles a step size, which changes about one bit per weight."""

_PICK = "Pick rows with the boxes of the map or the table."
_TABLE_HEIGHT, _NAME_WIDTH, _SHARE_WIDTH, _LABEL_WIDTH = 282, 160, 105, 60
_COLUMNS = {"configuration": "label", "figures": "basis", "ratio": "ratio", "drop": "drop"}
_COLUMNS |= {"divergence": "divergence", "restore cost": "restore_cost", "steps": "n_steps"}
"""Columns of the table of points: heading, and field of a `SearchPoint`."""


def actions(board: Board, view: View) -> None:
    """Draw the buttons of the search and of the ticked rows, into a line of the strip."""
    _show_search(board)
    if board.rates is not None and board.predicted is not None:
        _edit_ticked(board, board.rates, view)


def show(board: Board, view: View) -> None:
    """Draw the drawer, with the rows of the map."""
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _progress(board)
        if board.rates is not None and board.predicted is not None:
            _show_table(board, board.rates, board.predicted, view)
        elif board.rates is not None or boards.number_of(str(board.config["codec"])) is None:
            st.caption("These settings are not one number per layer. Edit them as text, below.")
        if board.evaluator is not None:
            _baselines(board, board.evaluator)
    with right:
        _draw_curve(board)
        if board.rates is not None and board.predicted is not None:
            _show_handles(board, board.rates, board.predicted)
    left, right = st.columns(2)
    with left:
        folded("All configurations", None, "bits.all", functools.partial(_show_points, board))
    with right:
        folded("Settings as text", None, "bits.settings", functools.partial(_settings, board))


def _progress(board: Board) -> None:
    """Draw the progress of the estimates of layers, which appear level by level, or offer to start them."""
    is_settled = job_card.settled(board.estimating, parts=job_card.n_rows)
    if is_settled and board.rates is None and boards.number_of(board.codec) is not None:
        work = services.estimating_work(board.shown, board.steps, board.codec)
        tip = "Encodes a sample of the weights from fine to coarse. It executes no code of the run."
        job_card.start_button("Estimate layers", work, "calculate", help=tip)


def _rows_of(rates: Rates, view: View) -> tuple[list[Node], list[float]]:
    """Return the rows of the map with the positions of their tensors among the estimated ones, and shares."""
    keys = {row.name: row.key for row in view.shown.model_tensors}
    known = {key: place for place, key in enumerate(rates.keys)}
    places = [known.get(keys.get(row.name, "")) for row in view.tensors.rows]
    rows, shares = [], []
    for node, share in zip(view.nodes, view.shares, strict=True):
        if members := tuple(place for m in node.members if (place := places[m]) is not None):
            rows.append(node._replace(members=members))
            shares.append(100 * float(share))
    return rows, shares


def _values(board: Board, rates: Rates) -> list[float]:
    """Return the edited parameter of each estimated tensor."""
    numbers = boards.numbers_of(board.shown, board.config)
    return [numbers[key] for key in rates.keys]


def _take(board: Board, rates: Rates, values: Sequence[float]) -> None:
    """Set the parameters of all estimated tensors."""
    config = boards.with_allocation(board.shown, board.config, rates.keys, values)
    boards.edit_bits(board.shown, config, "by hand")


def _scale(board: Board, rates: Rates, members: Collection[int], factor: float) -> None:
    """Scale the parameter of unlocked tensors, within the limits of the codec."""
    number = boards.number_of(rates.codec)
    low, high = (0.0, math.inf) if number is None or number.within is None else number.within
    changed = _values(board, rates)
    for place in members:
        if rates.keys[place] not in board.now.locked:
            changed[place] = min(max(changed[place] * factor, low), high)
    _take(board, rates, changed)


def _toggle(board: Board, rates: Rates, members: Collection[int]) -> None:
    """Lock tensors, or unlock them if all are locked."""
    state.clicked()
    keys, locked = {rates.keys[place] for place in members}, board.now.locked
    services.choose(board.shown, locked=frozenset(locked - keys if keys <= locked else locked | keys))


def _show_handles(board: Board, rates: Rates, predicted: Predicted) -> None:
    """Draw the controls of all layers: the position on the curve, and the best bits for this size."""
    number = boards.number_of(rates.codec)
    if number is None or number.within is None:
        return
    low, high = (round(2 * math.log2(end)) for end in number.within)
    options = [float(f"{2.0 ** (half / 2):.3g}") for half in range(low, high + 1)]
    values = _values(board, rates)
    # The geometric mean of the parameters, weighted by the sizes of the tensors.
    middle = math.exp(float(np.log(np.asarray(values)) @ rates.sizes) / rates.sizes.sum())
    nearest = min(range(len(options)), key=lambda place: abs(math.log(options[place] / middle)))
    now = options[nearest] = float(f"{middle:.3g}")
    # Any other change of the bits makes a new slider, lest the browser send the value of the old one.
    n, before = st.session_state.get(_HANDLE, (0, now))
    if now not in (before, st.session_state.get(f"{_HANDLE}.{n}")):
        n += 1
    st.session_state[_HANDLE] = n, now
    key = f"{_HANDLE}.{n}"

    def moved() -> None:
        if (value := st.session_state[key]) != now:  # The browser may repeat what was drawn.
            _scale(board, rates, range(len(values)), value / middle)

    row = st.container(horizontal=True, vertical_alignment="bottom", gap="medium")
    row.select_slider(
        f"{number.label or number.settings[0]} of all unlocked layers",
        options,
        now,
        key=key,
        format_func=lambda value: f"{value:g}",
        on_change=moved,
        help=f"In units of {number.unit}. Finer to the left, smaller to the right.",
    )

    def distribute() -> None:
        is_locked = [key in board.now.locked for key in rates.keys]
        _take(board, rates, rates.distribute(predicted.nbytes, values, is_locked))

    tip = "Moves bytes between the unlocked layers until no move lowers the expected damage at this size."
    row.button("Best bits for this size", icon=":material/balance:", on_click=distribute, help=tip)


_EDITS: Mapping[str, tuple[str, str, str, Callable[..., None]]] = {
    "−": ("Fewer bits", "remove", "Fewer bits: twice the step size", functools.partial(_scale, factor=_STEP)),
    "+": ("More bits", "add", "More bits: half the step size", functools.partial(_scale, factor=1 / _STEP)),
    "Lock": ("Lock or unlock", "lock", "Locked layers keep their bits.", _toggle),
}
"""Changes of rows: heading of the column, label, icon, help, and function of the positions of tensors."""


def _edit_ticked(board: Board, rates: Rates, view: View) -> None:
    """Draw the buttons that change the bits of the ticked rows."""
    ticked = chosen.ticked(str(view.shown.path))
    picked = {place for row in _rows_of(rates, view)[0] if row.name in ticked for place in row.members}
    for label, icon, tip, act in _EDITS.values():
        look: dict[str, Any] = {"icon": f":material/{icon}:", "help": tip if picked else _PICK}
        st.button(label, on_click=act, args=(board, rates, picked), disabled=not picked, **look)
    if picked:
        st.caption(f"{fmt.counted(len(picked), 'tensor')} picked.", width="content")


def _show_table(board: Board, rates: Rates, predicted: Predicted, view: View) -> None:
    """Draw the layers, with buttons in each row."""
    ticked = chosen.ticked(str(view.shown.path))
    rows, shares = _rows_of(rates, view)
    if not rows:
        st.caption("No row matches. Clear the filter to see all of them.")
        return

    def click(heading: str) -> None:
        place = (st.session_state.get(f"bits.row.{heading}") or {}).get("row")
        if isinstance(place, int) and 0 <= place < len(rows):  # The browser is not trusted.
            _EDITS[heading][3](board, rates, rows[place].members)

    def button(heading: str) -> object:
        look: dict[str, Any] = {"width": 90 if heading == "Lock" else 48, "help": _EDITS[heading][2]}
        callback = functools.partial(click, heading)
        return st.column_config.ButtonColumn(heading, key=f"bits.row.{heading}", on_click=callback, **look)

    weight = METRICS[view.table.metric].quantity
    n_alike = int((~rates.is_sampled).sum())
    alike = f"Estimated; of {fmt.counted(n_alike, 'tensor')} not sampled, the mean of the layer type."
    tips = {
        weight: "Share of the total at the last step, as in the map.",
        "Share of bytes": "Share of the estimated bytes of all layers.",
        "Share of damage": quality.DAMAGE,
    }
    names = [row.name for row in rows]
    listing.pickable(
        _frame(rates, predicted, board.now.locked, rows).assign(**{weight: shares}),
        {
            "Layer": st.column_config.Column(width=_NAME_WIDTH),
            "Bits per weight": st.column_config.NumberColumn("Bits", format="%.2f", width=60, help=alike),
            **{name: listing.share_column(tip, width=_SHARE_WIDTH) for name, tip in tips.items()},
            **{heading: button(heading) for heading in _EDITS},
        },
        f"Layers with {weight.lower()}, bits per weight, share of the bytes, and buttons to change them",
        _TABLE,
        [place for place, name in enumerate(names) if name in ticked],
        functools.partial(chosen.tick, str(board.shown.path), names),
        height=_TABLE_HEIGHT,
    )


def _frame(rates: Rates, predicted: Predicted, locked: Collection[str], rows: Sequence[Node]) -> pd.DataFrame:
    """Return the table. Shares are of all layers, including hidden ones."""
    bits = predicted.bits * rates.sizes
    damage = np.nan_to_num(predicted.damage, nan=0.0)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.array([values[list(row.members)].sum() for row in rows], np.float64)

    def shares(values: np.ndarray) -> np.ndarray:  # in percent
        total = float(values.sum())
        return 100 * sums(values) / (total if 0 < total < math.inf else math.nan)

    is_locked = [all(rates.keys[place] in locked for place in row.members) for row in rows]
    return pd.DataFrame(
        {
            "Layer": modules.labels(rows),
            "Bits per weight": sums(bits) / sums(rates.sizes),
            "−": "−",
            "+": "+",
            "Lock": ["Locked" if locks else "Lock" for locks in is_locked],
            "Share of bytes": shares(bits),
            "Share of damage": shares(damage),
        }
    )


def _draw_curve(board: Board) -> None:
    figure, points, now = board.figure, board.points, board.figures
    if not any(point.figure(figure) is not None for point in points):
        st.caption("The curve of size against error appears with the first estimate or trial.")
        return
    drawn = allocation_figure(
        points,
        figure,
        boards.weight_bytes(board.shown) * max(1, len(board.steps)),
        here=(getattr(now, "ratio_weights", None), getattr(now, figure, None)),
        basis=boards.ESTIMATED if now is None else now.basis,
        limit=board.limit,
        colours=board.colours,
    )
    chart(
        drawn,
        _CHART,
        f"Size of the weights against {quality.COSTS[figure].word}: equal, edited and measured settings",
        on_select=functools.partial(_clicked, board),
        selection_mode=("points",),
    )
    st.caption(" ".join(_notes(board)), help=quality.HELPS.get(figure))


def _notes(board: Board) -> list[str]:
    """Return notes on how to read the curve."""
    notes = ["Click a point to edit its bits."]
    if board.is_bounded:
        notes.append("Each step has bits of its own; an edit starts at this size, all layers alike.")
    job, best = board.search, board.found.best
    if job is not None and job.is_running:
        found = "Nothing keeps the bound yet" if best is None else f"Best so far {fmt.ratio(best.ratio)}"
        left = fmt.counted(max(0, job.total - job.done), "evaluation")
        notes.append(f"{found}, at most {left} left.")
    rates, bound = board.rates, board.now.bound
    if rates is not None and (rates.n_measured or rates.is_calibrated):
        n = rates.n_measured
        source = fmt.counted(n, "measurement") if n else "trials of this run"
        notes.append(f"The dotted curve is an estimate, calibrated by {source}.")
    elif rates is not None:
        notes.append("The dotted curve is a rule of thumb; a measurement calibrates it.")
    n_left = sum(point.kind == "trial" and not point.is_complete for point in board.points)
    if n_left:
        notes.append(f"{fmt.counted(n_left, 'trial')} ended early and appear only in the table.")
    if bound.kind not in (board.figure, "none"):
        notes.append(f"The {bound.kind.replace('_', ' ')} is drawn after the first trial.")
    return notes


def _clicked(board: Board) -> None:
    place = clicked_point(st.session_state[_CHART]["selection"]["points"], len(board.points))
    if place is not None:
        load(board, board.points[place])


def load(board: Board, point: SearchPoint) -> None:
    """Load the configuration of a point for editing."""
    if point.config:
        name = fmt.clipped(point.name or point.label, _LABEL_WIDTH)
        boards.edit_bits(board.shown, point.config, name)
        st.toast(f"Loaded: {fmt.markdown(name)}. Undo goes back.", icon=":material/upload:")
    else:
        state.clicked()
        st.toast("The settings of this archive differ by step, so there is no configuration to load.")


def _show_points(board: Board) -> None:
    """List every configuration; a row loads it, like a click on its point."""
    points = board.points
    if not points:
        st.caption("Nothing is measured or estimated yet.")
        return
    table = pd.DataFrame({head: [getattr(row, name) for row in points] for head, name in _COLUMNS.items()})
    table["configuration"] = [point.name or point.label for point in points]
    table.insert(2, "check", [_check(point) for point in points])

    def chose() -> None:
        for row in st.session_state[_POINTS]["selection"]["rows"]:
            if 0 <= row < len(points):  # The browser is not trusted.
                load(board, points[row])

    listing.show(
        table,
        "search",
        alt="Configurations with ratio, largest drop, largest divergence and restore cost",
        key=_POINTS,
        on_select=chose,
        selection_mode="single-row",
    )


def _check(point: SearchPoint) -> str:
    """Return the state of a configuration in a few words."""
    if point.kind != "trial":
        return {"estimate": "not measured", "codec": "published codec"}.get(point.kind, point.kind)
    if point.is_best:
        return "best"
    if not point.is_complete:
        return "given up" if not point.keeps else "not finished"
    return "keeps the bounds" if point.keeps else "breaks a bound"


def _settings(board: Board) -> None:
    """Draw the configuration as a file to edit, paste or copy."""
    shown, now = board.shown, config_text(board.config)
    text = st.text_area("Configuration, as JSON or TOML", now, height=220, key=f"bits.text.{hash(now)}")
    with st.container(horizontal=True):
        pressed = st.button("Use these settings", icon=":material/check:", disabled=text == now)
        listing.buttons(("JSON", "config.json", now.encode()))
    config = answer(lambda: services.loaded_config(shown, text)) if pressed else None
    if config is not None:
        boards.edit_bits(shown, config, "text")
        st.rerun()


def _show_search(board: Board) -> None:
    """Draw the search button and its options."""
    shown, evaluator, job = board.shown, board.evaluator, board.search
    place = st.container(width="content")
    with st.popover("Search options", icon=":material/tune:"):
        asked = _options(shown, board.now, board.steps)
    request = dataclasses.replace(asked, **services.evaluator_fields(evaluator))
    can_search = evaluator is not None and bool(request.bounds.limits)
    n_steps = len(listed(request.steps) or shown.steps)
    tip = f"Writes and evaluates {fmt.counted(n_steps, 'step')} for each trial, in memory."
    if evaluator is None:
        tip = "A search needs an evaluator that you trust; choose it in the header."
    elif not can_search:
        tip = "A search needs a bound, in the header."

    def work() -> Work:
        trusted = services.consent_to(evaluator)
        return Work.asking([request], shown.path, "run", "search", trusted=trusted)

    with place:
        label = "Search again" if job is not None else "Search for the best bits"
        look: dict[str, Any] = {"disabled": not can_search, "help": tip, "key": "search.start"}
        job_card.start_button(label, work, "search", job=job, **look)


def show_result(board: Board) -> None:
    """Draw the progress of the search, or its result."""
    job = board.search
    job_card.settled(job, parts=job_card.n_rows)
    if job is not None and not job.is_running:
        _found(board, job)


def _options(shown: Subject, now: Chosen, before: tuple[int, ...]) -> Search:
    """Draw the options; the bound is the header's."""
    fields: dict[str, Any] = dict(now.bound.fields)
    names = codec_labels(searched=True)
    fields["codec"] = one_of_many("search", "Codec", "codec", names, next(iter(names)))
    if len(shown.steps) > 1:  # They are consecutive, since deltas between neighbours are small.
        first, last = ends_of_range("search", shown.steps, before)
        steps = tuple(step for step in shown.steps if first <= step <= last)
        fields["steps"] = None if steps == shown.steps else steps
    fields["budget"] = st.number_input(
        "Most configurations to try", 1, 10_000, None, key="search.budget", placeholder="No limit"
    )
    return Search(str(shown.path), **fields)


def _baselines(board: Board, evaluator: EvaluatorCode) -> None:
    """Draw the button that measures the published codecs."""
    work = services.baselines_work(board.shown, board.steps, evaluator)
    job = services.job_of(work)
    if job is None and len(board.steps) > 1:
        look: dict[str, Any] = {"type": "tertiary", "again": False}
        tip = "Lossless, uniform 8 and 4 bit, and the published codecs, on the same steps."
        job_card.start_button("Measure published codecs", work, "straighten", help=tip, **look)
    job_card.settled(job, "Measuring published codecs")


def plain(board: Board) -> Search:
    """Return the search of all steps within the bound, with default options."""
    fields: dict[str, Any] = {**board.now.bound.fields, **services.evaluator_fields(board.evaluator)}
    return Search(str(board.shown.path), codec=board.codec, **fields)


def _found(board: Board, job: Job) -> None:
    """Draw the result and offer its best configuration; taking it is one edit, which *Undo* reverts."""
    found = board.found
    best = found.best
    if not (found.points and found.report):  # It may have been cancelled.
        return
    if best is None:
        st.warning(
            "No configuration keeps the bound at every step. Loosen the bound, choose another codec or try"
            " more configurations.",
            icon=":material/warning:",
        )
        return
    report = found.report
    took = f"{fmt.counted(report['evaluations'], 'evaluation')} in {fmt.duration(report['seconds'])}"
    figures = [f"{fmt.ratio(best.ratio)} of the weights", f"drop {fmt.percent(best.drop)}"]
    if best.restore_cost is not None:
        figures.append(f"restore cost {fmt.percent(best.restore_cost)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        text = f"Search result: {best.label} · {', '.join(figures)} · {took}."
        notes = fmt.markdown(" ".join(map(fmt.sentence, _findings(report))))
        st.caption(fmt.markdown(text), width="content", help=notes or None)
        if board.now.config != best.config:
            take = functools.partial(boards.edit_bits, board.shown, dict(best.config), "the search")
            st.button("Take it", icon=":material/star:", key="search.take", on_click=take)


def _findings(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on a finished search: the default's size, and the engine's notes."""
    if default := report.get("default"):
        check = "keeps the bounds" if default["keeps"] else "breaks them"
        yield f"the default stores {fmt.ratio(default['ratio_weights'])} of the weights, and {check}"
    yield from map(str, report.get("notes", ()))
    if not_discriminative := report.get("not_discriminative"):
        few, total = fmt.counted(len(not_discriminative), "step"), fmt.count(len(report["steps"]))
        yield f"at {few} of {total} the weights hardly moved: the previous checkpoint keeps the bound, too"
