"""Small buttons that hand over the table on screen as CSV and JSON, and links to files of any size."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app.formatting import bytes_text

__all__ = ["csv_button", "file_link", "table_buttons"]


def csv_button(table: pd.DataFrame, file_name: str, *, key: str, label: str = "Download as CSV") -> None:
    """Offer a table of at most some MB; larger things are not for a button that holds them in memory."""
    st.download_button(
        label,
        table.to_csv(index=False).encode(),
        file_name=file_name,
        mime="text/csv",
        key=key,
        on_click="ignore",
        type="tertiary",
        icon=":material/download:",
    )


def table_buttons(table: pd.DataFrame, stem: str) -> None:
    """Offer a table of at most some MB in both forms, side by side.

    Parameters
    ----------
    table
        What is on screen.
    stem
        File name without suffix; also the widgets' key.
    """
    with st.container(horizontal=True, gap="small"):
        csv_button(table, f"{stem}.csv", key=f"{stem}.csv", label="CSV")
        st.download_button(
            "JSON",
            table.to_json(orient="records", indent=1).encode(),
            file_name=f"{stem}.json",
            mime="application/json",
            key=f"{stem}.json",
            on_click="ignore",
            type="tertiary",
            icon=":material/download:",
        )


def file_link(label: str, url: str, nbytes: int, *, primary: bool = False) -> None:
    """Offer a file of any size, which the server streams from disk."""
    st.link_button(
        f"{label} ({bytes_text(nbytes)})",
        url,
        type="primary" if primary else "secondary",
        icon=":material/download:",
    )
