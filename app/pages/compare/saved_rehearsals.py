"""Rehearsals saved elsewhere: a document of the command line, or a folder of finished trainings."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services
from inshrink_app.pages.compare import rehearsal_result
from inshrink_app.pages.compare.tables import RehearsalResult
from inshrink_app.widgets import problem
from inshrink_app.widgets.formatting import counted, markdown_text, ratio_text
from inshrink_app.widgets.tables import ServiceError

__all__ = ["show"]


def show() -> None:
    """Draw the field for its path, and what is there."""
    with st.expander("Open a saved rehearsal", icon=":material/folder_open:"):
        text = st.text_input(
            "File or folder",
            key="rehearsal.saved",
            placeholder="rehearsal.json",
            help="What `inshrink rehearse --json` printed, or the folder where `inshrink rehearse -o` kept "
            "its trainings.",
        )
        if not text.strip():
            st.caption(
                "The curves of a rehearsal of the command line, of your own training too, beside the noise "
                "of its seeds."
            )
            return
        try:
            found = services.saved_rehearsals(text.strip())
        except ServiceError as error:
            problem.show(error.problem)
            return
        place = 0
        if len(found) > 1:
            place = st.selectbox(
                "Rehearsal", range(len(found)), format_func=lambda i: _title(found[i]), key="rehearsal.which"
            )
        chosen = found[place]
        st.caption(markdown_text(f"{chosen.task} · {chosen.codec}"))
        rehearsal_result.show(chosen, "saved")


def _title(found: RehearsalResult) -> str:
    """Tell rehearsals of one folder apart."""
    return (
        f"{found.task} · {found.codec} · {counted(len(found.restored_at), 'failure')} · "
        f"{counted(len(found.curves), 'seed')} · {ratio_text(found.ratio_total)}"
    )
