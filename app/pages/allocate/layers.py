"""The table of layers: bits per weight by hand, a lock, and what it costs; estimated at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.subject import Subject
from inshrink_app.pages.allocate import allocating, curve
from inshrink_app.services import Edit, SearchPoint
from inshrink_app.widgets import fmt, modules
from inshrink_app.widgets.layout import answer, chart, facts, section
from inshrink_app.widgets.modules import Node

if TYPE_CHECKING:
    from inshrink_core.search.rates import Predicted, Rates


_PICK, _PATTERN = "allocate.picked", "allocate.pattern"
_TABLE, _HANDLE = "allocate.table", "allocate.handle"
_STEP = 2.0
"""A click halves or doubles a spacing, which is worth about a bit a weight."""

_MOST_LINKED = 100


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
        With * and ?; lines that match it stand side by side.
    """
    if level == modules.LAYER_TYPE:
        lines = modules.rows_at(rates.keys, rates.layer_types, level)
    else:
        lines = modules.outline(rates.keys, level, opened=picked)
    if not pattern:
        return lines
    return tuple(line._replace(depth=0) for line in lines if fnmatchcase(line.name, pattern))


def show(
    shown: Subject,
    edit: Edit,
    points: Sequence[SearchPoint],
    rates: Rates | None,
    limits: Mapping[str, float],
) -> None:
    """Draw the curve and the table.

    Parameters
    ----------
    shown, edit
        The run, and the configuration that is edited.
    points
        What was measured, and estimates.
    rates
        What each tensor costs; None while that is not known.
    limits
        Bounds on the ``drop`` and the ``divergence``, as far as there are.
    """
    with section("Bits for every layer"):
        _way_back(edit, next((one for one in points if one.is_best), None))
        if allocating.number_of(str(edit.config["codec"])) is None:
            st.write(
                "This codec has no single number that trades size for fidelity; edit its settings below."
            )
            return
        if rates is None or rates.codec != edit.config["codec"]:
            st.write(
                "How many bits each layer takes, and what one more or fewer costs, is estimated from a "
                "sample of the weights. No evaluator is asked. Press *Estimate without measuring*."
            )
            return
        values = answer(lambda: allocating.allocation_of(shown, edit.config, rates.keys))
        if values is None:
            return
        predicted = rates.predict(values)
        st.caption(
            f"Estimated by a proxy: the rounding error of each layer, weighted with {_weight(shown)[1]}; "
            f"{basis(rates)}. Sizes are sums of what each layer took."
        )
        picture, said = st.columns([3, 2], gap="medium")
        with picture:
            _curve(shown, rates, predicted, points, limits)
        with said:
            _figures(shown, rates, predicted, limits)
            _handle(shown, edit, rates, values)
            _whole(shown, edit, rates, values, predicted)
        _table(shown, edit, rates, values, predicted)


def basis(rates: Rates) -> str:
    """Say what calibrates the quality that rates tell."""
    if rates.n_measured:
        return f"calibrated by {fmt.counted(rates.n_measured, 'measurement')} of this run"
    if rates.is_calibrated:
        return "calibrated by trials of this run"
    return "not calibrated: nothing was measured of this run, so right to an order of magnitude at best"


def _weight(shown: Subject) -> tuple[str, str]:
    """Return what the proxy weights errors with: in a word, and in full."""
    if services.told_metrics(shown)[0] == "fisher":
        return "Sensitivity", "Fisher (Adam's second moment)"
    return "Movement", "squared movement, as the checkpoints hold no second moments of Adam's"


def _curve(
    shown: Subject,
    rates: Rates,
    predicted: Predicted,
    points: Sequence[SearchPoint],
    limits: Mapping[str, float],
) -> None:
    figure = "divergence" if np.isfinite(rates.divergences).any() else "drop"
    n_steps = len(shown.steps)
    drawn = curve.curve_figure(rates, predicted, points, figure, limits.get(figure), _stored(shown), n_steps)
    chart(drawn, "allocate.curve", f"Size of the archive against {figure}, estimated, with what was measured")
    said = []
    if any(one.whole and not one.is_estimated and one.n_steps < n_steps for one in points):
        said.append("Hollow: measured on some of the steps; the size assumes that the others are like them.")
    left_out = curve.given_up(points)
    if left_out:
        said.append(
            f"Not drawn: {fmt.counted(len(left_out), 'trial')} that ended after "
            f"{curve.steps_text(left_out)}; they tell neither the size nor the worst of all."
        )
    if said:
        st.caption(" ".join(said))


def _stored(shown: Subject) -> float:
    """Return the raw bytes of the whole run."""
    return float(allocating.raw_bytes(shown) * len(shown.steps))


def _figures(shown: Subject, rates: Rates, predicted: Predicted, limits: Mapping[str, float]) -> None:
    """Draw what the allocation comes to; what breaks a bound says so."""
    total = predicted.ratio_total
    size = "–" if not total else fmt.size(_stored(shown) / total)
    weights = float(rates.sizes.sum())
    bits = 8 * predicted.nbytes / weights if weights else math.nan
    facts(
        [
            ("Size, all steps", size, f"{fmt.ratio(total)} of everything, estimated"),
            ("Bits per weight", f"{bits:.2f}", f"{fmt.ratio(predicted.ratio_weights)} of the weights"),
            ("Divergence", _nats(predicted.divergence), "nats, worst step, proxy"),
            ("Drop", fmt.percent(predicted.drop), "relative, worst step, proxy"),
        ]
    )
    pairs = (("divergence", predicted.divergence), ("drop", predicted.drop))
    broken = [name for name, value in pairs if value is not None and value > limits.get(name, math.inf)]
    if broken:
        st.warning(
            f"Beyond the bound on the {' and '.join(broken)}, as estimated.", icon=":material/warning:"
        )


def _nats(value: float | None) -> str:
    return "–" if value is None else fmt.value(value)


def _take(shown: Subject, edit: Edit, rates: Rates, values: Sequence[float]) -> None:
    """Take in other numbers."""
    state.clicked()
    edit.change(allocating.with_allocation(shown, edit.config, rates.keys, values))


def _scaled(
    shown: Subject, edit: Edit, rates: Rates, values: Sequence[float], members: Sequence[int], factor: float
) -> None:
    """Make some tensors coarser or finer, but for those that are locked, within what the codec allows."""
    number = allocating.number_of(str(edit.config["codec"]))
    low, high = (0.0, math.inf) if number is None or number.within is None else number.within
    changed = list(values)
    for place in members:
        if rates.keys[place] not in edit.locked:
            changed[place] = min(max(changed[place] * factor, low), high)
    _take(shown, edit, rates, changed)


def _handle(shown: Subject, edit: Edit, rates: Rates, values: Sequence[float]) -> None:
    """Move all layers along the curve at once, with the mouse or the arrow keys."""
    number = allocating.number_of(str(edit.config["codec"]))
    if number is None or number.within is None:
        return
    low, high = (round(2 * math.log2(end)) for end in number.within)
    options = [float(f"{2.0 ** (half / 2):.3g}") for half in range(low, high + 1)]
    middle = _middle(values, rates)
    now = min(options, key=lambda one: abs(math.log(one / middle)))
    st.session_state[_HANDLE] = now

    def moved() -> None:
        _scaled(shown, edit, rates, values, range(len(values)), st.session_state[_HANDLE] / now)

    st.select_slider(
        f"{number.label or number.settings[0]} of all layers that are not locked",
        options,
        key=_HANDLE,
        format_func=lambda one: f"{one:g}",
        on_change=moved,
        help=f"In units of {number.unit}. Finer to the left, smaller to the right.",
    )


def _middle(values: Sequence[float], rates: Rates) -> float:
    """Return the geometric mean of the numbers, by the size of the tensors."""
    sizes = rates.sizes / rates.sizes.sum()
    return math.exp(float(np.log(np.asarray(values)) @ sizes))


def _whole(shown: Subject, edit: Edit, rates: Rates, values: Sequence[float], predicted: Predicted) -> None:
    """Offer the best bits of all layers for this size."""

    def best() -> None:
        is_locked = [key in edit.locked for key in rates.keys]
        _take(shown, edit, rates, rates.distribute(predicted.nbytes, values, is_locked))

    st.button(
        "Best bits for this size",
        icon=":material/balance:",
        on_click=best,
        help="Gives every layer that is not locked the same exchange rate of bytes for damage (the proxy "
        "judges), at the size that stands here.",
    )


def _way_back(edit: Edit, best: SearchPoint | None) -> None:
    """Offer to go back by one change, of layers or of settings, or to what was loaded; or on to the best."""
    with st.container(horizontal=True):
        st.button(
            "Undo",
            icon=":material/undo:",
            on_click=edit.undo,
            disabled=not edit.before,
            key="allocate.undo",
        )
        st.button(
            "Reset",
            icon=":material/restart_alt:",
            on_click=edit.reset,
            disabled=not edit.is_changed,
            help="Back to what was loaded.",
        )
        if best is not None and edit.config != best.config:
            st.button(
                "Load the best of the search",
                icon=":material/star:",
                on_click=edit.load,
                args=(best,),
                key="allocate.best",
                help=f"{fmt.ratio(best.ratio)} of the weights. Undo goes back to what stands here.",
            )


def _table(shown: Subject, edit: Edit, rates: Rates, values: Sequence[float], predicted: Predicted) -> None:
    """Draw the layers, with buttons in each line and for those that are picked."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        level = modules.level_slider("allocate", rates.keys)
        pattern = st.text_input(
            "Only names like", placeholder="*.attn.*", key=_PATTERN, width=200, help="A pattern with * and ?"
        )
    linked = _linked(rates, level)
    if linked is not None:
        st.session_state[_PICK] = linked
    picked = st.session_state.get(_PICK, [])
    rows = rows_of(rates, level, picked, pattern)
    if not rows:
        st.caption("No row matches. Clear the pattern to see all of them.")
        return
    _change_picked(shown, edit, rates, values, [row for row in rows if row.name in picked])

    def clicked(key: str, act: Callable[[Node], None]) -> Callable[[], None]:
        return lambda: _on_row(key, rows, act)

    button = st.column_config.ButtonColumn
    weight, told = _weight(shown)
    modules.table(
        _frame(rates, values, predicted, rows, edit.locked).rename(columns={"Sensitivity": weight}),
        [row.name for row in rows],
        _TABLE,
        picked,
        lambda names: st.session_state.update({_PICK: names}),
        several=True,
        alt=f"Layers with {weight.lower()}, bits per weight, share of the bytes, and buttons to change them",
        columns={
            weight: modules.share_column(f"Share of ½ Σ h over all weights; h is {told}"),
            "Bits per weight": st.column_config.NumberColumn(format="%.2f"),
            "Share of bytes": modules.share_column("Of all layers, as estimated"),
            "Share of damage": modules.share_column("Of all layers, as the proxy judges"),
            "−": button(
                "−",
                width=48,
                key="allocate.fewer",
                on_click=clicked(
                    "allocate.fewer", lambda row: _scaled(shown, edit, rates, values, row.members, _STEP)
                ),
                help="Fewer bits: twice the spacing",
            ),
            "+": button(
                "+",
                width=48,
                key="allocate.more",
                on_click=clicked(
                    "allocate.more", lambda row: _scaled(shown, edit, rates, values, row.members, 1 / _STEP)
                ),
                help="More bits: half the spacing",
            ),
            "Lock": button(
                "Lock",
                width=90,
                key="allocate.lock",
                on_click=clicked("allocate.lock", lambda row: _toggle(edit, rates, row.members)),
            ),
        },
    )
    n_alike = int((~rates.is_sampled).sum())
    if n_alike:
        st.caption(
            f"{fmt.counted(n_alike, 'tensor')} outside the sample: taken as the mean of their layer type."
        )


def _on_row(key: str, rows: Sequence[Node], act: Callable[[Node], None]) -> None:
    """Do something with the row whose button was clicked; the browser's word is checked."""
    click = st.session_state.get(key)
    place = None if click is None else click["row"]
    if isinstance(place, int) and 0 <= place < len(rows):
        act(rows[place])


def _toggle(edit: Edit, rates: Rates, members: Sequence[int]) -> None:
    """Lock tensors, or unlock them where all are locked."""
    state.clicked()
    keys = {rates.keys[place] for place in members}
    edit.locked = edit.locked - keys if keys <= edit.locked else edit.locked | keys


def _frame(
    rates: Rates, values: Sequence[float], predicted: Predicted, rows: Sequence[Node], locked: set[str]
) -> pd.DataFrame:
    """Return the table: shares are of all layers, whichever are shown."""
    stored = predicted.bits * rates.sizes
    carried = np.nan_to_num(rates.sensitivities * rates.sizes, nan=0.0)
    damage = np.nan_to_num(predicted.damage, nan=0.0)
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
                f"{spacings.pop():.4g}" if len(spacings) == 1 else "mixed",
            )
        )
    shares = ["Sensitivity", "Share of bytes", "Share of damage"]
    return pd.DataFrame(lines, columns=["Layer", "Bits per weight", "−", "+", "Lock", *shares, "Coarseness"])


def _share(parts: np.ndarray, members: Sequence[int]) -> float:
    total = float(parts.sum())
    return float(parts[members].sum()) / total if 0 < total < math.inf else math.nan


def _change_picked(
    shown: Subject, edit: Edit, rates: Rates, values: Sequence[float], picked: Sequence[Node]
) -> None:
    """Change the picked layers together: what the buttons of a line do, which no key reaches."""
    members = sorted({place for row in picked for place in row.members})
    act = {
        "Fewer bits": (":material/remove:", lambda: _scaled(shown, edit, rates, values, members, _STEP)),
        "More bits": (":material/add:", lambda: _scaled(shown, edit, rates, values, members, 1 / _STEP)),
        "Lock or unlock": (":material/lock:", lambda: _toggle(edit, rates, members)),
    }
    with st.container(horizontal=True, vertical_alignment="center"):
        for label, (icon, do) in act.items():
            st.button(label, icon=icon, on_click=do, disabled=not members)
        modules.say_picked(len(members), "tensor")
    st.caption(
        "Buttons in a line react to the mouse only. With the keyboard: Tab into the table, pick lines with "
        "the arrow keys and Shift+Space, and go back with Shift+Tab to the buttons above, which do the same."
    )


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
