"""The report of an archive: one HTML file, to read anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.model.subject import Subject
from inshrink_app.pages.archive import reporting
from inshrink_app.widgets import fmt, job_card, listing
from inshrink_app.widgets.layout import answer, section

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport


def show(chain: ChainReport, shown: Subject, original: Subject | None) -> Any:
    """Draw the report, or offer to write it; return the request."""
    suggestion = reporting.suggested_report(chain, shown)
    log = services.chosen_log(state.log_choice(state.run_path() or ""))
    with section("Report"):
        job = reporting.report_job(chain)
        if job is not None and job.is_running:
            job_card.running(job, "Writing the report")
            return job.requests[-1]
        if job is not None and job_card.settled(job, "Writing the report"):
            _made(Path(job.result["output"]))
        else:
            st.write(
                "One HTML file to attach to a pull request: before and after, where an error hurts, the "
                "training's curves, the newest comparison and rehearsal, the commands and the hashes. It "
                "loads nothing from the network, and no code of the run is executed for it."
            )
        if log is not None:
            st.caption(
                fmt.markdown(
                    f"Its curves are {fmt.counted(len(log.columns), 'metric')} of {Path(log.file).name}."
                )
            )
        typed = st.text_input("Write to", value=suggestion, key=f"report.target.{suggestion}")
        if st.button("Write the report", icon=":material/description:"):
            target = answer(lambda: reporting.report_target(typed))
            if target is not None:
                reporting.start_report(chain, original, target, log)
                st.rerun()
    return reporting.report_request(chain, original, typed, log)


def _made(path: Path) -> None:
    """Draw where the report is."""
    st.code(str(path), language=None, wrap_lines=True)
    offered = services.download_url(path)
    if offered is None:
        st.caption("It is not there any more, or lies outside of the folders that the explorer may see.")
        return
    listing.file_link(f"Download {fmt.markdown(path.name)}", *offered)
