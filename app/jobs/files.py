"""The folder of a job: its record, its requests, its log, its result, and a lock.

The explorer that runs a job holds the lock. After a crash or a restart, a record that says ``running`` or
``queued`` without a lock belongs to a job that was interrupted.
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
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from inshrink_app.jobs.work import Work
from inshrink_app.model import Problem
from inshrink_app.server.recent import LAST_TIME, recent_file

from inshrink_core.errors import StorageError
from inshrink_core.execution.results import write_whole

NOWHERE: Final = Path(os.devnull)
REQUESTS: Final = "request-*.json"
RESULT: Final = "result"

_RECORD, _LOG, _LOCK, _ROWS = "job.json", "log.txt", "lock", "rows.jsonl"
_NO_LOCK = -1
"""Stands for a descriptor on systems without locks."""

_MAX_RECORD_BYTES, _MAX_LOG_BYTES, _MAX_ROWS = 1_000_000, 200_000, 20_000
_ID = re.compile(r"[0-9a-f]{16}")

Time = Annotated[float, msgspec.Meta(ge=0, le=LAST_TIME)]


@dataclass(eq=False)
class JobRecord:
    """What is stored of a job: what it was asked, how far it came, and how it ended (Unix times)."""

    work: Work
    state: Literal["queued", "running", "finished", "failed", "cancelled", "interrupted"] = "running"
    done: int = 0
    total: int = 0
    item: str = ""
    started_at: Time = field(default_factory=time.time)
    ended_at: Time | None = None
    problem: Problem | None = None
    job_id: str = ""


def jobs_folder() -> Path:
    """Return where jobs are stored: beside the list of recent runs."""
    return recent_file().with_name("jobs")


def job_folders(base: Path) -> Iterator[JobFolder]:
    """Yield the jobs below a folder; anything else in it is skipped."""
    with contextlib.suppress(OSError):
        yield from (JobFolder(path) for path in sorted(base.iterdir()) if _ID.fullmatch(path.name))


class JobFolder:
    """The folder of one job.

    Parameters
    ----------
    path
        Its name is the job's id: 16 hexadecimal digits. `NOWHERE` stores nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = _NO_LOCK if path == NOWHERE else None
        self._releasing = threading.Lock()

    def make(self, work: Work) -> None:
        """Create the folder, for this user alone, with a file for each request."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place, document in enumerate(work.documents):
            (self.path / REQUESTS.replace("*", f"{place:03}")).write_text(json.dumps(document))
        for path in work.scratch:
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def write(self, job: JobRecord) -> None:
        """Replace the record; a full disk is ignored."""
        record = {one.name: getattr(job, one.name) for one in fields(JobRecord)}
        record["work"] = replace(job.work, documents=())
        if self.path.is_dir():  # Otherwise it was removed while its process ended.
            with contextlib.suppress(StorageError, ValueError):
                write_whole(self.path / _RECORD, msgspec.json.encode(record))

    def read(self) -> JobRecord | None:
        """Return the record; None if there is none, or `write` cannot have written it."""
        try:
            with (self.path / _RECORD).open("rb") as file:
                record = msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=JobRecord)
            found = [json.loads(path.read_bytes()) for path in sorted(self.path.glob(REQUESTS))]
            if record.job_id != self.path.name or not found or not all(map(_is_request, found)):
                return None
            record.work = replace(record.work, documents=tuple(found))
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        return record

    def log(self, text: str) -> None:
        """Add a line to the log, with the time of day."""
        with contextlib.suppress(OSError, UnicodeError):
            path = self.path / _LOG
            if not path.exists() or path.stat().st_size < _MAX_LOG_BYTES:
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%H:%M:%S')}  {' '.join(text.split())}\n")

    def read_log(self, lines: int) -> str:
        """Return the last lines of the log. Untrusted text."""
        try:
            with (self.path / _LOG).open("rb") as file:
                content = file.read(2 * _MAX_LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(content.splitlines()[-lines:])

    def add_row(self, row: dict[str, Any]) -> None:
        """Store a part of the result."""
        with contextlib.suppress(OSError), (self.path / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return the parts of the result that were stored, without one that a crash cut off."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError), (self.path / _ROWS).open(encoding="utf-8") as file:
            for line in islice(file, _MAX_ROWS):
                with contextlib.suppress(ValueError, TypeError):
                    found.append(dict(json.loads(line)))
        return found

    def take_lock(self) -> bool:
        """Take the lock; False if another process holds it."""
        if self._lock is None:
            self._lock = _try_lock(self.path / _LOCK)
        return self._lock is not None

    def release_lock(self) -> None:
        """Give the lock back."""
        with self._releasing:  # A second close could close what another thread has opened since.
            if self._lock is not None and self._lock >= 0:
                os.close(self._lock)
            self._lock = None

    @property
    def is_ours(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def is_worked_on(self) -> bool:
        """Return whether any process holds the lock."""
        if self._lock is not None:
            return True
        lock = _try_lock(self.path / _LOCK)
        if lock is not None and lock >= 0:
            os.close(lock)
        return lock is None

    def remove(self) -> None:
        """Delete the folder."""
        self.release_lock()
        shutil.rmtree(self.path, ignore_errors=True)


def _is_request(document: dict[str, Any]) -> bool:
    verb, values = (document.get(name) for name in ("verb", "fields"))
    return isinstance(verb, str) and isinstance(values, dict)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if it is held, -1 on systems without locks."""
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
