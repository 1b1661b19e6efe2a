"""The jobs of the explorer: each is a child `inshrink run REQUEST.json`, or several in a row.

The requests are all that a job is: its title, the command that a page shows, and what is kept on disk
(`jobs.files`), so that it outlives its explorer as ``interrupted`` and can be resumed. A few are worked on at
a time; the others wait. A child ends by itself when the explorer does, because nobody reads its progress any
more.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

from inshrink_app.jobs.files import JobFolder, job_folders
from inshrink_app.jobs.follow import StartRequest, end_process, follow, not_kept, remove_scratch, start_next
from inshrink_app.jobs.job import Job, Load, load_kept, load_last, refresh_job, revive
from inshrink_app.jobs.work import Work
from inshrink_app.model import Problem

from inshrink_core.errors import InputError

MOST_AT_WORK = min(2, os.cpu_count() or 1)
"""Jobs that are worked on at a time: one uses every core, and the memory that its work takes."""

_MAX_JOBS = 64
"""Ended jobs that are remembered; what they found lies on disk."""

_MAX_RESULTS = 12
"""Results that stay in memory, of the jobs that ended last: one of 400 layers by 200 steps takes 2 MB."""


class JobRegistry:
    """The jobs of this explorer, seen by every session: two tabs share one job.

    Parameters
    ----------
    start
        Starts what performs a request.
    folder
        Where jobs are kept; by default they are forgotten with the registry.
    most
        Jobs that are worked on at a time; others are queued, and begin in the order they were asked for. One
        that stays beside a training mostly waits, and does not count.
    load
        Makes the result of the reports, when the job has finished or its result is asked for; called in a
        thread.
    """

    def __init__(
        self,
        start: StartRequest,
        folder: Path | None = None,
        most: int = MOST_AT_WORK,
        load: Load = load_last,
    ) -> None:
        self._start_request, self._most, self._load = start, most, load
        self._waiting: list[Job] = []
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
        return tuple(sorted(self._all(), key=lambda job: job.started_at, reverse=True))

    def find(self, job_id: str) -> Job | None:
        """Return a job by its id."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            refresh_job(job)
        return job

    def get(self, work: Work) -> Job | None:
        """Return the newest job that answers a question, if there is one that can be read."""
        job = self._newest([job for job in self._all() if job.work.key == work.key])
        if job is None or job.state != "finished" or job.result is not None:
            return job
        return job if load_kept(job, self._load) else None

    def newest(self, page: str, topic: str, shown: str, state: str = "") -> Job | None:
        """Return the newest job of a topic of a page; of those in a state alone, where one is given."""
        asked = (page, topic, shown)
        found = [job for job in self._all() if (job.work.page, job.work.topic, job.shown) == asked]
        return self._newest([job for job in found if state in ("", job.state)])

    def _all(self) -> list[Job]:
        with self._lock:
            found = list(self._jobs.values())
        for job in found:
            refresh_job(job)
        return found

    @staticmethod
    def _newest(found: list[Job]) -> Job | None:
        return max(found, key=lambda job: job.started_at, default=None)

    def start(self, work: Work, *, again: bool = False) -> Job:
        """Start a job, or return the one that runs or has finished and answers the same.

        Parameters
        ----------
        work
            What is asked.
        again
            Work on it once more, although there is an answer.
        """
        with self._starting:
            known = self.get(work)
            if known is not None and (known.is_running or (known.state == "finished" and not again)):
                return known
            name = secrets.token_hex(8)
            job = Job(work, job_id=name, folder=JobFolder(self._folder / name), state="new")
            self._run(job)
        self._forget_oldest()
        return job

    def resume(self, job_id: str) -> Job | None:
        """Go on with a job that was interrupted, was cancelled or failed; None where there is none."""
        job = self.find(job_id)
        if job is not None and not job.is_running:
            with self._starting:
                self._run(job)
        return job

    def stop(self, job: Job) -> None:
        """End a running job; the engine's files are written whole or not at all, so it may just stop."""
        with self._lock:
            waited = any(job is one for one in self._waiting)
            if not job.is_running or not (waited or job.process is not None):
                return
            self._waiting = [one for one in self._waiting if one is not job]
            job.state, job.ended_at = "cancelled", time.time()
        job.log("cancelled")
        if job.process is not None:
            job.process.terminate()
            threading.Thread(target=end_process, args=(job.process,), daemon=True).start()
        else:
            job.folder.write(job.record())
            job.folder.release_lock()

    def place(self, job: Job) -> int | None:
        """Return how many jobs go before a queued one, itself included; None where it does not wait here."""
        with self._lock:
            return next((i for i, one in enumerate(self._waiting, 1) if one is job), None)

    def remove(self, job_id: str) -> None:
        """Drop an ended job with all that is kept of it."""
        job = self.find(job_id)
        if job is None or job.is_running:
            return
        with self._lock:
            self._jobs.pop(job_id, None)
        remove_scratch(job)
        job.folder.remove()

    def _run(self, job: Job) -> None:
        """Put a job into the queue, and begin what may begin; the second of two that ask finds it there."""
        if job.process is not None:
            end_process(job.process)
        with self._lock:
            if job.is_running:
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
            self._waiting.append(job)
        job.folder.write(job.record())
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin with those that wait longest, while fewer than the most are at work."""
        while True:
            with self._lock:
                at_work = sum(not one.is_watching for one in self._at_work)
                if not self._waiting or at_work >= self._most:
                    return
                job = self._waiting.pop(0)
                if not self._begin(job):
                    continue
                self._at_work.append(job)
            job.folder.write(job.record())
            threading.Thread(target=self._follow, args=(job,), daemon=True).start()

    def _begin(self, job: Job) -> bool:
        """Start the first request of a job; one that cannot be read or started has failed."""
        problem = None
        try:
            start_next(job, 0, self._start_request)
        except OSError as error:
            problem = Problem("no process could be started for this", detail=str(error))
        except InputError as error:
            problem = Problem(error.what, error.where, error.remedy)
        if problem is not None:
            job.ended_at, job.state, job.problem = time.time(), "failed", problem
            job.folder.write(job.record())
            job.folder.release_lock()
            return False
        job.started_at, job.state = time.time(), "running"
        return True

    def _follow(self, job: Job) -> None:
        """Follow a job; a method, so that the registry's folder lasts as long as its children."""
        try:
            follow(job, self._start_request, self._load)
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
            if job.state == "finished" and job.folder.output.exists():
                # Read from disk again when it is asked for.
                job.result, job.rows, job.documents = None, [], []
