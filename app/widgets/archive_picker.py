"""Choosing the archive that a page is about, where a run has several, and what to say where it has none."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Subject
from inshrink_app.widgets import fmt
from inshrink_app.widgets.choices import one_of_many
from inshrink_app.widgets.layout import section

from inshrink_core.chain import ChainReport

ARCHIVE = "archive"

_NAME_WIDTH = 44
_SETTINGS_WIDTH = 60


def choose(shown: Subject) -> ChainReport | None:
    """Return the archive chosen among those of a run; None where it has none."""
    there = {str(one.path): one for one in services.archives_of(shown)}
    if len(there) < 2:
        return next(iter(there.values()), None)
    labels = {path: choice_text(one) for path, one in there.items()}
    return there[one_of_many("archive", "Archive", ARCHIVE, labels, next(iter(there)))]


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
