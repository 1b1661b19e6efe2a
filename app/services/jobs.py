"""Jobs: starting them, their visibility, and their results."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from inshrink_app.jobs.job import Job, Load, jobs_folder, load_last
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.jobs.work import Work, subject_of, subjects_of
from inshrink_app.model import METRICS, ServiceError
from inshrink_app.server.roots import Address, path_of, real_path, settings
from inshrink_app.services.inside import is_inside

from inshrink_core.errors import InputError
from inshrink_core.execution.process import minimal_environment, start_python, user_environment

LOADERS: dict[str, Load] = {}
"""Functions that read the result of a page's jobs, for pages whose result is not the last report."""


@st.cache_resource(show_spinner=False)
def registry() -> JobRegistry:
    """Return the registry that all sessions share; without a state directory it ends with the explorer."""
    folder: Path | None = jobs_folder()
    try:
        jobs_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        folder = None
    return JobRegistry(start_process, folder, load=_load)


def start_process(job: Job) -> subprocess.Popen[str]:
    """Start the process of a job, in an empty folder.

    The process gets the user's environment only if it runs code that the user trusts, identified by SHA-256;
    it refuses other code. It gets credentials of stores only if the job names an allowed address.
    """
    trusted = [job.work.trusted] if job.work.trusted else []
    named = map(path_of, job.work.texts)
    is_elsewhere = any(isinstance(path, Address) and settings().allows(path) for path in named)
    return start_python(
        ["-m", "inshrink_app.jobs.child", str(job.folder), *trusted],
        errors=subprocess.PIPE,
        environment=user_environment() if trusted else minimal_environment(stores=is_elsewhere),
    )


def scratch_path(name: str) -> str:
    """Return a path for an intermediate file of one job."""
    return str(registry().folder / "scratch" / f"{secrets.token_hex(8)}-{name}")


def _load(job: Job) -> Any:
    return LOADERS.get(job.work.page, load_last)(job)


class JobText(NamedTuple):
    """Description of a job: action, target, and the place that shows its result."""

    title: str
    about: str
    page: str
    query: dict[str, str]


def start_job(work: Work, *, again: bool = True) -> Job:
    """Start a job; with `again`, even if an answer exists."""
    return registry().start(work, again=again)


def job_of(work: Work) -> Job | None:
    """Return the newest job that answers a question; None without one."""
    return registry().get(work)


def newest_job(page: str, topic: str, shown: Path, state: str = "") -> Job | None:
    """Return the newest job of a page and topic about a subject; None without one.

    With `state`, only jobs in that state count.
    """
    job = registry().newest(page, topic, str(shown), state)
    return None if job is None or (job.state == "finished" and read_result(job) is None) else job


def all_jobs() -> tuple[Job, ...]:
    """Return the jobs that this explorer may show, newest first."""
    return tuple(job for job in registry().jobs() if _is_visible(job))


def find_job(job_id: str) -> Job | None:
    """Return a job by its untrusted id; None if it does not exist or may not be shown."""
    job = registry().find(job_id)
    return job if job is not None and _is_visible(job) else None


def linked_job(job_id: str, page: str, path: Path) -> Job | None:
    """Return the job named by a link if it belongs to this page and subject; else None."""
    job = find_job(job_id) if job_id else None
    return None if job is None or (job.work.page, job.shown) != (page, str(path)) else job


def stop_job(job: Job) -> None:
    """Cancel a running job."""
    registry().stop(job)


def forget_job(job: Job) -> None:
    """Delete an ended job with its log and stored result. Finished files stay.

    Unfinished files of the job are deleted too, since no other code knows of them.
    """
    if _is_visible(job):
        registry().remove(job.job_id)


def resume_job(job: Job) -> Job:
    """Resume an unfinished job and return it; finished work is not repeated.

    Raises
    ------
    ServiceError
        Its files are outside the roots of this explorer.
    """
    if not _is_visible(job):
        raise ServiceError("this job is about files that the explorer may not see")
    registry().resume(job.job_id)
    return job


def read_result(job: Job) -> Any:
    """Return the result of a finished job; None if it cannot be read any more."""
    if job.result is None and job.state == "finished":
        job.load(_load)
    return job.result


def documents_of(job: Job) -> list[Any]:
    """Return the reports of finished requests; empty if they cannot be read."""
    try:
        return job.reports()
    except (OSError, ValueError, TypeError):
        return []


def _is_visible(job: Job) -> bool:
    """Return whether a job is readable and its files are inside the roots, a sample's or the explorer's."""
    paths = [
        text
        for text in job.work.texts
        if text.startswith(("/", "\\")) or "\0" in text or isinstance(path_of(text), Address)
    ]
    try:
        return all(map(_is_allowed, paths)) and bool(job.requests)
    except InputError:
        return False


def _is_allowed(path: str) -> bool:
    """Return whether a path may be shown; it need not exist any more."""
    if "\0" in path:
        return False
    file, _, function = path.rpartition(":")
    real = real_path(file if function.isidentifier() and file.endswith(".py") else path)
    places = (jobs_folder().parent, registry().folder)
    return is_inside(real) or any(real.is_relative_to(os.path.realpath(place)) for place in places)


_PANELS = {"errors": "tensors", "plan": "prune"}
"""The panel of Archives that shows a topic, if its name differs."""


def describe(job: Job) -> JobText:
    """Return a description of a job. Every part comes from a file and is untrusted."""
    about, page, topic = subject_of(job.requests[0]), job.work.page, job.work.topic
    query = {"run": job.shown or subject_of(job.requests[-1]), "job": job.job_id}
    if page == "sensitivity":
        page, query["metric"] = "run", topic
    elif page == "archives":
        query["panel"] = _PANELS.get(topic, topic)
    return JobText(_title(job), about, page, query)


def _title(job: Job) -> str:
    """Return a title. Names come from files and are untrusted."""
    first, last, topic = job.requests[0], job.requests[-1], job.work.topic
    name, target = Path(subject_of(first)).name, Path(_target_of(last)).name
    against = Path(getattr(last, "against", None) or "").name
    if topic == "shrink":
        return f"Shrink {name} to {Path(_target_of(first)).name}"
    if topic == "compare":
        compared = (Path(path).name for request in job.requests for path in subjects_of(request))
        return f"Compare {', '.join(compared)} with {against}"
    if job.work.page == "sensitivity":
        metric = METRICS[topic].word if topic in METRICS else topic
        return f"Measure {metric} of {name}"
    grows = f"Archive {name} as it grows, to {target}"
    return {
        "baselines": f"Measure baselines of {name}",
        "errors": f"Errors of {name} against {against}",
        "estimates": f"Estimate {getattr(last, 'codec', '')} on {name}",
        "evaluator": f"Try the evaluator on {name}",
        "goals": f"Estimate sizes of {name}",
        "pack": f"Pack {name} to {target}",
        "plan": f"Plan the pruning of {name}",
        "prune": f"Prune {name}",
        "restore": f"Restore step {(getattr(last, 'steps', None) or ('',))[0]} of {name}",
        "search": f"Search {getattr(last, 'codec', '')} on {name}",
        "write": grows if job.is_watching else f"Write {name} to {target}",
        "verify": f"Verify {name}" + (", every tensor decoded" if getattr(last, "deep", False) else ""),
    }.get(topic, last.verb())


def _target_of(request: Any) -> str:
    """Return the path that a request writes to; empty if it writes nothing."""
    names = ("output", "pack", "archive") if request.verb() != "compress" else ("archive",)
    return os.fspath(next((target for name in names if (target := getattr(request, name, None))), ""))
