"""Small buttons that hand over what is on screen as files, and links to files of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import streamlit as st
from inshrink_app.widgets.formatting import bytes_text

from inshrink_core.text import csv_cell

__all__ = ["buttons", "csv_bytes", "file_link", "table_buttons"]

_MIME = {".csv": "text/csv", ".json": "application/json"}


def buttons(*files: tuple[str, str, Callable[[], bytes] | bytes]) -> None:
    """Offer files of at most some MB, side by side.

    Parameters
    ----------
    *files
        Of each the label, the name, which is also the widget's key, and the content or what makes it once it
        is asked for.
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
    """Return a table as CSV, in which no name can be a formula."""
    text: str = table.map(csv_cell).rename(columns=csv_cell).to_csv(index=False)
    return text.encode()


def table_buttons(table: pd.DataFrame | Callable[[], pd.DataFrame], stem: str) -> None:
    """Offer a table, or what makes it, as CSV and as JSON under a name without suffix."""

    def made() -> pd.DataFrame:
        return table() if callable(table) else table

    buttons(
        ("CSV", f"{stem}.csv", lambda: csv_bytes(made())),
        ("JSON", f"{stem}.json", lambda: made().to_json(orient="records", indent=1).encode()),
    )


def file_link(label: str, url: str, nbytes: int, *, primary: bool = False) -> None:
    """Offer a file of any size, which the server streams from disk."""
    st.link_button(
        f"{label} ({bytes_text(nbytes)})",
        url,
        type="primary" if primary else "secondary",
        icon=":material/download:",
    )
