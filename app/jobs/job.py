"""One piece of long work as the pages see it: what was asked, how far it is, what came of it."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inshrink_app.jobs.files import NOWHERE, RESULT, JobFolder, JobRecord

from inshrink_core.request import Request

_log = logging.getLogger(__name__)

_LINES_SHOWN = 200

Load = Callable[["Job"], Any]
"""Returns what a page shows of a job's reports; raises OSError, or what malformed ones raise."""


def load_last(job: Job) -> Any:
    """Return the report of a job's last request."""
    return job.reports()[-1]


@dataclass(eq=False)
class Job(JobRecord):
    """One piece of work.

    Parameters
    ----------
    work, job_id
        What it does, and its name in links.
    state
        ``queued``, ``running``, ``finished``, ``failed``, ``cancelled`` or ``interrupted``.
    done, total, item
        Progress in whatever the verb counts, and what it is at now. Untrusted text.
    started_at, ended_at
        Unix time, of the last attempt.
    problem
        What went wrong, when failed.
    process
        Its process; None if it waits, or an explorer that has ended started it.
    place
        Which of its requests is performed.
    rows, documents
        Parts of the results so far, and the reports of the requests that have ended.
    result
        What `load` made of the reports, when finished and asked for.
    folder
        Where it is stored.
    attempt
        How often it was begun.
    """

    process: subprocess.Popen[str] | None = None
    place: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    result: Any = None
    folder: JobFolder = field(default_factory=lambda: JobFolder(NOWHERE))
    attempt: int = 0

    @property
    def requests(self) -> tuple[Request[Any], ...]:
        """What it performs, one after the other; raises InputError for one of another version."""
        return self.work.requests

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
        """Whether it archives a growing run until it is ended."""
        return any(one["fields"].get("watch") for one in self.work.documents)

    @property
    def is_running(self) -> bool:
        """Whether it runs or waits, here or in another explorer."""
        return self.state in ("queued", "running")

    @property
    def is_elsewhere(self) -> bool:
        """Whether another explorer runs it."""
        return self.is_running and not self.folder.is_ours

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1: the requests count alike."""
        if self.state == "finished":
            return 1.0
        part = min(1.0, max(0.0, self.done / self.total)) if self.total else 0.0
        return min(1.0, (self.place + part) / max(1, len(self.work.documents)))

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return max(0.0, (self.ended_at or time.time()) - self.started_at)

    def begin(self) -> None:
        """Forget the progress of an earlier attempt; its rows stay."""
        self.process, self.place, self.done, self.total, self.item = None, 0, 0, 0, ""
        self.started_at, self.ended_at, self.result, self.problem = time.time(), None, None, None
        self.attempt += 1
        self.rows, self.documents = self.told(), []

    def told(self) -> list[dict[str, Any]]:
        """Return the parts of the results so far, of earlier attempts too."""
        self.rows = self.rows or self.folder.rows()
        return list(self.rows)

    def reports(self) -> list[Any]:
        """Return the reports of the requests that have ended; raises OSError or ValueError."""
        return list(self.documents or json.loads((self.folder.path / RESULT).read_bytes()))

    def load(self, load: Load) -> bool:
        """Read the result; False if it cannot be read."""
        try:
            self.result = load(self)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log.info("a result cannot be read: %s", error)
            return False
        return True

    def log(self, text: str) -> None:
        """Add a line to its log."""
        self.folder.log(text)

    def log_text(self) -> str:
        """Return the end of its log. Untrusted text."""
        return self.folder.read_log(_LINES_SHOWN)

    def store(self) -> None:
        """Write its record."""
        self.folder.write(self)

    def refresh(self) -> None:
        """See how far another explorer has come."""
        if not self.is_elsewhere:
            return
        record = self.folder.read()
        self.__dict__.update({} if record is None else vars(record))
        self.rows = self.folder.rows()
        if self.is_running and not self.folder.is_worked_on():
            self.state = "interrupted"


def revive(folder: JobFolder) -> Job | None:
    """Return a job that an explorer left, or that another one runs; None if nothing can be read."""
    record = folder.read()
    if record is None:
        return None
    job = Job(**vars(record), folder=folder)
    job.refresh()
    return job
