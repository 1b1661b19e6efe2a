"""Long work in processes of its own, which the pages only look at.

The process is `inshrink_app.worker`: its request goes in on standard input, progress comes back as one
JSON object a line. It ends by itself when the explorer does, because its standard input closes. What a
job was asked and how far it came is kept on disk (`job_files`), so that a job outlives its explorer as
``interrupted`` and can be resumed.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from inshrink_app.job import Job, Load, load_kept, refresh_job, revive
from inshrink_app.job_files import JobFolder, job_folders
from inshrink_app.job_follow import end_process, follow, log_line

__all__ = ["Job", "JobRegistry"]

_MAX_JOBS = 64
"""Ended jobs that are remembered; what they found lies on disk."""

_MAX_RESULTS = 12
"""Results that stay in memory, of the jobs that ended last: one of 400 layers by 200 steps takes 2 MB."""


class JobRegistry:
    """The jobs of this explorer, seen by every session: two tabs share one job.

    Parameters
    ----------
    command
        How the worker is started.
    folder
        Where jobs are kept; by default they are forgotten with the registry.
    """

    def __init__(
        self,
        command: tuple[str, ...] = (sys.executable, "-m", "inshrink_app.worker"),
        folder: Path | None = None,
    ) -> None:
        self._command = command
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

    def get(self, key: Hashable, load: Load | None = None) -> Job | None:
        """Return the newest job that answers a question, if there is one.

        Parameters
        ----------
        key
            The question.
        load
            Reads the result, where the job finished before this explorer started; a result that it cannot
            read counts as none.
        """
        job = self._newest(key)
        if job is None or job.state != "finished" or job.result is not None or load is None:
            return job
        return job if load_kept(job, load) else None

    def start(self, key: Hashable, request: dict[str, Any], load: Load, *, again: bool = False) -> Job:
        """Start a job, or return the one that runs or has finished under this key.

        Parameters
        ----------
        key
            What the job answers; equal questions share a job.
        request
            Plain JSON values for the worker, ``task`` among them; ``output`` is added, the file it writes
            its result to.
        load
            Turns that file into the job's `result`; called in a thread.
        again
            Work on it once more, although there is an answer.
        """
        with self._starting:
            known = self.get(key, load)
            if known is not None and (known.is_running or (known.state == "finished" and not again)):
                return known
            name = secrets.token_hex(8)
            folder = JobFolder(self._folder / name)
            job = Job(key=_text(key), request=request, job_id=name, folder=folder, state="new")
            self._run(job, load)
        self._forget_oldest()
        return job

    def resume(self, job_id: str, load: Load) -> Job | None:
        """Go on with a job that was interrupted, was cancelled or failed; None where there is none."""
        job = self.find(job_id)
        if job is not None and not job.is_running:
            with self._starting:
                self._run(job, load)
        return job

    def cancel(self, key: Hashable) -> None:
        """End the running job of a question; see `stop`."""
        job = self._newest(key)
        if job is not None:
            self.stop(job)

    def stop(self, job: Job) -> None:
        """End a running job; the engine's files are written whole or not at all, so it may just stop."""
        with self._lock:
            if not job.is_running or job.process is None:
                return
            job.state, job.ended_at = "cancelled", time.time()
        job.process.terminate()
        log_line(job, "cancelled")
        threading.Thread(target=end_process, args=(job.process,), daemon=True).start()

    def forget(self, key: Hashable) -> None:
        """Drop a job that did not finish, so that it can be asked for anew."""
        job = self._newest(key)
        if job is not None and job.state not in ("running", "finished"):
            self.remove(job.job_id)

    def remove(self, job_id: str) -> None:
        """Drop an ended job with all that is kept of it."""
        job = self.find(job_id)
        if job is None or job.is_running:
            return
        with self._lock:
            self._jobs.pop(job_id, None)
        if job.folder is not None:
            job.folder.remove()

    def _newest(self, key: Hashable) -> Job | None:
        """Return the newest job under a key."""
        text = _text(key)
        with self._lock:
            found = [job for job in self._jobs.values() if job.key == text]
        for job in found:
            refresh_job(job)
        return max(found, key=lambda job: job.started_at, default=None)

    def _run(self, job: Job, load: Load) -> None:
        """Start the worker of a job; the second of two that ask at once finds it running."""
        if job.process is not None:
            end_process(job.process)
        with self._lock:
            if job.is_running or job.folder is None:
                return
            job.folder.make()
            if not job.folder.take_lock():
                return
            with job.folder.errors.open("wb") as errors:
                job.process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                )
            job.done, job.total, job.item, job.rows = 0, 0, "", []
            job.started_at, job.ended_at, job.result, job.problem = time.time(), None, None, None
            job.state = "running"
            self._jobs[job.job_id] = job
        job.folder.write(job.record())
        threading.Thread(target=self._follow, args=(job, job.process, load), daemon=True).start()

    def _follow(self, job: Job, process: subprocess.Popen[str], load: Load) -> None:
        """Follow a worker; a method, so that the registry's folder lasts as long as its workers."""
        follow(job, process, load)

    def _forget_oldest(self) -> None:
        """Keep the registry and its folder bounded; a running job is never dropped."""
        ended = [job for job in self.jobs() if not job.is_running]
        for job in ended[_MAX_JOBS:]:
            self.remove(job.job_id)
        for job in ended[_MAX_RESULTS:]:
            if job.state == "finished" and job.folder is not None and job.folder.output.exists():
                job.result, job.rows = None, []  # Read from disk again when it is asked for.


def _text(key: Hashable) -> str:
    """Return a key as text, the same in every process."""
    return json.dumps(key)
