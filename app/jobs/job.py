"""One piece of long work as the pages see it: what was asked, how far it is, what came of it."""

from __future__ import annotations

import bisect
import json
import logging
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inshrink_app.jobs.files import NOWHERE, JobFolder, JobRecord
from inshrink_app.jobs.work import Work
from inshrink_app.model import Problem

from inshrink_core.request import Request

_log = logging.getLogger(__name__)

_SURE, _SURE_SECONDS = 0.02, 5.0
"""The share, or the time, that has to be seen before the remaining time is more than anyone's guess."""

_SETTLED, _MOST_MARKS = 5, 400
"""With so many marks the first of them, which compiles and loads, does not count; so many are kept."""

_LINES_SHOWN = 200
_SECONDS_TO_START = 1.0
"""What it takes until a command that follows another one has begun."""

Load = Callable[["Job"], Any]
"""Returns what a page shows of a job's reports; raises OSError, or what malformed ones raise."""


def load_last(job: Job) -> Any:
    """Return the report of a job's last request."""
    return job.reports()[-1]


@dataclass(eq=False)
class Job:
    """One piece of work.

    Parameters
    ----------
    process
        What performs a request; None where the job waits, or was started by an explorer that has ended.
    state
        ``queued``, ``running``, ``finished``, ``failed``, ``cancelled`` or ``interrupted``.
    done, total
        Progress, in whatever the verb counts.
    item
        What it is at now. Untrusted text.
    rows, documents
        What was told of the results so far, and the reports of the requests that have ended.
    started_at, ended_at
        Unix time, of the last attempt.
    result
        What `load` made of the reports, when finished and asked for.
    problem
        What went wrong, when failed.
    job_id, work
        Its name in links, and what it does.
    folder
        What is kept of it on disk.
    attempt
        How often it was begun.
    n_later
        Requests that follow the one it is at.
    """

    work: Work
    process: subprocess.Popen[str] | None = None
    state: str = "running"
    done: int = 0
    total: int = 0
    item: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    result: Any = None
    problem: Problem | None = None
    job_id: str = ""
    folder: JobFolder = field(default_factory=lambda: JobFolder(NOWHERE))
    attempt: int = 0
    n_later: int = 0
    _marks: list[tuple[float, int]] = field(default_factory=list)

    @cached_property
    def requests(self) -> tuple[Request[Any], ...]:
        """What it performs, one after the other.

        Raises
        ------
        InputError
            It was left by another version, and this one does not know such requests.
        """
        return self.work.requests(self.folder.path)

    @property
    def verb(self) -> str:
        """The verb of its last request."""
        return str(self.work.documents[-1]["verb"])

    @property
    def shown(self) -> str:
        """The path that the asking page is about."""
        return self.work.shown

    @property
    def is_watching(self) -> bool:
        """Whether it stays beside a training until it is ended."""
        return any(one["fields"].get("watch") for one in self.work.documents)

    @property
    def is_running(self) -> bool:
        """Whether it is being worked on or waits for that, here or in another explorer."""
        return self.state in ("queued", "running")

    @property
    def is_elsewhere(self) -> bool:
        """Whether another explorer works on it."""
        return self.is_running and not self.folder.is_ours

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
        """How long it may still take; None while that is anyone's guess.

        What it took to begin does not count: a search starts an evaluator before its first trial. Of what
        was seen the second half counts, in time and in parts, so that a slow start is forgotten, and what is
        at work now is as long as the others, or as long as it has taken.
        """
        starts = _SECONDS_TO_START * self.n_later
        if not self._marks:
            if self.fraction < _SURE:
                return None
            return starts + self.seconds * (1 - self.fraction) / self.fraction
        marks = self._marks[len(self._marks) >= _SETTLED :]
        last, done = marks[-1]
        place = bisect.bisect(marks, ((marks[0][0] + last) / 2, self.total)) - 1
        place = min(place, len(marks) // 2)
        (begun, before), n_parts = marks[place], len(marks) - 1 - place
        is_sure = done - before >= _SURE * self.total or last - self._marks[0][0] >= _SURE_SECONDS
        if not n_parts or not is_sure:
            return None
        part, now = (done - before) / n_parts, time.time()
        pace = max((last - begun) / (done - before), (now - begun) / (done - before + part))
        return starts + max(0.0, pace * (self.total - done) - min(now - last, pace * part))

    def advance(self, done: int, total: int, item: str) -> None:
        """Take note of how far it is."""
        self.done, self.total, self.item = done, total, item
        if done > (self._marks[-1][1] if self._marks else 0):
            self._marks.append((time.time(), done))
        if len(self._marks) > _MOST_MARKS:
            del self._marks[2:-1:2]

    def begin(self) -> None:
        """Forget the progress of an earlier attempt; what it told stays."""
        self.process, self.done, self.total, self.item, self._marks = None, 0, 0, "", []
        self.n_later = 0
        self.started_at, self.ended_at, self.result, self.problem = time.time(), None, None, None
        self.attempt += 1
        self.rows, self.documents = self.told(), []

    def tell(self, row: dict[str, Any]) -> None:
        """Add a part of the result, and keep it."""
        self.rows.append(row)
        self.folder.add_row(row)

    def told(self) -> list[dict[str, Any]]:
        """Return what the commands have told of their results, in earlier attempts too."""
        self.rows = self.rows or self.folder.rows()
        return list(self.rows)

    def reports(self) -> list[Any]:
        """Return the reports of the requests that have ended; raises OSError or ValueError."""
        return list(self.documents or json.loads(self.folder.output.read_bytes()))

    def log(self, text: str) -> None:
        """Add a line to what is kept of it."""
        self.folder.log(text)

    def log_text(self) -> str:
        """Return the last lines of what it told. Untrusted text."""
        return self.folder.read_log(_LINES_SHOWN)

    def record(self) -> JobRecord:
        """Return what is to be kept."""
        return JobRecord(**{name: getattr(self, name) for name in JobRecord._fields})


def revive(folder: JobFolder) -> Job | None:
    """Return a job that an explorer left, or that another one works on; None where nothing is readable."""
    record = folder.read()
    if record is None:
        return None
    job = Job(**record._asdict(), folder=folder)
    if job.is_running and not folder.is_worked_on():
        job.state = "interrupted"
    return job


def refresh_job(job: Job) -> None:
    """See how far another explorer has come."""
    if not job.is_elsewhere:
        return
    record = job.folder.read()
    for name, value in record._asdict().items() if record is not None else ():
        setattr(job, name, value)
    job.rows = job.folder.rows()
    if job.is_running and not job.folder.is_worked_on():
        job.state = "interrupted"


def load_kept(job: Job, load: Load) -> bool:
    """Read the result that an earlier explorer left; False where it cannot be read."""
    try:
        job.result = load(job)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.info("a kept result cannot be read: %s", error)
        return False
    return True
