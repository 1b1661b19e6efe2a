"""A job: its requests, progress, result and folder.

The folder holds the record, a file for each request, the log, partial results, the result, and a lock of the
explorer that runs the job. A ``running`` or ``queued`` record without a lock belongs to a job that a crash or
a restart interrupted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from inshrink_app.jobs.work import Work
from inshrink_app.model import Problem
from inshrink_app.server.recent import LAST_TIME, recent_file

from inshrink_core.errors import StorageError
from inshrink_core.execution.results import read_lines, write_atomic
from inshrink_core.request import Request

_log = logging.getLogger(__name__)

NOWHERE: Final = Path(os.devnull)
REQUESTS: Final = "request-*.json"
RESULT: Final = "result"

_RECORD, _LOG, _LOCK, _ROWS = "job.json", "log.txt", "lock", "rows.jsonl"
_NO_LOCK = -1
"""Used in place of a descriptor on systems without locks."""

_LINES_SHOWN = 200
_MAX_RECORD_BYTES, _MAX_LOG_BYTES, _MAX_ROWS_BYTES = 1_000_000, 200_000, 20_000_000
_ID = re.compile(r"[0-9a-f]{16}")

Ended = Literal["finished", "failed", "cancelled", "interrupted"]
Time = Annotated[float, msgspec.Meta(ge=0, le=LAST_TIME)]
Load = Callable[["Job"], Any]
"""Return the result of a job from its reports; raise OSError, or the errors of malformed reports."""


def load_last(job: Job) -> Any:
    """Return the report of a job's last request."""
    return job.reports()[-1]


def jobs_folder() -> Path:
    """Return the folder of all jobs, beside the list of recent runs."""
    return recent_file().with_name("jobs")


@dataclass(eq=False)
class JobRecord:
    """The stored record of a job: its work, its progress, and its end (Unix times)."""

    work: Work
    state: Literal["queued", "running"] | Ended = "running"
    done: int = 0
    total: int = 0
    item: str = ""
    started_at: Time = field(default_factory=time.time)
    ended_at: Time | None = None
    problem: Problem | None = None
    job_id: str = ""


@dataclass(eq=False)
class Job(JobRecord):
    """A job of this explorer, or of another one.

    Parameters
    ----------
    work, job_id
        Its work, and its name in links.
    state
        ``queued``, ``running``, ``finished``, ``failed``, ``cancelled`` or ``interrupted``.
    done, total, item
        Progress in units of the verb, and the current item. Untrusted text.
    started_at, ended_at
        Unix times of the last attempt.
    problem
        The error of a failed job.
    process
        Its process; None if it is queued, or if an explorer that has ended started it.
    place
        Index of the current request.
    rows, documents
        Partial results so far, and the reports of finished requests.
    result
        The value of `load` for a finished job, once it was read.
    folder
        Its folder, named by the id; `NOWHERE` stores nothing.
    attempt
        Number of attempts.
    lock
        Descriptor of the lock while this explorer holds it.
    """

    process: subprocess.Popen[str] | None = None
    place: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    result: Any = None
    folder: Path = NOWHERE
    attempt: int = 0
    lock: int | None = None

    def __post_init__(self) -> None:
        self.lock = _NO_LOCK if self.folder == NOWHERE else self.lock
        self._releasing = threading.Lock()

    @property
    def requests(self) -> tuple[Request[Any], ...]:
        """Its requests, in order; raises InputError for a request of another version."""
        return self.work.requests

    @property
    def verb(self) -> str:
        """The verb of its last request."""
        return str(self.work.documents[-1]["verb"])

    @property
    def shown(self) -> str:
        """The path that the page is about."""
        return self.work.shown

    @property
    def is_watching(self) -> bool:
        """Whether it archives a growing run until it is ended."""
        return any(document["fields"].get("watch") for document in self.work.documents)

    @property
    def is_running(self) -> bool:
        """Whether it is running or queued, here or in another explorer."""
        return self.state in ("queued", "running")

    @property
    def is_elsewhere(self) -> bool:
        """Whether another explorer runs it."""
        return self.is_running and self.lock is None

    @property
    def fraction(self) -> float:
        """The completed fraction, from 0 to 1; all requests have equal weight."""
        if self.state == "finished":
            return 1.0
        part = min(1.0, max(0.0, self.done / self.total)) if self.total else 0.0
        return min(1.0, (self.place + part) / max(1, len(self.work.documents)))

    @property
    def seconds(self) -> float:
        """The elapsed time in seconds, or the total time of an ended job."""
        return max(0.0, (self.ended_at or time.time()) - self.started_at)

    def begin(self) -> None:
        """Reset the progress of an earlier attempt; its rows stay."""
        self.process, self.place, self.done, self.total, self.item = None, 0, 0, 0, ""
        self.started_at, self.ended_at, self.result, self.problem = time.time(), None, None, None
        self.attempt += 1
        self.rows, self.documents = self.partial_rows(), []

    def end(self, state: Ended, problem: Problem | None = None, result: Any = None) -> None:
        """Store how the job ended, and show it once it is stored."""
        self.ended_at, self.problem, self.result = time.time(), problem, result
        self.store(state=state)
        self.state = state

    def partial_rows(self) -> list[dict[str, Any]]:
        """Return the partial results so far, including those of earlier attempts."""
        self.rows = self.rows or self._stored_rows()
        return list(self.rows)

    def reports(self) -> list[Any]:
        """Return the reports of finished requests; raise OSError or ValueError."""
        return list(self.documents or json.loads((self.folder / RESULT).read_bytes()))

    def load(self, load: Load) -> bool:
        """Read the result; False if it cannot be read."""
        try:
            self.result = load(self)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log.info("a result cannot be read: %s", error)
            return False
        return True

    def make_folder(self) -> None:
        """Create the folder, for this user alone, with a file for each request."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place, document in enumerate(self.work.documents):
            (self.folder / REQUESTS.replace("*", f"{place:03}")).write_text(json.dumps(document))
        for path in self.work.scratch:
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def store(self, **changes: Any) -> None:
        """Write the record, with changed fields; a full disk is ignored."""
        if self.folder.is_dir():  # Otherwise it was removed while its process ended.
            record = {stored.name: getattr(self, stored.name) for stored in fields(JobRecord)} | changes
            with contextlib.suppress(StorageError, ValueError):
                write_atomic(self.folder / _RECORD, msgspec.json.encode(record))

    def log(self, text: str) -> None:
        """Add a line to the log, with the time of day."""
        with (
            contextlib.suppress(OSError, UnicodeError),
            (self.folder / _LOG).open("a", encoding="utf-8") as file,
        ):
            if file.tell() < _MAX_LOG_BYTES:
                file.write(f"{time.strftime('%H:%M:%S')}  {' '.join(text.split())}\n")

    def log_text(self) -> str:
        """Return the end of the log. Untrusted text."""
        try:
            with (self.folder / _LOG).open("rb") as file:
                content = file.read(2 * _MAX_LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(content.splitlines()[-_LINES_SHOWN:])

    def add_row(self, row: dict[str, Any]) -> None:
        """Store a partial result."""
        self.rows.append(row)
        with contextlib.suppress(OSError), (self.folder / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _stored_rows(self) -> list[dict[str, Any]]:
        """Return the stored partial results; a crash may have truncated the last line."""
        with contextlib.suppress(OSError):
            return read_lines(self.folder / _ROWS, _MAX_ROWS_BYTES)
        return []

    def take_lock(self) -> bool:
        """Take the lock; False if another process holds it."""
        self.lock = _try_lock(self.folder / _LOCK) if self.lock is None else self.lock
        return self.lock is not None

    def release_lock(self) -> None:
        """Release the lock."""
        with self._releasing:  # A second close could close a descriptor that another thread has opened since.
            if self.lock is not None and self.lock >= 0:
                os.close(self.lock)
            self.lock = None

    def refresh(self) -> None:
        """Read the progress from another explorer; without one, mark the job as interrupted."""
        if not self.is_elsewhere:
            return
        self.__dict__.update(read_record(self.folder) or {})
        self.rows = self._stored_rows()
        if self.is_running and self.take_lock():
            self.release_lock()
            self.state = "interrupted"

    def remove_scratch(self) -> None:
        """Delete intermediate files of the requests."""
        for path in map(Path, self.work.scratch):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the job's folder."""
        self.remove_scratch()
        self.release_lock()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record in a folder; None if it is missing or malformed."""
    try:
        with (folder / _RECORD).open("rb") as file:
            record = msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=JobRecord)
    except (OSError, ValueError, RecursionError):
        return None
    return vars(record) if record.work.documents and record.job_id == folder.name else None


def stored_jobs(base: Path) -> list[Job]:
    """Return the jobs below a folder, oldest first; other entries are skipped."""
    with contextlib.suppress(OSError):
        folders = [path for path in base.iterdir() if _ID.fullmatch(path.name)]
        found = [Job(**record, folder=path) for path in folders if (record := read_record(path))]
        for job in found:
            job.refresh()
        return sorted(found, key=lambda job: job.started_at)
    return []


def _try_lock(path: Path) -> int | None:
    """Return a descriptor of the lock; None if it is taken, -1 on systems without locks."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ModuleNotFoundError, OSError):
        return _NO_LOCK
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
