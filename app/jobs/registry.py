"""The jobs of the explorer: each is a child process, and a folder on disk from which it can resume.

A few jobs run at a time; the others are queued. A child ends by itself when the explorer ends, because its
progress pipe closes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inshrink_app.jobs.job import RESULT, Job, Load, load_last, stored_jobs
from inshrink_app.jobs.work import Work, subject_of
from inshrink_app.model import Problem

from inshrink_core.errors import InputError

_log = logging.getLogger(__name__)

StartJob = Callable[[Job], "subprocess.Popen[str]"]
"""Start the process of a job (`jobs.child`)."""

MAX_AT_WORK = min(2, os.cpu_count() or 1)
"""Number of jobs that run at a time; each uses every core, and memory."""

_MAX_JOBS, _MAX_RESULTS = 64, 12
"""Number of ended jobs that are stored, and of results in memory; a table of 400 layers by 200 steps takes 2
MB.
"""

_SECONDS_BETWEEN_RECORDS = 1.0
_SECONDS_TO_END = 1.5
"""Time for a cancelled process to clean up before it is killed; cancelling takes at most two seconds."""

_LINES_OF_DETAIL = 60
_DOINGS = {"compress": "encoding", "export": "writing", "verify": "verifying", "compare": "comparing"}

_DIED = Problem(
    "the process that worked on this ended before it was done",
    remedy="try again; if it ends again, the machine may be short of memory",
)


class JobRegistry:
    """The jobs of this explorer, shared by all sessions.

    Parameters
    ----------
    start
        Starts the process of a job.
    folder
        Folder of the jobs; by default a temporary one that is removed with the registry.
    most
        Number of jobs that run at a time; others are queued in order of request. A job that watches a growing
        run is mostly idle and does not count.
    load
        Computes the result from the reports, when a job finishes or its result is needed; called in a thread.
    """

    def __init__(
        self, start: StartJob, folder: Path | None = None, most: int = MAX_AT_WORK, load: Load = load_last
    ) -> None:
        self._start, self._most, self._load = start, most, load
        self._waiting: list[Job] = []
        self._at_work: list[Job] = []
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="inshrink-jobs-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._jobs = {job.job_id: job for job in stored_jobs(self.folder)}

    def jobs(self) -> tuple[Job, ...]:
        """Return every job, newest first."""
        with self._lock:
            found = list(self._jobs.values())
        for job in found:
            job.refresh()
        return tuple(sorted(found, key=lambda job: job.started_at, reverse=True))

    def find(self, job_id: str) -> Job | None:
        """Return a job by its id."""
        return next((job for job in self.jobs() if job.job_id == job_id), None)

    def get(self, work: Work) -> Job | None:
        """Return the newest job that answers a question, if its answer can be read."""
        job = next((job for job in self.jobs() if job.work.key == work.key), None)
        is_unread = job is not None and job.state == "finished" and job.result is None
        return None if job is None or (is_unread and not job.load(self._load)) else job

    def newest(self, page: str, topic: str, shown: str, state: str = "") -> Job | None:
        """Return the newest job of a page and topic, in a given state if any."""
        asked = (page, topic, shown)
        found = (job for job in self.jobs() if (job.work.page, job.work.topic, job.shown) == asked)
        return next((job for job in found if state in ("", job.state)), None)

    def start(self, work: Work, *, again: bool = False) -> Job:
        """Start a job, or return the job that runs or has finished and answers the same.

        Parameters
        ----------
        work
            The work to do.
        again
            Start even if an answer exists.
        """
        with self._starting:
            known = self.get(work)
            if known is not None and (known.is_running or (known.state == "finished" and not again)):
                return known
            name = secrets.token_hex(8)
            job = Job(work, job_id=name, folder=self.folder / name, state="cancelled")
            self._queue(job)
        ended = [job for job in self.jobs() if not job.is_running]
        for old in ended[_MAX_JOBS:]:
            self.remove(old.job_id)
        for old in ended[_MAX_RESULTS:]:
            if old.state == "finished" and (old.folder / RESULT).exists():
                old.result, old.rows, old.documents = None, [], []  # Read again when needed.
        return job

    def resume(self, job_id: str) -> Job | None:
        """Resume an interrupted, cancelled or failed job; return None if it does not exist."""
        job = self.find(job_id)
        if job is not None and not job.is_running:
            with self._starting:
                self._queue(job)
        return job

    def stop(self, job: Job) -> None:
        """Stop a running job; the engine never leaves incomplete files."""
        with self._lock:
            if not job.is_running or job.is_elsewhere:
                return
            job.log("cancelled")
            job.end("cancelled")
            if job.process is None:
                self._waiting.remove(job)
                job.release_lock()
                return
        job.process.terminate()
        threading.Thread(target=_end_process, args=(job.process,), daemon=True).start()

    def place(self, job: Job) -> int | None:
        """Return the position of a job in the queue, from 1; None if it is not queued here."""
        with self._lock:
            return self._waiting.index(job) + 1 if job in self._waiting else None

    def remove(self, job_id: str) -> None:
        """Remove an ended job with its folder."""
        job = self.find(job_id)
        if job is not None and not job.is_running:
            with self._lock:
                self._jobs.pop(job_id, None)
            job.remove()

    def _queue(self, job: Job) -> None:
        """Queue a job, and start the next jobs."""
        if job.process is not None:
            _end_process(job.process)
        with self._lock:
            if job.is_running:
                return
            self._jobs[job.job_id] = job
            try:
                job.make_folder()
            except OSError as error:
                job.begin()
                job.end("failed", _refused("no folder can be made for this job", job.folder, error))
                return
            if not job.take_lock():
                return
            job.begin()
            job.state = "queued"
            self._waiting.append(job)
        job.store()
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Start the oldest queued jobs while fewer than the maximum run."""
        while True:
            with self._lock:
                at_work = sum(not job.is_watching for job in self._at_work)
                if not self._waiting or at_work >= self._most:
                    return
                job = self._waiting.pop(0)
                try:
                    (job.folder / RESULT).unlink(missing_ok=True)
                    lines = ["inshrink " + " ".join(request.words()) for request in job.requests]
                    job.process = self._start(job)
                except (OSError, InputError) as error:
                    what = Problem("no process could be started for this", detail=str(error))
                    if isinstance(error, InputError):
                        what = Problem(error.what, error.where, error.remedy)
                    job.end("failed", what)
                    job.release_lock()
                    continue
                job.started_at, job.state = time.time(), "running"
                self._at_work.append(job)
            for line in lines:
                job.log(line)
            job.store()
            threading.Thread(target=self._follow, args=(job, job.process), daemon=True).start()

    def _follow(self, job: Job, process: subprocess.Popen[str]) -> None:
        """Follow the process of a job to its end; the method keeps the registry's folder alive meanwhile."""
        attempt, result, problem = job.attempt, None, None
        try:
            problem, documents = _outcome(job, _listen(job, process))
            if problem is None:
                job.documents = documents
                result = self._load(job)
                job.remove_scratch()
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log.warning("a job failed: %s", error)
            problem = _DIED._replace(detail=str(error))
        finally:
            with self._lock:
                self._at_work.remove(job)
                if job.attempt == attempt:  # Otherwise it was cancelled and started again.
                    if job.state == "running":
                        job.log("finished" if problem is None else f"failed: {problem.what}")
                        job.end("finished" if problem is None else "failed", problem, result)
                    else:
                        job.store()
                    job.release_lock()
            self._begin_waiting()


def _end_process(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a terminated process; kill it after a while."""
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _refused(what: str, path: Path, reason: object) -> Problem:
    remedy = "free some space, or set XDG_STATE_HOME to a folder on another disk, and try again"
    return Problem(f"{what}: {getattr(reason, 'strerror', None) or reason}", str(path), remedy)


def _listen(job: Job, process: subprocess.Popen[str]) -> list[str]:
    """Handle the messages of a process until it ends; return the last of its other lines."""
    lines: deque[str] = deque(maxlen=_LINES_OF_DETAIL)
    stored_at = 0.0
    with process:  # Closes its pipes and waits for its end.
        try:
            for line in process.stderr or ():
                if not _take_in(job, line):
                    lines.append(line.rstrip())
                    job.log(line)
                if time.monotonic() - stored_at > _SECONDS_BETWEEN_RECORDS:
                    stored_at = time.monotonic()
                    job.store()
        except BaseException:
            process.kill()
            raise
    return list(lines)


def _take_in(job: Job, line: str) -> bool:
    """Handle a message; return False for any other line."""
    try:
        message: dict[str, Any] = json.loads(line)
        if "request" in message:
            job.place, job.done, job.total = int(message["request"]), 0, 0
            return True
        verb, done, total = str(message["verb"]), int(message["done"]), int(message["total"])
        item = f"step {int(message['step']):,}"
    except (ValueError, TypeError, KeyError):
        return False
    doing = f"evaluation {done:,}," if message.get("unit") == "trials" else _DOINGS.get(verb, "")
    job.done, job.total, job.item = done, total, f"{doing} {item}".strip()
    if isinstance(found := message.get("found"), dict):
        job.add_row({**found, "of": found.get("archive") or subject_of(job.requests[job.place])})
        job.log(f"{job.item} done")
    return True


def _outcome(job: Job, lines: list[str]) -> tuple[Problem | None, list[Any]]:
    """Return the error, None without one, and the reports; a failed check is a report too."""
    try:
        documents = json.loads((job.folder / RESULT).read_bytes())
        last = documents[-1]
    except (OSError, ValueError, IndexError):
        if lines and lines[-1].startswith('{"unwritten"'):
            what = "the work is done, but its result cannot be stored"
            return _refused(what, job.folder, json.loads(lines[-1])["unwritten"]), []
        return _DIED._replace(detail="\n".join(lines)), []
    if set(last) - {"error"}:
        return None, documents
    error = last["error"]
    where, remedy = str(error.get("where", "")), str(error.get("remedy", ""))
    what = str(error.get("message", "")).removeprefix(f"{where}: ")
    what = what.removesuffix(remedy).removesuffix("; ") if remedy else what
    return Problem(what, where, remedy), documents
