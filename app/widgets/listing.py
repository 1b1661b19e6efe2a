"""Tables with a common look, and file downloads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import Subject
from inshrink_app.widgets import fmt, quality

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.text import csv_cell

COUNT: Final = "localized"
"""Counts and steps: in full, with thousands separators. The default for integers."""

SIZE: Final = "bytes"
"""Bytes, on screen in units."""

SMALL: Final = "%.2e"
"""Errors and other values that may span decades: three digits (`small`)."""

SHARE: Final = "%.2f %%"
"""Fractions, on screen in percent."""

RATIO: Final = "%.3g×"

_SHARES = ("drop", "largest drop", "restore cost")
"""Headings of fractions start with one of these."""

_USUAL: Mapping[str, str] = {
    **dict.fromkeys(("ratio", "ratio total", "ratio weights"), RATIO),
    **dict.fromkeys(("divergence", "largest divergence", "times", "relative error"), SMALL),
    "bits per weight": "%.2f",
}
"""Formats of figures that several tables have, by heading."""

HEIGHT: Final = 560
"""Height in pixels above which a table scrolls."""

_ROW_PIXELS = 37


def show(
    table: pd.DataFrame,
    stem: str,
    *,
    alt: str,
    formats: Mapping[str, str] | None = None,
    wide: Sequence[str] = (),
    helps: Mapping[str, str] | None = None,
    hidden: Sequence[str] = (),
    most: int | None = None,
    **more: Any,
) -> None:
    """Draw a table, and offer it as CSV and JSON.

    Parameters
    ----------
    table
        The table; its column names are those in the files.
    stem
        Name of the files without suffix; also the key of their buttons.
    alt
        Alternative text.
    formats
        Formats of columns, except common ones: `COUNT`, `SIZE`, `SMALL`, `SHARE`, `RATIO` or a printf
        format.
    wide
        Columns of long text.
    helps
        Help texts of headings, except common ones.
    hidden
        Columns that only the files have.
    most
        Rows on screen, the first ones; the files have all of them.
    **more
        Passed to `st.dataframe`: key and callbacks.
    """
    drawn = table.drop(columns=list(hidden))
    drawn = drawn if most is None else drawn.head(most)
    bare(*drawn_as(drawn, formats, helps, wide), alt, **more)
    table_buttons(table, stem)


def drawn_as(
    table: pd.DataFrame,
    formats: Mapping[str, str] | None = None,
    helps: Mapping[str, str] | None = None,
    wide: Sequence[str] = (),
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a table with fractions in percent, and the configuration of its columns by heading (`show`)."""
    forms, tips = {**_USUAL, **(formats or {})}, {**quality.HELPS, **(helps or {})}
    forms |= {name: SHARE for name in table if str(name).startswith(_SHARES)}
    forms |= {name: SIZE for name in table if SIZE in str(name)}
    shares = {name: 100 * table[name].astype(float) for name in table if forms.get(name) == SHARE}
    return table.assign(**shares), {
        name: _column(table, name, forms.get(name), tips.get(name), name in wide) for name in table.columns
    }


def bare(table: Any, looks: Mapping[str, Any], alt: str, height: int = HEIGHT, **more: Any) -> None:
    """Draw a table without downloads; `more` has its key and callbacks."""
    st.dataframe(
        table,
        hide_index=True,
        height="content" if len(table.index) * _ROW_PIXELS <= height else height,
        placeholder="–",
        alt=alt,
        column_config=dict(looks),
        **more,
    )


def pickable(
    table: Any,
    looks: Mapping[str, Any],
    alt: str,
    key: str,
    picked: Sequence[int],
    on_pick: Callable[[list[int]], None],
    **more: int,
) -> None:
    """Draw a table whose rows can be picked by a click before them, or by arrow keys and Shift+Space.

    Parameters
    ----------
    table, looks, alt, **more
        As in `bare`, including the height.
    key
        Key of the widget.
    picked
        Indices of the picked rows.
    on_pick
        Receives the indices of the picked rows.
    """
    before = st.session_state.get(key)
    if before is None or list(before["selection"]["rows"]) != list(picked):
        st.session_state[key] = {"selection": {"rows": list(picked), "columns": [], "cells": []}}

    def take() -> None:
        rows = st.session_state[key]["selection"]["rows"]
        on_pick([row for row in rows if 0 <= row < len(table.index)])

    bare(table, looks, alt, key=key, on_select=take, selection_mode="multi-row", **more)


def _column(table: pd.DataFrame, name: str, form: str | None, tip: str | None, is_wide: bool) -> Any:
    """Return the configuration of a column: a heading in sentence case, and one number format."""
    label = name[:1].upper() + name[1:]
    if form is None and pd.api.types.is_integer_dtype(table[name].dtype):
        form = COUNT
    if form == SMALL:
        form = small(table[name].dropna())
    if form is not None:
        return st.column_config.NumberColumn(label, format=form, help=tip)
    return st.column_config.Column(label, help=tip, width="large" if is_wide else None)


def share_column(tip: str | None = None, width: int | None = None) -> Any:
    """Return the configuration of a column of percentages, each with a bar."""
    look: dict[str, Any] = {"min_value": 0.0, "max_value": 100.0, "help": tip, "width": width}
    return st.column_config.ProgressColumn(format="%.1f %%", **look)


def small(values: Iterable[float]) -> str:
    """Return the printf format of a column of such values.

    Examples
    --------
    >>> small([23.0, 2.31]), small([0.0123, 0.9]), small([1.0, 1e-4]), small([])
    ('%.2f', '%.4f', '%.2e', '%.2f')
    """
    known = [abs(value) for value in values if math.isfinite(value) and value]
    if "e" in fmt.d3_format(known):
        return SMALL
    return f"%.{max(2, 2 - math.floor(math.log10(min(known, default=1.0))))}f"


_MIME = {".csv": "text/csv", ".html": "text/html", ".json": "application/json", ".toml": "application/toml"}


def buttons(*files: tuple[str, str, Callable[[], bytes] | bytes]) -> None:
    """Offer files of a few MB, side by side.

    Parameters
    ----------
    *files
        Label, name (also the widget's key), and content or a function that returns it on demand.
    """
    with st.container(horizontal=True, gap="small"):
        for label, name, content in files:
            st.download_button(
                label,
                content,
                file_name=name,
                mime=_MIME[Path(name).suffix],
                key=name,
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
                help=f"Download {name}",
            )


def csv_bytes(table: pd.DataFrame) -> bytes:
    """Return a table as CSV in which no name is a formula."""
    text: str = table.map(csv_cell).rename(columns=csv_cell).to_csv(index=False)
    return text.encode()


def table_buttons(
    table: pd.DataFrame | Callable[[], pd.DataFrame],
    stem: str,
    *before: tuple[str, str, Callable[[], bytes] | bytes],
) -> None:
    """Offer a table, or a function that returns it, as CSV and JSON, after other files."""

    def made() -> pd.DataFrame:
        return table() if callable(table) else table

    buttons(
        *before,
        ("CSV", f"{stem}.csv", lambda: csv_bytes(made())),
        ("JSON", f"{stem}.json", lambda: made().to_json(orient="records", indent=1).encode()),
    )


def download(path: Path) -> None:
    """Offer a file of any size, which the server streams from disk; on failure, show the reason."""
    offered = services.download_url(path)
    if offered is None:
        st.caption("It no longer exists, or is outside the folders that the explorer may read.")
        return
    url, nbytes = offered
    label = f"Download {fmt.markdown(path.name)} ({fmt.size(nbytes)})"
    st.link_button(label, url, icon=":material/download:")


def sizes(shown: Subject) -> dict[str, pd.DataFrame]:
    """Return the bytes of the last checkpoint by role and by layer type, each under its title."""
    by_role, by_layer = Counter[str](), Counter[str]()
    for row in shown.tensors:
        by_role[row.role] += row.nbytes
        if row.role == "weight":
            by_layer[str(row.layer)] += row.nbytes
    return {
        "Size by role": _shares("role", by_role),
        "Weights by layer type": _shares("layer type", by_layer),
    }


def _shares(kind: str, nbytes: Counter[str]) -> pd.DataFrame:
    total = nbytes.total() or 1
    rows = [(name, n, n / total) for name, n in nbytes.most_common()]
    return pd.DataFrame(rows, columns=[kind, "bytes", "share"])


def tensors(specs: Iterable[TensorSpec]) -> pd.DataFrame:
    """Return tensors with role, layer type, dtype, shape and size."""
    return pd.DataFrame(
        [
            (row.name, row.role, row.layer, row.dtype, fmt.shape(row.shape), row.numel, row.nbytes)
            for row in specs
        ],
        columns=["name", "role", "layer type", "dtype", "shape", "values", "bytes"],
    )
