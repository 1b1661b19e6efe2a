"""Choosing the archive that a page is about, where a run has several, and what to say where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.subject import Subject
from inshrink_app.widgets import fmt
from inshrink_app.widgets.layout import section

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport


ARCHIVE = "archive"

_NAME_WIDTH = 44
_SETTINGS_WIDTH = 60


def choose(shown: Subject) -> ChainReport | None:
    """Return the archive chosen among those of a run; None where it has none."""
    choices = services.archives_of(shown)
    if len(choices) < 2:
        return choices[0] if choices else None
    names = {str(one.path): one for one in choices}
    wanted = state.choice(ARCHIVE, list(names), str(choices[0].path))
    chosen = st.selectbox(
        "Archive",
        list(names),
        index=list(names).index(wanted),
        format_func=lambda path: choice_text(names[path]),
        key="archive.choice",
    )
    state.publish(archive=str(chosen))
    return names[str(chosen)]


def choice_text(one: ChainReport) -> str:
    """Say which archive it is, in one line of plain text."""
    told = services.told_apart_by(one)
    settings = f" {fmt.elided(told, _SETTINGS_WIDTH)}" if told else ""
    return (
        f"{fmt.elided(one.name, _NAME_WIDTH)} · {one.codec}{settings} · {fmt.steps(one.steps)} · "
        f"{fmt.size(one.nbytes)} · {fmt.ratio(one.ratio_total)}"
    )


def none_yet(what: str) -> None:
    """Say that the run has no archive, and lead to where one is made."""
    with section("This run has no archive yet"):
        st.write(
            f"{what} Archives of a run are looked for beside it and in the folders that the explorer may see."
        )
        if st.button("Export an archive", type="primary", icon=":material/archive:"):
            state.go_to("export")
