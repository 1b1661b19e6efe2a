"""The rows of the heatmap as a table: their course, first and last values; a row can be selected."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app.pages.sensitivity import heatmap as heat_columns
from inshrink_app.pages.sensitivity import selection as chosen
from inshrink_app.pages.sensitivity.selection import Event
from inshrink_app.widgets import listing
from inshrink_app.widgets.formatting import count_text, shape_text
from inshrink_app.widgets.kept import kept
from inshrink_app.widgets.tables import METRICS, HeatRow, Sensitivity

__all__ = ["long_table", "show"]

_KEY = "sensitivity.table"
_ROWS_WITHOUT_SCROLLING = 20
_MOST_ROWS = 5000
"""More rows than this make the browser slow, and nobody reads them."""


def show(source: Sensitivity, table: Sensitivity, statistic: str, selected: int | None) -> None:
    """Draw the table; the row of what is selected is marked.

    Parameters
    ----------
    source
        The measurement by tensor that `table` was made from.
    table
        What the heatmap shows.
    statistic
        A key of its values.
    selected
        Place of the selected row, if it is among them.
    """
    names = tuple(row.name for row in table.rows)
    frame = kept("sensitivity.frame", source, (statistic, table.by, names), lambda: _frame(table, statistic))
    number = st.column_config.NumberColumn(
        format=listing.SMALL if METRICS[table.metric].scale == "log" else "%.3f"
    )
    wanted = [] if selected is None or selected >= len(frame) else [selected]
    state = st.session_state.get(_KEY)
    if state is None or list(state["selection"]["rows"]) != wanted:
        st.session_state[_KEY] = {"selection": {"rows": wanted, "columns": [], "cells": []}}
    st.dataframe(
        frame,
        hide_index=True,
        height="content" if len(frame) <= _ROWS_WITHOUT_SCROLLING else listing.HEIGHT,
        placeholder="–",
        alt=f"{METRICS[table.metric].label} per row: first, last, smallest and largest value",
        key=_KEY,
        on_select=functools.partial(_picked, names),
        selection_mode="single-row",
        column_config={
            "First": number,
            "Last": number,
            "Smallest": number,
            "Largest": number,
            "Course": st.column_config.LineChartColumn(width="medium", help=_course_help(table)),
        },
    )
    if len(table.rows) > _MOST_ROWS:
        st.caption(f"The first {count_text(_MOST_ROWS)} of {count_text(len(table.rows))} rows.")
    _downloads(table)


def _picked(names: Sequence[str]) -> None:
    """Take in a click on a row."""
    rows = st.session_state[_KEY]["selection"]["rows"]
    name = names[rows[0]] if rows and 0 <= rows[0] < len(names) else None
    chosen.apply(Event("table", name))


def _course_help(table: Sensitivity) -> str:
    return "log₁₀ of the value over the steps" if METRICS[table.metric].scale == "log" else "Over the steps"


def _frame(table: Sensitivity, statistic: str) -> pd.DataFrame:
    """Summarize every row."""
    values = table.values[statistic]
    trend = heat_columns.bucket_steps(values, table.steps, 40).values
    log = METRICS[table.metric].scale == "log"
    rows = [_table_row(row, values[i], trend[i], log) for i, row in enumerate(table.rows[:_MOST_ROWS])]
    first = {"tensor": "Tensor", "block": "Block", "layer_type": "Layer type"}[table.by]
    columns = [first, "layer", "Shape", "First", "Last", "Smallest", "Largest", "Course"]
    frame = pd.DataFrame(rows, columns=columns)
    return (
        frame.rename(columns={"layer": "Layer type"}) if table.by == "tensor" else frame.drop(columns="layer")
    )


def _table_row(row: HeatRow, values: np.ndarray, trend: np.ndarray, log: bool) -> tuple[object, ...]:
    """Summarize one row of the heatmap."""
    finite = values[np.isfinite(values)]
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.log10(trend.astype(np.float64)) if log else trend.astype(np.float64)
    shape = (
        shape_text(row.shape)
        if row.shape is not None
        else f"{row.n_tensors} tensor{'s' * (row.n_tensors != 1)}"
    )
    ends = (finite[0], finite[-1], finite.min(), finite.max()) if finite.size else (np.nan,) * 4
    return (row.name, row.layer, shape, *map(float, ends), [float(v) for v in drawn if np.isfinite(v)])


def long_table(table: Sensitivity) -> pd.DataFrame:
    """Return every value with its row and step, all statistics side by side."""
    n_rows, n_steps = len(table.rows), len(table.steps)
    columns = {
        table.by: np.repeat([row.name for row in table.rows], n_steps),
        "step": np.tile(table.steps, n_rows),
    }
    return pd.DataFrame(columns | {name: values.ravel() for name, values in table.values.items()})


def _downloads(table: Sensitivity) -> None:
    """Offer every value; the files are made when they are asked for."""
    with st.container(horizontal=True, gap="small"):
        for label, make, suffix, mime in (
            ("Download all values as CSV", _csv, "csv", "text/csv"),
            ("As JSON", _json, "json", "application/json"),
        ):
            st.download_button(
                label,
                functools.partial(make, table),
                file_name=f"sensitivity-{table.metric}.{suffix}",
                mime=mime,
                key=f"sensitivity.{suffix}",
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
            )


def _csv(table: Sensitivity) -> bytes:
    return long_table(table).to_csv(index=False).encode()


def _json(table: Sensitivity) -> bytes:
    return long_table(table).to_json(orient="records").encode()
