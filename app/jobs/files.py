"""A job on disk: its record, its log, and the lock that tells whether somebody still works on it.

A job is a folder below the user's state directory. The lock is held by the explorer that runs the job, so
that after a crash or a restart a record that says ``running`` or ``queued`` without a lock means:
interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs.work import Work
from inshrink_app.model import Problem
from inshrink_app.server.recent import is_time, read_json, recent_file

from inshrink_core.errors import StorageError
from inshrink_core.execution.kept import write_whole
from inshrink_core.request import Request

NOWHERE = Path(os.devnull)
_NO_LOCK = -1
"""In the place of a descriptor where nothing can be locked."""

JOB_STATES = ("queued", "running", "finished", "failed", "cancelled", "interrupted")

_RECORD_NAME = "job.json"
_LOG_NAME = "log.txt"
_LOCK_NAME = "lock"
_ROWS_NAME = "rows.jsonl"
_REQUEST_NAME = "request.json"
_MAX_RECORD_BYTES = 1_000_000
"""A larger record was not written by us."""

_MAX_LOG_BYTES = 200_000
"""More log than anyone reads in a page; what comes later is not kept."""

_MAX_ROWS = 20_000
"""Parts of a result that a page shows while it comes; what comes later is in the result alone."""

_ID = re.compile(r"[0-9a-f]{16}")


class JobRecord(NamedTuple):
    """What is kept of a job: what it was asked, how far it came and how it ended (Unix times)."""

    job_id: str
    work: Work
    state: str
    done: int
    total: int
    item: str
    started_at: float
    ended_at: float | None
    problem: Problem | None


def jobs_folder() -> Path:
    """Return where jobs are kept: beside the list of recent runs."""
    return recent_file().with_name("jobs")


def job_folders(base: Path) -> Iterator[JobFolder]:
    """Yield the jobs below a folder; anything else in it is passed over."""
    with contextlib.suppress(OSError):
        for path in sorted(base.iterdir()):
            if _ID.fullmatch(path.name):
                yield JobFolder(path)


class JobFolder:
    """The folder of one job.

    Parameters
    ----------
    path
        Its name is the job's id: 16 hexadecimal digits. `NOWHERE` keeps nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = _NO_LOCK if path == NOWHERE else None
        self._releasing = threading.Lock()

    @property
    def output(self) -> Path:
        """The reports of its requests, once all have ended: one JSON list."""
        return self.path / "result"

    def make(self) -> None:
        """Create the folder, for this user alone: a request may name private paths."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, record: JobRecord) -> None:
        """Replace the record at once; a disk that refuses costs the memory of the job, not the job."""
        fields = record._asdict() | {
            "work": record.work.to_json(),
            "problem": record.problem and list(record.problem),
        }
        if not self.path.is_dir():  # It was removed while its process ended.
            return
        with contextlib.suppress(StorageError, ValueError):
            write_whole(self.path / _RECORD_NAME, json.dumps(fields))

    def read(self) -> JobRecord | None:
        """Return the record; None where there is none that `write` could have written."""
        try:
            return _parse(read_json(self.path / _RECORD_NAME, _MAX_RECORD_BYTES), self.path.name)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def ask(self, request: Request[Any]) -> Path:
        """Write the request that is worked on next, for the process that performs it."""
        path = self.path / _REQUEST_NAME
        path.write_bytes(json.dumps(request.to_json()).encode())
        return path

    def log(self, text: str) -> None:
        """Add a line to the log, with the time of day."""
        with contextlib.suppress(OSError, UnicodeError):
            path = self.path / _LOG_NAME
            if not path.exists() or path.stat().st_size < _MAX_LOG_BYTES:
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%H:%M:%S')}  {' '.join(text.split())}\n")

    def read_log(self, lines: int) -> str:
        """Return the last lines of the log."""
        try:
            with (self.path / _LOG_NAME).open("rb") as file:
                content = file.read(2 * _MAX_LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(content.splitlines()[-lines:])

    def add_row(self, row: dict[str, Any]) -> None:
        """Keep a part of the result that is known already."""
        with contextlib.suppress(OSError), (self.path / _ROWS_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return the parts of the result that were kept; what a crash left of the last one is dropped."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError), (self.path / _ROWS_NAME).open(encoding="utf-8") as file:
            for line in islice(file, _MAX_ROWS):
                with contextlib.suppress(ValueError, TypeError):
                    found.append(dict(json.loads(line)))
        return found

    def take_lock(self) -> bool:
        """Say that this process works on the job; False where another one does."""
        if self._lock is None:
            self._lock = _try_lock(self.path / _LOCK_NAME)
        return self._lock is not None

    def release_lock(self) -> None:
        """Say that nobody works on it any more."""
        with self._releasing:  # A second close could close what another thread has opened meanwhile.
            if self._lock is not None and self._lock >= 0:
                os.close(self._lock)
            self._lock = None

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def is_worked_on(self) -> bool:
        """Return whether some process, this one included, holds the lock."""
        if self._lock is not None:
            return True
        lock = _try_lock(self.path / _LOCK_NAME)
        if lock is not None and lock >= 0:
            os.close(lock)
        return lock is None

    def remove(self) -> None:
        """Delete everything kept of the job."""
        self.release_lock()
        shutil.rmtree(self.path, ignore_errors=True)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, None where it is held; -1 where locks do not exist."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return _NO_LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return _NO_LOCK
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _parse(fields: Any, job_id: str) -> JobRecord:
    """Accept only what `JobFolder.write` writes; raises ValueError, TypeError or KeyError."""
    if fields["job_id"] != job_id or fields["state"] not in JOB_STATES:
        raise ValueError("this is another job's record")
    ended_at, problem = fields["ended_at"], fields["problem"]
    return JobRecord(
        job_id=job_id,
        work=Work.from_json(fields["work"]),
        state=str(fields["state"]),
        done=int(fields["done"]),
        total=int(fields["total"]),
        item=str(fields["item"]),
        started_at=_time(fields["started_at"]),
        ended_at=None if ended_at is None else _time(ended_at),
        problem=None if problem is None else Problem(*(str(part) for part in problem)),
    )


def _time(value: Any) -> float:
    """Accept a time that a calendar can show."""
    if not is_time(value):
        raise ValueError("this is no time")
    return float(value)
