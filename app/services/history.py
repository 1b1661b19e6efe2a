"""Everything long that runs or ran: the jobs of all pages, as far as the roots let them be seen."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.actions.export import building_path
from inshrink_app.jobs.job import Job, Load
from inshrink_app.server.roots import settings
from inshrink_app.services import running
from inshrink_app.services.measuring import sensitivity_loader
from inshrink_app.services.opening import samples
from inshrink_app.widgets.tables import METRICS, Problem, ServiceError

__all__ = [
    "JobText",
    "all_jobs",
    "describe",
    "find_job",
    "forget_job",
    "linked_job",
    "load_json",
    "place_in_queue",
    "read_result",
    "resume_job",
    "stop_job",
]

_PATHS = ("path", "run", "archive", "archives", "target")
"""Fields of a request that name files: one that lies outside of the roots hides its job."""


class JobText(NamedTuple):
    """What a job is in words: what is done, to what, and where its result is shown."""

    title: str
    about: str
    page: str
    query: dict[str, str]


def load_json(path: Path) -> Any:
    """Read the result of a task that writes one JSON document."""
    return json.loads(path.read_bytes())


def _loader(job: Job) -> Load:
    """Return what reads the result of a job."""
    if job.task == "sensitivity":
        return sensitivity_loader(str(job.request.get("metric", "")))
    return load_json


def all_jobs() -> tuple[Job, ...]:
    """Return the jobs that this explorer may show, the newest first."""
    return tuple(job for job in running.jobs().jobs() if _is_visible(job.request))


def find_job(job_id: str) -> Job | None:
    """Return a job by its id, which is untrusted; None where there is none to show."""
    job = running.jobs().find(job_id)
    return job if job is not None and _is_visible(job.request) else None


def linked_job(job_id: str, task: str, path: Path) -> Job | None:
    """Return the job of a link where it is of this task and about what is on screen; None otherwise."""
    job = find_job(job_id) if job_id else None
    if (
        job is None
        or job.task != task
        or str(path) not in (job.request.get("path"), job.request.get("shown"))
    ):
        return None
    return job


def place_in_queue(job: Job) -> int | None:
    """Return how many jobs go before a queued one, itself included; None where it does not wait here."""
    return running.jobs().place(job)


def stop_job(job: Job) -> None:
    """Cancel a running job."""
    running.jobs().stop(job)


def forget_job(job: Job) -> None:
    """Drop an ended job from the list, with its log and its kept result; files it made stay.

    What an export had written of a file that it did not finish goes too: nothing else would find it.
    """
    request = job.request
    is_packed_chain = job.task == "export" and request.get("packed") and request.get("kind") == "chain"
    if is_packed_chain and not job.is_running and _is_visible(request):
        shutil.rmtree(building_path(request), ignore_errors=True)
    running.jobs().remove(job.job_id)


def resume_job(job: Job) -> None:
    """Go on with a job that did not finish: what it had done is not done again.

    Raises
    ------
    ServiceError
        Its files lie outside of the roots of this explorer.
    """
    if not _is_visible(job.request):
        raise ServiceError(Problem("this job is about files that the explorer may not see"))
    running.jobs().resume(job.job_id, _loader(job))


def read_result(job: Job) -> Any:
    """Return the result of a finished job; None where it cannot be read any more."""
    if job.result is None and job.state == "finished" and job.folder is not None:
        try:
            job.result = _loader(job)(job.folder.output)
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return job.result


def _is_visible(request: Mapping[str, Any]) -> bool:
    """Return whether every file that a request names lies inside of the roots, or is a sample's."""
    for name in _PATHS:
        value = request.get(name)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and path and not _is_allowed(path):
                return False
    return True


def _is_allowed(path: str) -> bool:
    """Return whether a path may be seen; it need not exist any more."""
    if "\0" in path:
        return False
    real = Path(os.path.realpath(path))
    if settings().allows(real):
        return True
    try:
        return any(real.is_relative_to(sample.path) for sample in samples())
    except ServiceError:
        return False


def describe(job: Job) -> JobText:
    """Say what a job is about. Every part comes from a file and is untrusted."""
    request = job.request
    path = str(request.get("path", ""))
    name = Path(path).name
    link = {"run": path}
    if job.task == "sensitivity":
        metric = str(request.get("metric", ""))
        label = METRICS[metric].label.lower() if metric in METRICS else metric
        return JobText(f"Measure {label} of {name}", path, "sensitivity", link | {"metric": metric})
    job_link = link | {"job": job.job_id}
    if job.task == "verify":
        title = f"Verify {name}" + (", every tensor decoded" if request.get("deep") else "")
        if request.get("run"):
            title = f"Errors of {name} against {Path(str(request['run'])).name}"
            return JobText(title, path, "compare", {"run": str(request.get("shown") or path)})
        return JobText(title, path, "archive", job_link)
    if job.task == "prune":
        title = f"Prune {name}" + (", dry run" if request.get("dry_run") else "")
        return JobText(title, path, "archive", job_link)
    if job.task == "export":
        target = Path(str(request.get("target", ""))).name
        return JobText(f"Export {name} to {target}", path, "export", job_link)
    if job.task == "compare":
        names = ", ".join(Path(str(one)).name for one in request.get("archives", ()))
        return JobText(f"Compare {names} with {name}", path, "compare", link | {"job": job.job_id})
    if job.task == "search":
        title = f"Search {request.get('codec', '')} on {name}"
        if request.get("kind") == "baselines":
            title = f"Measure baselines of {name}"
            return JobText(title, path, "search", link)
        if request.get("kind") == "estimates":
            title = f"Estimate {request.get('codec', '')} on {name}"
            return JobText(title, path, "search", link)
        return JobText(title, path, "search", job_link)
    if job.task == "restore":
        title = f"Restore step {request.get('step')} of {name}"
        return JobText(title, path, "compare", {"run": str(request.get("shown") or path)})
    if job.task == "rehearse":
        training = str(request.get("training", ""))
        return JobText(f"Rehearse failures of {training}", path, "compare", link)
    return JobText(job.task, path, "jobs", job_link)
