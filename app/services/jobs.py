"""Everything long that runs or ran: how it is started, what may be seen of it, and what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs.commands import option, page_of, title_of
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.job import Job, Load, load_kept, load_last
from inshrink_app.server.roots import settings
from inshrink_app.services import running
from inshrink_app.services.measuring import sensitivity_loader
from inshrink_app.services.opening import samples
from inshrink_app.widgets.tables import Problem, ServiceError

__all__ = [
    "JobText",
    "all_jobs",
    "describe",
    "documents_of",
    "find_job",
    "forget_job",
    "job_of",
    "linked_job",
    "newest_job",
    "place_in_queue",
    "read_result",
    "resume_job",
    "start_job",
    "stop_job",
]


class JobText(NamedTuple):
    """What a job is in words: what is done, to what, and where its result is shown."""

    title: str
    about: str
    page: str
    query: dict[str, str]


def start_job(
    key: Sequence[str],
    commands: Sequence[Sequence[str]],
    shown: Path,
    *,
    trusted: Mapping[str, str] | None = None,
    scratch: Sequence[Path] = (),
    load: Load = load_last,
    again: bool = True,
) -> Job:
    """Start a job.

    Parameters
    ----------
    key
        The question that it answers.
    commands
        The words after `inshrink`, of each of its commands.
    shown
        What the page is about, to come back to.
    trusted
        The ``file`` of an evaluator and the ``digest`` under which its reader has trusted it.
    scratch
        What the commands make for each other; it goes at the end.
    load
        Reads the result.
    again
        Work on it once more, although there is an answer.
    """
    request = {
        "commands": [list(words) for words in commands],
        "shown": str(shown),
        "trusted": dict(trusted) if trusted else None,
        "scratch": [str(path) for path in scratch],
    }
    return running.jobs().start(tuple(key), request, load, again=again)


def job_of(key: Sequence[str]) -> Job | None:
    """Return the newest job that answers a question, if there is one."""
    return running.jobs().get(tuple(key))


def newest_job(key: Sequence[str], state: str) -> Job | None:
    """Return the newest job of a question that is in a state, whatever came after it."""
    job = running.jobs().newest(tuple(key), state)
    return job if job is not None and read_result(job) is not None else None


def all_jobs() -> tuple[Job, ...]:
    """Return the jobs that this explorer may show, the newest first."""
    return tuple(job for job in running.jobs().jobs() if _is_visible(job.request))


def find_job(job_id: str) -> Job | None:
    """Return a job by its id, which is untrusted; None where there is none to show."""
    job = running.jobs().find(job_id)
    return job if job is not None and _is_visible(job.request) else None


def linked_job(job_id: str, page: str, path: Path) -> Job | None:
    """Return the job of a link where it belongs to this page and to what is on screen; None otherwise."""
    job = find_job(job_id) if job_id else None
    if job is None or not job.commands or page_of(job.commands) != page or job.shown != str(path):
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

    What it had written of a file that it did not finish goes too: nothing else would find it.
    """
    if _is_visible(job.request):
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


def _loader(job: Job) -> Load:
    """Return what reads the result of a job."""
    return sensitivity_loader if page_of(job.commands) == "sensitivity" else load_last


def read_result(job: Job) -> Any:
    """Return the result of a finished job; None where it cannot be read any more."""
    if job.result is None and job.state == "finished":
        load_kept(job, _loader(job))
    return job.result


def documents_of(job: Job) -> list[Any]:
    """Return the documents of the commands that have ended; nothing where they cannot be read."""
    if job.documents or job.folder is None:
        return list(job.documents)
    try:
        return list(json.loads(job.folder.output.read_bytes()))
    except (OSError, ValueError, TypeError):
        return []


def _is_visible(request: Mapping[str, Any]) -> bool:
    """Return whether every file that a request names lies inside of the roots, or is a sample's or ours."""
    words = [word for command in request.get("commands", ()) for word in command[1:]]
    paths = [*words, str(request.get("shown", "")), *request.get("scratch", ())]
    return all(_is_allowed(path) for path in paths if path.startswith(("/", "\\")) or "\0" in path)


def _is_allowed(path: str) -> bool:
    """Return whether a path may be seen; it need not exist any more."""
    if "\0" in path:
        return False
    file, _, function = path.rpartition(":")
    real = Path(os.path.realpath(file if function.isidentifier() and file.endswith(".py") else path))
    if settings().allows(real) or real.is_relative_to(os.path.realpath(jobs_folder().parent)):
        return True
    try:
        return any(real.is_relative_to(sample.path) for sample in samples())
    except ServiceError:
        return False


def describe(job: Job) -> JobText:
    """Say what a job is about. Every part comes from a file and is untrusted."""
    words = job.commands[-1]
    page, query = page_of(job.commands), {"run": job.shown or words[1]}
    if page == "sensitivity":
        query["metric"] = option(words, "--metric") or "gain"
    elif words[0] in ("compare", "compress", "export", "prune", "report", "search", "verify"):
        query["job"] = job.job_id
    return JobText(title_of(job.commands), job.commands[0][1], page, query)
