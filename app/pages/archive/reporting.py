"""Reports: one HTML file about a run and its archive, written by a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work
from inshrink_app.model.problem import Problem, ServiceError
from inshrink_app.model.subject import Subject
from inshrink_app.services.exporting import own_path, suggested_path
from inshrink_app.services.jobs import all_jobs, newest_job, start_job
from inshrink_app.services.logs import LogChoice

if TYPE_CHECKING:
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
    from inshrink_core.verbs.report import Report

    job = None if original is None else _rehearsal(original)
    kept = None if job is None or job.folder is None else job.folder.output
    return Report(
        str(chain.path),
        output=target,
        against=None if original is None else str(original.path),
        rehearsed=str(kept) if kept is not None and kept.is_file() else None,
        **({} if log is None else log.fields),
    )


def _rehearsal(original: Subject) -> Job | None:
    """Return the newest finished rehearsal of a run."""
    jobs = (job for job in all_jobs() if job.verb == "rehearse" and job.shown == str(original.path))
    return next((job for job in jobs if job.state == "finished"), None)


def suggested_report(chain: ChainReport, shown: Subject) -> str:
    """Return a name for a report that nothing has yet."""
    return suggested_path(shown, chain.name, "report", _SUFFIX)


def report_target(text: str) -> Path:
    """Return the real path that a report may be written to.

    Raises
    ------
    ServiceError
        It lies outside of the roots, has another suffix, has no folder to lie in, or is there already.
    """
    path = own_path(text, "a report goes into a folder of yours")
    if path.suffix != _SUFFIX or path.name.startswith("."):
        raise ServiceError(Problem("a report's name ends in .html", text, f"call it {path.stem}{_SUFFIX}"))
    if not path.parent.is_dir():
        raise ServiceError(Problem("its folder does not exist", str(path.parent), "choose another one"))
    if os.path.lexists(path):
        raise ServiceError(
            Problem("there is something at this path already", str(path), "choose another name")
        )
    return path


def report_job(chain: ChainReport) -> Job | None:
    """Return the newest report of an archive as it is, if one was asked for."""
    job = newest_job("archive", "report", chain.path)
    return job if job is not None and job.work.of == chain.state else None


def start_report(
    chain: ChainReport, original: Subject | None, target: Path, log: LogChoice | None = None
) -> Job:
    """Write a report."""
    request = report_request(chain, original, str(target), log)
    work = Work.asking([request], shown=chain.path, page="archive", topic="report", of=tuple(chain.state))
    return start_job(work)
