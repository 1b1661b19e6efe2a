"""The origin of a run's steps, and a pattern for its file names with a preview."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.widgets import fmt, listing
from inshrink_app.widgets.layout import answer


def show(shown: Subject) -> None:
    """Draw the pattern and the steps that it finds."""
    for note in shown.notes[:1]:
        st.caption(fmt.markdown(fmt.sentence(note)))
    pattern: str = st.text_input(
        "Step pattern",
        answer(lambda: services.step_pattern_of(shown)) or "",
        placeholder="model_ep{step}_*.pt",
        key=f"names.{shown.path}",
        help="A whole name: `{step}` stands for the number, of a step or an epoch, `*` for anything.",
    )
    rows = answer(lambda: services.steps_by_pattern(shown, pattern))
    if rows is None:
        return
    table = pd.DataFrame(rows).rename(columns={"name": "file", "reason": "why it has none"})
    table["step"] = table["step"].astype("Int64")
    n_found = int(table["step"].count())
    path = services.with_step_pattern(shown, pattern)
    is_used = path == str(shown.path)
    use = "what is on screen" if is_used else "not used yet"
    st.caption(f"{fmt.counted(n_found, 'step')} in {fmt.counted(len(rows), 'name')}: {use}.")
    listing.show(
        table,
        "names",
        alt="File names, the step that the pattern finds in each, or why there is none",
        wide=["file", "why it has none"],
        hidden=["why it has none"] if n_found == len(rows) else [],
    )
    with st.container(horizontal=True):
        if st.button(
            "Use these steps", icon=":material/check:", key="names.use", disabled=is_used or not n_found
        ):
            _open(path)
        if shown.step_pattern and st.button("Without a pattern", icon=":material/undo:", key="names.none"):
            _open(str(shown.place))


def _open(path: str) -> None:
    """Show the run with other steps if they can be read."""
    subject = answer(lambda: services.load_subject(path))
    if subject is not None:
        services.remember(subject)
        state.set_run(path)
        st.rerun()
