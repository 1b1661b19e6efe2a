"""A row of figures: each with its name above and what it is below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import streamlit as st

__all__ = ["row"]


def row(
    facts: Iterable[tuple[str, str, str | None] | tuple[str, str, str | None, str]],
    *,
    gap: Literal["small", "medium"] = "small",
) -> None:
    """Draw figures side by side.

    Parameters
    ----------
    facts
        Name, value, what stands below, and where there is one, what stands behind the name.
    gap
        Between them.
    """
    with st.container(horizontal=True, gap=gap):
        for label, value, below, *tip in facts:
            st.metric(
                label,
                value,
                delta=below,
                delta_color="off",
                delta_arrow="off",
                border=True,
                help=(tip[0] or None) if tip else None,
            )
