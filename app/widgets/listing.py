"""A table with its files: headings, numbers and missing values look the same on every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
import streamlit as st
from inshrink_app.widgets import download

__all__ = ["HEIGHT", "RATIO", "SHARE", "SMALL", "WHOLE", "show"]

WHOLE: Final = "localized"
"""Counts, bytes and steps: in full, thousands apart. Integers are written so unasked."""

SMALL: Final = "%.2e"
"""Errors and other values that span decades: three digits, as everywhere."""

SHARE: Final = "%.2f %%"
"""Fractions, on screen in percent; the files keep the fraction."""

RATIO: Final = "%.1f×"

HEIGHT: Final = 560
"""Tables of more rows than fit scroll inside of themselves."""

_ROWS_WITHOUT_SCROLLING = 15


def show(
    table: pd.DataFrame,
    stem: str,
    *,
    alt: str,
    formats: Mapping[str, str] | None = None,
    wide: Sequence[str] = (),
    helps: Mapping[str, str] | None = None,
    columns: Mapping[str, Any] | None = None,
    hidden: Sequence[str] = (),
    most: int | None = None,
    **more: Any,
) -> None:
    """Draw a table, and offer it as CSV and JSON.

    Parameters
    ----------
    table
        What is listed; the names of its columns are those in the files.
    stem
        Name of the files without suffix; also the key of their buttons.
    alt
        What the table is, for those who do not see it.
    formats
        How the numbers of a column are written: `WHOLE`, `SMALL`, `SHARE`, `RATIO` or a printf format.
    wide
        Columns of long text.
    helps
        What stands behind a heading.
    columns
        Columns with a look of their own.
    hidden
        Columns that are in the files alone.
    most
        Rows on screen, the first ones; the files have all of them.
    **more
        For `st.dataframe`: its key, and what a click does.
    """
    drawn = table.drop(columns=list(hidden))
    drawn = drawn if most is None else drawn.head(most)
    looks = {
        name: _column(drawn, name, (formats or {}).get(name), (helps or {}).get(name), name in wide)
        for name in drawn.columns
    }
    for name, form in (formats or {}).items():
        if form == SHARE and name in drawn.columns:
            drawn = drawn.assign(**{name: 100 * drawn[name].astype(float)})
    st.dataframe(
        drawn,
        hide_index=True,
        height="content" if len(drawn) <= _ROWS_WITHOUT_SCROLLING else HEIGHT,
        placeholder="–",
        alt=alt,
        column_config={**looks, **(columns or {})},
        **more,
    )
    download.table_buttons(table, stem)


def _column(table: pd.DataFrame, name: str, form: str | None, tip: str | None, is_wide: bool) -> Any:
    """Return how a column looks: a heading in sentence case, and numbers in one format."""
    label = name[:1].upper() + name[1:]
    if form is None and pd.api.types.is_integer_dtype(table[name].dtype):
        form = WHOLE
    if form is not None:
        return st.column_config.NumberColumn(label, format=form, help=tip)
    return st.column_config.Column(label, help=tip, width="large" if is_wide else None)
