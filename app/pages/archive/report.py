"""The report of an archive: one HTML file, to read anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Work
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services import LogChoice
from inshrink_app.widgets import fmt, job_card, listing
from inshrink_app.widgets.layout import answer, section

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.report import Report

_SUFFIX = ".html"


def report_request(
    chain: ChainReport, original: Subject | None, target: str, log: LogChoice | None = None
) -> Report:
    """Return the request that tells of an archive; it finds the newest comparison by itself.

    Parameters
    ----------
    chain, original, target
        The archive, the run it is of where that is known, and where the report goes.
    log
        The metrics that the reader chose; None for what the run has logged itself.
    """
    job = None if original is None else _rehearsal(original)
    kept = None if job is None else job.folder.output
    return Report(
        str(chain.path),
        output=target,
        against=None if original is None else str(original.path),
        rehearsed=str(kept) if kept is not None and kept.is_file() else None,
        **({} if log is None else log.fields),
    )


def _rehearsal(original: Subject) -> Job | None:
    """Return the newest finished rehearsal of a run."""
    jobs = (job for job in services.all_jobs() if job.verb == "rehearse" and job.shown == str(original.path))
    return next((job for job in jobs if job.state == "finished"), None)


def report_target(text: str) -> Path:
    """Return the real path that a report may be written to.

    Raises
    ------
    ServiceError
        As `services.writable` has it, or something is there already.
    """
    path = services.writable(text, "a report goes into a folder of yours", _SUFFIX)
    if os.path.lexists(path):
        raise ServiceError("there is something at this path already", str(path), "choose another name")
    return path


def show(chain: ChainReport, shown: Subject, original: Subject | None) -> Any:
    """Draw the report, or offer to write it; return the request."""
    suggestion = services.suggested_path(shown, chain.name, "report", _SUFFIX)
    log = services.chosen_log(state.log_choice(state.run_path() or ""))
    with section("Report"):
        newest = services.newest_job("archive", "report", chain.path)
        job = newest if newest is not None and newest.work.of == chain.state else None
        if job is not None and job.is_running:
            job_card.running(job, "Writing the report")
            return job.requests[-1]
        if job is not None and job_card.settled(job, "Writing the report"):
            st.code(job.result["output"], language=None, wrap_lines=True)
            listing.download(Path(job.result["output"]))
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
            target = answer(lambda: report_target(typed))
            if target is not None:
                request = report_request(chain, original, str(target), log)
                work = Work.asking([request], chain.path, "archive", "report", of=tuple(chain.state))
                services.start_job(work)
                st.rerun()
    return report_request(chain, original, typed, log)
