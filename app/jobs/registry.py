"""The jobs of the explorer: each is an `inshrink VERB … --json --progress jsonl` child, or several in a row.

The words of its commands are all that a job is: its title, the command that a page shows, and what is kept on
disk (`jobs.files`), so that it outlives its explorer as ``interrupted`` and can be resumed. A few are worked
on at a time; the others wait. A command ends by itself when the explorer does, because nobody reads its
progress any more.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

from inshrink_app.jobs.commands import is_watching
from inshrink_app.jobs.files import JobFolder, job_folders
from inshrink_app.jobs.follow import StartCommand, end_process, follow, not_kept, remove_scratch, what_is_left
from inshrink_app.jobs.job import Job, Load, load_kept, load_last, refresh_job, revive
from inshrink_app.widgets.tables import Problem

__all__ = ["MOST_AT_WORK", "Job", "JobRegistry"]

Refuse = Callable[[Mapping[str, Any]], Problem | None]
"""Says why a request may not be worked on; None where it may."""

MOST_AT_WORK = min(2, os.cpu_count() or 1)
"""Jobs that are worked on at a time: a command uses every core, and the memory that its work takes."""

_MAX_JOBS = 64
"""Ended jobs that are remembered; what they found lies on disk."""

_MAX_RESULTS = 12
"""Results that stay in memory, of the jobs that ended last: one of 400 layers by 200 steps takes 2 MB."""


class JobRegistry:
    """The jobs of this explorer, seen by every session: two tabs share one job.

    Parameters
    ----------
    start
        Starts a command.
    folder
        Where jobs are kept; by default they are forgotten with the registry.
    most
        Jobs that are worked on at a time; others are queued, and begin in the order they were asked for. One
        that stays beside a training mostly waits, and does not count.
    refuse
        Asked right before a job begins, as what it may execute can change while it waits.
    """

    def __init__(
        self,
        start: StartCommand,
        folder: Path | None = None,
        most: int = MOST_AT_WORK,
        refuse: Refuse = lambda request: None,
    ) -> None:
        self._start_command, self._most, self._refuse = start, most, refuse
        self._waiting: list[tuple[Job, Load]] = []
        self._at_work: list[Job] = []
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="inshrink-jobs-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = folder
        self._lock, self._starting = threading.Lock(), threading.Lock()
        kept = [revive(one) for one in job_folders(folder)]
        jobs = sorted((job for job in kept if job is not None), key=lambda job: job.started_at)
        self._jobs: dict[str, Job] = {job.job_id: job for job in jobs}

    def jobs(self) -> tuple[Job, ...]:
        """Return every job, the newest first."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            refresh_job(job)
        return tuple(sorted(jobs, key=lambda job: job.started_at, reverse=True))

    def find(self, job_id: str) -> Job | None:
        """Return a job by its id."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            refresh_job(job)
        return job

    def get(self, key: Hashable, load: Load = load_last) -> Job | None:
        """Return the newest job that answers a question, if there is one.

        Parameters
        ----------
        key
            The question.
        load
            Reads the result, where the job finished before this explorer started; a result that it cannot
            read counts as none.
        """
        job = self.newest(key)
        if job is None or job.state != "finished" or job.result is not None:
            return job
        return job if load_kept(job, load) else None

    def start(
        self, key: Hashable, request: dict[str, Any], load: Load = load_last, *, again: bool = False
    ) -> Job:
        """Start a job, or return the one that runs or has finished under this key.

        Parameters
        ----------
        key
            What the job answers; equal questions share a job.
        request
            ``commands`` and the like (`Job`), plain JSON values. ``{job}`` in a word stands for the folder in
            which the job may keep files of its own.
        load
            Turns the documents of the commands into the job's `result`; called in a thread.
        again
            Work on it once more, although there is an answer.
        """
        with self._starting:
            known = self.get(key, load)
            if known is not None and (known.is_running or (known.state == "finished" and not again)):
                return known
            name = secrets.token_hex(8)
            folder = JobFolder(self._folder / name)
            request = json.loads(json.dumps(request).replace("{job}", json.dumps(str(folder.path))[1:-1]))
            job = Job(key=_text(key), request=request, job_id=name, folder=folder, state="new")
            self._run(job, load)
        self._forget_oldest()
        return job

    def resume(self, job_id: str, load: Load = load_last) -> Job | None:
        """Go on with a job that was interrupted, was cancelled or failed; None where there is none."""
        job = self.find(job_id)
        if job is not None and not job.is_running:
            with self._starting:
                self._run(job, load)
        return job

    def cancel(self, key: Hashable) -> None:
        """End the running job of a question; see `stop`."""
        job = self.newest(key)
        if job is not None:
            self.stop(job)

    def stop(self, job: Job) -> None:
        """End a running job; the engine's files are written whole or not at all, so it may just stop."""
        with self._lock:
            waited = any(job is one for one, _ in self._waiting)
            if not job.is_running or not (waited or job.process is not None):
                return
            self._waiting = [(one, load) for one, load in self._waiting if one is not job]
            job.state, job.ended_at = "cancelled", time.time()
        job.log("cancelled")
        if job.process is not None:
            job.process.terminate()
            threading.Thread(target=end_process, args=(job.process,), daemon=True).start()
        elif job.folder is not None:
            job.folder.write(job.record())
            job.folder.release_lock()

    def place(self, job: Job) -> int | None:
        """Return how many jobs go before a queued one, itself included; None where it does not wait here."""
        with self._lock:
            return next((i for i, (one, _) in enumerate(self._waiting, 1) if one is job), None)

    def forget(self, key: Hashable) -> None:
        """Drop a job that did not finish, so that it can be asked for anew."""
        job = self.newest(key)
        if job is not None and not job.is_running and job.state != "finished":
            self.remove(job.job_id)

    def remove(self, job_id: str) -> None:
        """Drop an ended job with all that is kept of it."""
        job = self.find(job_id)
        if job is None or job.is_running:
            return
        with self._lock:
            self._jobs.pop(job_id, None)
        remove_scratch(job)
        if job.folder is not None:
            job.folder.remove()

    def newest(self, key: Hashable, state: str = "") -> Job | None:
        """Return the newest job under a key; of those in a state alone, where one is given."""
        text = _text(key)
        with self._lock:
            found = [job for job in self._jobs.values() if job.key == text]
        for job in found:
            refresh_job(job)
        found = [job for job in found if state in ("", job.state)]
        return max(found, key=lambda job: job.started_at, default=None)

    def _run(self, job: Job, load: Load) -> None:
        """Put a job into the queue, and begin what may begin; the second of two that ask finds it there."""
        if job.process is not None:
            end_process(job.process)
        with self._lock:
            if job.is_running or job.folder is None:
                return
            try:
                job.folder.make()
            except OSError as error:
                job.begin()
                what = "no folder can be made for this job"
                job.problem = not_kept(what, job.folder.path, error)
                job.ended_at, job.state = time.time(), "failed"
                self._jobs[job.job_id] = job
                return
            if not job.folder.take_lock():
                return
            job.begin()
            job.state = "queued"
            self._jobs[job.job_id] = job
            self._waiting.append((job, load))
        job.folder.write(job.record())
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin with those that wait longest, while fewer than the most are at work."""
        while True:
            with self._lock:
                at_work = sum(not is_watching(one.commands) for one in self._at_work)
                if not self._waiting or at_work >= self._most:
                    return
                job, load = self._waiting.pop(0)
                if not self._begin(job):
                    continue
                self._at_work.append(job)
            if job.folder is not None:
                job.folder.write(job.record())
            threading.Thread(target=self._follow, args=(job, load), daemon=True).start()

    def _begin(self, job: Job) -> bool:
        """Start the first command of a job; one that is refused, or that the system refuses, has failed."""
        if job.folder is None:
            return False
        problem = self._refuse(job.request)
        if problem is None:
            try:
                words = what_is_left(job.commands[0], job.told())
                if words is not None:
                    job.process = self._start_command(words, bool(job.request.get("trusted")))
            except OSError as error:
                problem = Problem("no process could be started for this", detail=str(error))
        if problem is not None:
            job.ended_at, job.state, job.problem = time.time(), "failed", problem
            job.folder.write(job.record())
            job.folder.release_lock()
            return False
        job.started_at, job.state = time.time(), "running"
        return True

    def _follow(self, job: Job, load: Load) -> None:
        """Follow a job; a method, so that the registry's folder lasts as long as its commands."""
        try:
            follow(job, self._start_command, load)
        finally:
            with self._lock:
                self._at_work.remove(job)
            self._begin_waiting()

    def _forget_oldest(self) -> None:
        """Keep the registry and its folder bounded; a running job is never dropped."""
        ended = [job for job in self.jobs() if not job.is_running]
        for job in ended[_MAX_JOBS:]:
            self.remove(job.job_id)
        for job in ended[_MAX_RESULTS:]:
            if job.state == "finished" and job.folder is not None and job.folder.output.exists():
                job.result, job.rows, job.documents = (
                    None,
                    [],
                    [],
                )  # Read from disk again when it is asked for.


def _text(key: Hashable) -> str:
    """Return a key as text, the same in every process."""
    return json.dumps(key)
