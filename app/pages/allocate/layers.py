"""What an allocation comes to, and the table of layers: bits by hand, a lock, and what each costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.pages.allocate import allocating
from inshrink_app.pages.allocate.allocating import Board
from inshrink_app.services import Edit
from inshrink_app.widgets import fmt, listing, modules, quality
from inshrink_app.widgets.layout import Fact, facts
from inshrink_app.widgets.modules import Node

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates


_PICK, _PATTERN = "allocate.picked", "allocate.pattern"
_TABLE, _HANDLE = "allocate.layers", "allocate.handle"
_STEP = 2.0
"""A click halves or doubles a spacing, which is worth about a bit a weight."""

_MOST_LINKED = 100


class _Layers(NamedTuple):
    """What every button of the table needs: the run, what is edited, and what its layers cost."""

    shown: Subject
    edit: Edit
    rates: Rates
    values: Sequence[float]
    predicted: Predicted

    def scaled(self, members: Sequence[int], factor: float) -> None:
        """Make tensors coarser or finer, but for those that are locked, within what the codec allows."""
        number = allocating.number_of(str(self.edit.config["codec"]))
        low, high = (0.0, math.inf) if number is None or number.within is None else number.within
        changed = list(self.values)
        for place in members:
            if self.rates.keys[place] not in self.edit.locked:
                changed[place] = min(max(changed[place] * factor, low), high)
        self.take(changed)

    def take(self, values: Sequence[float]) -> None:
        """Take in other numbers."""
        state.clicked()
        self.edit.change(allocating.with_allocation(self.shown, self.edit.config, self.rates.keys, values))

    def toggle(self, members: Sequence[int]) -> None:
        """Lock tensors, or unlock them where all are locked."""
        state.clicked()
        keys = {self.rates.keys[place] for place in members}
        self.edit.locked = self.edit.locked - keys if keys <= self.edit.locked else self.edit.locked | keys


def _layers(board: Board) -> _Layers | None:
    """Return them; None where the codec has no single number, or nothing is estimated yet."""
    rates, numbers = board.rates, board.numbers
    if rates is None or numbers is None or numbers.values is None or numbers.predicted is None:
        return None
    return _Layers(board.shown, board.edit, rates, numbers.values, numbers.predicted)


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


def show_numbers(board: Board) -> None:
    """Draw what the allocation comes to; what breaks a bound says so."""
    numbers = board.numbers
    if numbers is None:
        st.caption("Estimated once the layers are, or once settings were changed below.")
        return
    raw = allocating.weight_bytes(board.shown) * len(board.steps)
    everything = sum(row.nbytes for row in board.shown.tensors) * len(board.steps)
    ratio, total = numbers.ratio_weights, numbers.ratio_total
    n_weights = sum(row.numel for row in board.shown.model_tensors) * len(board.steps)
    seen = numbers.basis == "measured"
    proxy = "worst step" if seen else "worst step, proxy"
    nats = "–" if numbers.divergence is None else f"{fmt.value(numbers.divergence)} nats"
    drawn: list[Fact] = [
        (
            "Size of the weights",
            fmt.size(raw / ratio) if ratio else "–",
            f"{fmt.ratio(ratio)}, {numbers.basis}",
            f"{quality.RATIO} Estimated: {fmt.size(everything / total)}." if total else None,
        ),
        ("Bits per weight", fmt.value(8 * raw / ratio / n_weights) if ratio else "–", numbers.basis),
        (
            "Divergence",
            nats,
            proxy,
            quality.NATS if proxy == "worst step" else f"{quality.NATS} {quality.PROXY}",
        ),
        (
            "Drop",
            fmt.percent(numbers.drop),
            proxy,
            "Of the metric, relative; for the worse is positive."
            + ("" if proxy == "worst step" else f" {quality.PROXY}"),
        ),
    ]
    if numbers.restore_cost is not None:
        drawn.append(("Restore cost", fmt.percent(numbers.restore_cost), "measured", quality.TIP))
    facts(drawn)
    if board.beyond:
        st.warning(f"Beyond the bound on the {board.beyond}, {numbers.basis}.", icon=":material/warning:")


def show_handles(board: Board) -> None:
    """Draw what moves all layers: the number along the curve, and the best bits for this size."""
    found, number = _layers(board), allocating.number_of(str(board.edit.config["codec"]))
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
        is_locked = [key in found.edit.locked for key in found.rates.keys]
        found.take(found.rates.distribute(found.predicted.nbytes, found.values, is_locked))

    st.select_slider(
        f"{number.label or number.settings[0]} of all layers that are not locked",
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


def show_table(board: Board) -> None:
    """Draw the layers, with buttons in each line and for those that are picked."""
    found = _layers(board)
    if found is None:
        is_single = allocating.number_of(str(board.edit.config["codec"])) is not None
        st.caption(
            "How many bits each layer takes, and what one more or fewer costs, is estimated from a sample of "
            "the weights. No evaluator is asked."
            if is_single
            else "This codec has no single number that trades size for fidelity; its settings are the other "
            "view of this table."
        )
        return
    rates = found.rates
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        level = modules.level_slider("allocate", rates.keys)
        pattern = st.text_input(
            "Only names like", placeholder="*.attn.*", key=_PATTERN, width=200, help=modules.PATTERN_HELP
        )
        linked = _linked(rates, level)
        if linked is not None:
            st.session_state[_PICK] = linked
        picked = st.session_state.get(_PICK, [])
        rows = rows_of(rates, level, picked, pattern)
        _change_picked(found, [row for row in rows if row.name in picked])
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
        picked,
        lambda names: st.session_state.update({_PICK: names}),
        several=True,
        alt=f"Layers with {weight.lower()}, bits per weight, share of the bytes, and buttons to change them",
        columns={
            weight: listing.share_column(f"Share of the total: ½ Σ h over all weights; h is {told}"),
            "Bits per weight": st.column_config.NumberColumn(format="%.2f"),
            "Share of bytes": listing.share_column("Of all layers, as estimated"),
            "Share of damage": listing.share_column(quality.DAMAGE),
            "−": button(
                "−",
                "allocate.fewer",
                48,
                "Fewer bits: twice the spacing",
                lambda row: found.scaled(row.members, _STEP),
            ),
            "+": button(
                "+",
                "allocate.more",
                48,
                "More bits: half the spacing",
                lambda row: found.scaled(row.members, 1 / _STEP),
            ),
            "Lock": button("Lock", "allocate.lock", 90, None, lambda row: found.toggle(row.members)),
        },
    )
    said = "Buttons in a line react to the mouse only; those above the table do the same by the keyboard."
    n_alike = int((~rates.is_sampled).sum())
    if n_alike:
        said += (
            f" {fmt.counted(n_alike, 'tensor')} outside the sample: taken as the mean of their layer type."
        )
    st.caption(said)


def _weight(shown: Subject) -> tuple[str, str]:
    """Return what the proxy weights errors with: in a word, and in full."""
    if services.told_metrics(shown)[0] == "fisher":
        return "Sensitivity", "Fisher (Adam's second moment)"
    return "Movement", "squared movement, as the checkpoints hold no second moments of Adam's"


def _frame(found: _Layers, rows: Sequence[Node]) -> pd.DataFrame:
    """Return the table: shares are of all layers, whichever are shown."""
    rates, values, locked = found.rates, found.values, found.edit.locked
    stored = found.predicted.bits * rates.sizes
    carried = np.nan_to_num(rates.sensitivities * rates.sizes, nan=0.0)
    damage = np.nan_to_num(found.predicted.damage, nan=0.0)
    lines = []
    for label, row in zip(modules.labels(rows), rows, strict=True):
        members = list(row.members)
        sizes = float(rates.sizes[members].sum())
        spacings = {values[place] for place in members}
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
                f"{spacings.pop():g}" if len(spacings) == 1 else "mixed",
            )
        )
    shares = ["Sensitivity", "Share of bytes", "Share of damage"]
    return pd.DataFrame(lines, columns=["Layer", "Bits per weight", "−", "+", "Lock", *shares, "Coarseness"])


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


def _linked(rates: Rates, level: str) -> list[str] | None:
    """Return the rows that a link or the page before names, once; None where it names none."""
    said = state.choice_text(state.LAYERS)
    if not said:
        return None
    state.retract(state.LAYERS)
    try:
        names = json.loads(said)
    except (ValueError, RecursionError):
        return None
    if not isinstance(names, list):
        return None
    found: dict[str, int] = {}
    for name in names[:_MOST_LINKED]:
        if not isinstance(name, str) or not name:
            continue
        places = modules.members_of(rates.keys, name)
        alike = [place for place, layer in enumerate(rates.layer_types) if layer == name]
        if len(places) > 1 or (alike and level == modules.LAYER_TYPE):
            found[name] = len(places) or len(alike)
        else:
            found |= {rates.keys[place]: 1 for place in places or alike}
    st.caption(fmt.markdown(f"{fmt.counted(sum(found.values()), 'tensor')} chosen on the page Sensitivity."))
    return list(found)
