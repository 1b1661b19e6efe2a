"""The report of an archive: one HTML file, to read anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs.commands import option
from inshrink_app.widgets import download, job_card
from inshrink_app.widgets.formatting import counted, markdown_text
from inshrink_app.widgets.layout import answer, section
from inshrink_app.widgets.tables import Subject

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport

__all__ = ["show"]


def show(chain: ChainReport, shown: Subject, original: Subject | None) -> list[list[str]]:
    """Draw the report, or offer to write it; return the command."""
    suggestion = services.suggested_report(chain, shown)
    log = services.chosen_log(state.log_choice(state.run_path() or ""))
    with section("Report"):
        job = services.report_job(chain)
        if job is not None and job.is_running:
            job_card.running(job, "Writing the report")
            return [list(job.commands[-1])]
        if job is not None and job_card.settled(job, "Writing the report"):
            _made(Path(option(job.commands[-1], "--out") or ""))
        else:
            st.write(
                "One HTML file to attach to a pull request: before and after, where an error hurts, the "
                "training's curves, the newest comparison and rehearsal, the commands and the hashes. It "
                "asks nobody for anything, and no code of the run is executed for it."
            )
        if log is not None:
            st.caption(
                markdown_text(
                    f"Its curves are {counted(len(log.columns), 'metric')} of {Path(log.file).name}."
                )
            )
        typed = st.text_input("Write to", value=suggestion, key=f"report.target.{suggestion}")
        if st.button("Write the report", icon=":material/description:"):
            target = answer(lambda: services.report_target(typed))
            if target is not None:
                services.start_report(chain, original, target, log)
                st.rerun()
    return [services.report_words(chain, original, typed, log)]


def _made(path: Path) -> None:
    """Draw where the report is."""
    st.code(str(path), language=None, wrap_lines=True)
    offered = services.download_url(path)
    if offered is None:
        st.caption("It is not there any more, or lies outside of the folders that the explorer may see.")
        return
    download.file_link(f"Download {markdown_text(path.name)}", *offered)
