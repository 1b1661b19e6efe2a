"""What two steps and two runs have in common: the rows that differ most, and what one side lacks."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from inshrink_app.pages.sensitivity import changes as change_figures
from inshrink_app.pages.sensitivity.changes import Changes
from inshrink_app.widgets import figures
from inshrink_app.widgets.formatting import count_text

__all__ = ["draw", "list_names"]

_MOST_DRAWN = 30
_NAMES_LISTED = 20


def draw(found: Changes, unit: str, alt: str) -> None:
    """Draw the rows that differ most."""
    if not found.names or not found.steps:
        st.caption("There is nothing to compare.")
        return
    n = min(_MOST_DRAWN, len(found.names))
    st.plotly_chart(
        change_figures.changes_figure(found.names[:n], found.steps, found.values[:n], unit),
        config=dict(figures.CONFIG),
        key="changes",
        alt=alt,
    )
    rest = len(found.names) - n
    said = f"The {count_text(n)} tensors that differ most" + (
        f"; {count_text(rest)} differ less." if rest else "."
    )
    st.caption(said + " Blue: larger than there. Red: smaller. White: the same. Grey: no value.")


def list_names(names: Sequence[str], label: str) -> None:
    """List tensors that one side lacks."""
    if not names:
        return
    listed = "\n".join(names[:_NAMES_LISTED])
    more = f"\n… and {count_text(len(names) - _NAMES_LISTED)} more" if len(names) > _NAMES_LISTED else ""
    st.markdown(f"**{label}** ({count_text(len(names))})")
    st.code(listed + more, language=None, wrap_lines=True)
