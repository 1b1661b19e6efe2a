"""Small buttons that hand over the table on screen as CSV and JSON, and links to files of any size."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app.widgets.formatting import bytes_text

__all__ = ["file_link", "table_buttons"]


def table_buttons(table: pd.DataFrame, stem: str) -> None:
    """Offer a table of at most some MB in both forms, side by side; larger things are not for a button.

    Parameters
    ----------
    table
        What is on screen.
    stem
        File name without suffix; also the widgets' key.
    """
    with st.container(horizontal=True, gap="small"):
        for label, mime, content in (
            ("CSV", "text/csv", table.to_csv(index=False)),
            ("JSON", "application/json", table.to_json(orient="records", indent=1)),
        ):
            name = f"{stem}.{label.lower()}"
            st.download_button(
                label,
                content.encode(),
                file_name=name,
                mime=mime,
                key=name,
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
                help=f"Download {name}",
            )


def file_link(label: str, url: str, nbytes: int, *, primary: bool = False) -> None:
    """Offer a file of any size, which the server streams from disk."""
    st.link_button(
        f"{label} ({bytes_text(nbytes)})",
        url,
        type="primary" if primary else "secondary",
        icon=":material/download:",
    )
