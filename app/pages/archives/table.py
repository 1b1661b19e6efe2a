"""The table of a run's archives: size, cost, and each metric that was measured; its rows can be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import verified
from inshrink_app.services import Bound
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets import archive_picker, fmt, listing, quality

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.shared.measured import Known

MOST = 5
"""Archives that are shown side by side."""

_MARK, _NAME, _WITHIN = "●", "archive", "bound"
_NAME_WIDTH = 44
_CHOSEN = "archives.chosen"

Measured = Mapping[Path, Mapping[str, Known]]
"""What is known of each archive, by metric."""


def colours_of(archives: Sequence[ChainReport]) -> dict[str, str]:
    """Return the colour of each archive, by its path: it does not depend on what is chosen."""
    paths = sorted(str(one.path) for one in archives)
    return {path: CATEGORICAL[(place + 1) % len(CATEGORICAL)] for place, path in enumerate(paths)}


def choose(
    archives: Sequence[ChainReport], measured: Measured, colours: Mapping[str, str], bound: Bound
) -> tuple[ChainReport, ...]:
    """Draw the table and return the archives that are chosen in it, at least one."""
    paths = [str(one.path) for one in archives]
    chosen = _chosen(paths)
    frame = rows(archives, measured, bound)
    key = f"archives.table.{hash(tuple(paths))}"
    wanted = [paths.index(path) for path in chosen]
    before = st.session_state.get(key)
    if before is None or list(before["selection"]["rows"]) != wanted:
        st.session_state[key] = {"selection": {"rows": wanted, "columns": [], "cells": []}}

    def picked() -> None:
        found = [paths[row] for row in st.session_state[key]["selection"]["rows"] if row < len(paths)]
        st.session_state[_CHOSEN] = found[-MOST:]
        state.publish(**{archive_picker.ARCHIVE: (found or paths)[0]})

    frame = frame.dropna(axis="columns", how="all")
    frame.insert(0, _MARK, _MARK)
    looks = listing.looks(frame, helps={_WITHIN: f"Whether what was measured keeps the bound: {bound.text}"})
    looks[_MARK] = st.column_config.Column("", width=30)
    styled = listing.in_percent(frame, looks).style.apply(
        lambda column: [f"color: {colours[path]}" for path in paths], subset=[_MARK]
    )
    st.dataframe(
        styled,
        hide_index=True,
        height="content" if len(paths) <= 2 * MOST else 420,
        placeholder="–",
        alt="Archives of this run with steps, size, ratio, restore cost and every metric that was measured",
        column_config=looks,
        key=key,
        on_select=picked,
        selection_mode="multi-row",
    )
    return tuple(archives[paths.index(path)] for path in chosen)


def choose_only(paths: Sequence[str]) -> None:
    """Choose some archives from now on."""
    st.session_state[_CHOSEN] = list(paths)
    state.publish(**{archive_picker.ARCHIVE: paths[0]})


def _chosen(paths: Sequence[str]) -> list[str]:
    """Return the paths that are chosen in the table; if the link names another one, that one."""
    linked = state.choice(archive_picker.ARCHIVE, paths, paths[0])
    chosen = [path for path in st.session_state.get(_CHOSEN, ()) if path in paths]
    if linked not in chosen:
        chosen = [linked]
    st.session_state[_CHOSEN] = chosen
    return chosen


def rows(archives: Sequence[ChainReport], measured: Measured, bound: Bound) -> pd.DataFrame:
    """Return a line an archive."""
    return pd.DataFrame([_row(one, measured.get(one.path, {}), bound) for one in archives])


def _row(chain: ChainReport, known: Mapping[str, Known], bound: Bound) -> dict[str, Any]:
    costs = [one.comparison.max_restore_cost for one in known.values()]
    divergences = [one.comparison.max_divergence for one in known.values()]
    cost = next((value for value in costs if value is not None), None)
    divergence = next((value for value in divergences if value is not None), None)
    drops = {f"drop of {metric}": one.comparison.max_drop for metric, one in known.items()}
    figures = {
        "restore_cost": cost,
        "divergence": divergence,
        "drop": max((value for value in drops.values() if value is not None), default=None),
    }
    judged = figures.get(bound.kind)
    word: str | None
    if quality.is_exact_archive(chain):
        cost, word = cost or 0.0, "exact"
    else:
        word = None if judged is None else "kept" if bound.is_kept(judged) else "broken"
    last = next(verified(chain), None)
    sound = None if last is None else "sound" if last.document.get("ok") else "damaged"
    return {
        _NAME: fmt.elided(fmt.printable(chain.name), _NAME_WIDTH),
        "settings": services.told_apart_by(chain) or chain.codec,
        "steps": len(chain.steps),
        "bytes": chain.nbytes,
        "ratio": chain.ratio_total,
        "bits per weight": chain.bits_per_weight,
        "restore cost": cost,
        _WITHIN: word if bound.kind != "none" else None,
        **drops,
        "largest divergence": divergence,
        "verified": sound,
        "state": "measured before its last change" if any(not o.is_current for o in known.values()) else None,
    }
