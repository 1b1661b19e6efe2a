"""One piece of long work as the pages see it: what was asked, how far it is, what came of it."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inshrink_app.jobs.files import JobFolder, JobRecord
from inshrink_app.widgets.tables import Problem

__all__ = ["Job", "Load", "load_kept", "refresh_job", "revive"]

_log = logging.getLogger(__name__)

Load = Callable[[Path], Any]
"""Turns a worker's output into what a page shows."""


@dataclass(eq=False)
class Job:
    """One piece of work.

    Parameters
    ----------
    process
        The worker; None where the job waits, or was started by an explorer that has ended.
    state
        ``queued``, ``running``, ``finished``, ``failed``, ``cancelled`` or ``interrupted``.
    done, total
        Progress, in whatever the worker counts.
    item
        What it is at now. Untrusted text.
    rows
        What the worker has found so far, in plain JSON values.
    started_at, ended_at
        Unix time, of the last attempt.
    result
        What `load` made of the worker's output, when finished and asked for.
    problem
        What went wrong, when failed.
    job_id, key, request
        Its name in links, the question it answers as text, and the worker's request.
    folder
        What is kept of it on disk.
    """

    process: subprocess.Popen[str] | None = None
    state: str = "running"
    done: int = 0
    total: int = 0
    item: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    result: Any = None
    problem: Problem | None = None
    job_id: str = ""
    key: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    folder: JobFolder | None = None

    @property
    def task(self) -> str:
        """What kind of work it is: a key of `inshrink_app.actions.ACTIONS`."""
        return str(self.request.get("task", ""))

    @property
    def is_running(self) -> bool:
        """Whether it is being worked on or waits for that, here or in another explorer."""
        return self.state in ("queued", "running")

    @property
    def is_elsewhere(self) -> bool:
        """Whether another explorer works on it."""
        return self.is_running and self.folder is not None and not self.folder.is_ours

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1."""
        return min(1.0, max(0.0, self.done / self.total)) if self.total else 0.0

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return max(0.0, (self.ended_at or time.time()) - self.started_at)

    @property
    def seconds_left(self) -> float | None:
        """How long it may still take; None while that is anyone's guess."""
        return None if self.fraction < 0.02 else self.seconds * (1 - self.fraction) / self.fraction

    def log_text(self, lines: int = 200) -> str:
        """Return the last lines of what it told. Untrusted text."""
        return self.folder.read_log(lines) if self.folder is not None else ""

    def record(self) -> JobRecord:
        """Return what is to be kept."""
        return JobRecord(
            self.job_id,
            self.key,
            dict(self.request),
            self.state,
            self.done,
            self.total,
            self.item,
            self.started_at,
            self.ended_at,
            self.problem,
        )


def revive(folder: JobFolder) -> Job | None:
    """Return a job that an explorer left, or that another one works on; None where nothing is readable."""
    record = folder.read()
    if record is None:
        return None
    job = Job(job_id=record.job_id, key=record.key, request=record.request, folder=folder)
    _copy(record, job)
    if job.is_running and not folder.is_worked_on():
        job.state = "interrupted"
    return job


def _copy(record: JobRecord, job: Job) -> None:
    """Take over what a record says of the state of a job."""
    job.done, job.total, job.item = record.done, record.total, record.item
    job.started_at, job.ended_at, job.problem = record.started_at, record.ended_at, record.problem
    job.state = record.state


def refresh_job(job: Job) -> None:
    """See how far another explorer has come."""
    if not job.is_elsewhere or job.folder is None:
        return
    record = job.folder.read()
    if record is not None:
        _copy(record, job)
    if job.is_running and not job.folder.is_worked_on():
        job.state = "interrupted"


def load_kept(job: Job, load: Load) -> bool:
    """Read the result that an earlier explorer left; False where it cannot be read."""
    if job.folder is None:
        return False
    try:
        job.result = load(job.folder.output)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.info("a kept result cannot be read: %s", error)
        return False
    return True
