"""A small button that hands over the table on screen as CSV."""

from __future__ import annotations

import pandas as pd
import streamlit as st

__all__ = ["csv_button"]


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
