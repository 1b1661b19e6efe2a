"""The table of a run's archives: size, cost and each measured metric, with selectable rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import state
from inshrink_app.model import config_words, verified
from inshrink_app.services import Chosen
from inshrink_app.widgets import fmt, listing, quality

from inshrink_core.chain.report import ChainReport
from inshrink_core.verbs.shared.measured import Known

MOST = 5
"""Largest number of archives shown side by side."""

_MARK, _NAME, _WITHIN = "●", "archive", "bound"
_NAME_WIDTH = 30
_ONLY_IN_FILES = ("settings", "bits per weight", "largest divergence")
_WIDTHS = {_MARK: 30, _NAME: 150, "steps": 55, "bytes": 90, "ratio": 65, _WITHIN: 65, "state": 85}
"""Widths of columns in pixels; with two metrics the table fits a page of 900 pixels."""

_COST_WIDTH = 100
_CHOSEN = "archives.chosen"

Measured = Mapping[Path, Mapping[str, Known]]
"""Measurements of each archive, by metric."""


def choose(
    archives: Sequence[ChainReport], measured: Measured, colours: Mapping[str, str], now: Chosen
) -> tuple[ChainReport, ...]:
    """Draw the table and return the chosen archives, at least one."""
    paths = [str(chain.path) for chain in archives]
    chosen = _chosen(paths)
    frame = rows(archives, measured, now)
    key = f"archives.table.{hash(tuple(paths))}"
    wanted = [paths.index(path) for path in chosen]

    def picked(rows: list[int]) -> None:
        found = [paths[row] for row in rows]
        st.session_state[_CHOSEN] = found[-MOST:]
        state.publish(**{state.ARCHIVE: (found or paths)[0]})

    frame = frame.drop(columns=[*_ONLY_IN_FILES]).dropna(axis="columns", how="all")
    frame.insert(0, _MARK, _MARK)
    tips = {
        _WITHIN: f"Whether what was measured keeps the bound: {quality.bound_text(now.bound)}",
        "state": "Sound or damaged when last verified; outdated figures are from before its last change.",
    }
    frame, looks = listing.drawn_as(frame, helps=tips)
    looks[_MARK] = st.column_config.Column("")
    for name, look in looks.items():
        look["width"] = _WIDTHS.get(name, _COST_WIDTH)
    ink = [f"color: {colours[path]}" for path in paths]
    styled = frame.style.apply(lambda column: ink, subset=[_MARK])
    alt = "Archives of this run with steps, size, ratio, restore cost and every metric that was measured"
    listing.pickable(styled, looks, alt, key, wanted, picked)
    return tuple(archives[paths.index(path)] for path in chosen)


def choose_only(paths: Sequence[str]) -> None:
    """Replace the choice of archives."""
    st.session_state[_CHOSEN] = list(paths)
    state.publish(**{state.ARCHIVE: paths[0]})


def _chosen(paths: Sequence[str]) -> list[str]:
    """Return the paths chosen in the table, or the path that a new link names."""
    linked = state.choice(state.ARCHIVE, paths, paths[0])
    chosen = [path for path in st.session_state.get(_CHOSEN, ()) if path in paths]
    if linked not in chosen:
        chosen = [linked]
    st.session_state[_CHOSEN] = chosen
    return chosen


def rows(archives: Sequence[ChainReport], measured: Measured, now: Chosen) -> pd.DataFrame:
    """Return one row per archive."""
    return pd.DataFrame([_row(chain, measured.get(chain.path, {}), now) for chain in archives])


def _row(chain: ChainReport, known: Mapping[str, Known], now: Chosen) -> dict[str, Any]:
    found = [by_metric.comparison for by_metric in known.values()]
    drops = {f"drop of {metric}": by_metric.comparison.max_drop for metric, by_metric in known.items()}
    figures = {
        name: next((cost for one in found if (cost := getattr(one, f"max_{name}")) is not None), None)
        for name in ("restore_cost", "divergence")
    }
    judging = [f"drop of {now.metric}"] if now.metric in known else [*drops]
    figures["drop"] = max((value for name in judging if (value := drops[name]) is not None), default=None)
    cost, check = figures["restore_cost"], now.bound.check(figures.get(now.bound.kind))
    if quality.is_exact_archive(chain):
        cost, check = cost or 0.0, "exact" if now.bound.kind != "none" else None
    config = {"codec": chain.codec, "settings": chain.config, "override": chain.overrides}
    last = next(verified(chain), None)
    verdict = None if last is None else "sound" if last.document.get("ok") else "damaged"
    is_old = verdict != "damaged" and any(not by_metric.is_current for by_metric in known.values())
    return {
        _NAME: fmt.clipped(fmt.printable(chain.name), _NAME_WIDTH),
        "steps": len(chain.steps),
        "bytes": chain.nbytes,
        "ratio": chain.ratio_total,
        "restore cost": cost,
        _WITHIN: check,
        **drops,
        "settings": config_words(config) if chain.is_uniform else "settings by step",
        "bits per weight": chain.bits_per_weight,
        "largest divergence": figures["divergence"],
        "state": "outdated" if is_old else verdict,
    }
