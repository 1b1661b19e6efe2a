"""Long work in a process of its own, which the page only looks at.

The process is `inshrink_app.worker`: its request goes in on standard input, progress comes back as one
JSON object a line. It ends by itself when the explorer does, because its standard input closes.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inshrink_app.tables import Problem

__all__ = ["Job", "JobRegistry"]

_log = logging.getLogger(__name__)

_MAX_JOBS = 64
"""Finished jobs that are remembered with their results (some hundred kB each)."""

_DIED = Problem(
    "the process that measures ended before it was done",
    remedy="try again; if it ends again, the machine may be short of memory",
)


@dataclass(eq=False)
class Job:
    """One piece of work.

    Parameters
    ----------
    process
        The worker.
    state
        ``running``, ``finished``, ``failed`` or ``cancelled``.
    done, total
        Progress, in bytes read or whatever the worker counts.
    item
        What it is at now. Untrusted text.
    started_at, ended_at
        Seconds of the monotonic clock.
    result
        What `load` made of the worker's output, when finished.
    problem
        What went wrong, when failed.
    """

    process: subprocess.Popen[str]
    state: str = "running"
    done: int = 0
    total: int = 0
    item: str = ""
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    result: Any = None
    problem: Problem | None = None

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1."""
        return min(1.0, max(0.0, self.done / self.total)) if self.total else 0.0

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return (self.ended_at or time.monotonic()) - self.started_at


class JobRegistry:
    """The jobs of this explorer by key, seen by every session: two tabs share one measurement.

    Parameters
    ----------
    command
        How the worker is started.
    """

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", "inshrink_app.worker")) -> None:
        self._command = command
        self._jobs: dict[Hashable, Job] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Job | None:
        """Return the job under a key, if there is one."""
        with self._lock:
            return self._jobs.get(key)

    def start(self, key: Hashable, request: dict[str, Any], load: Callable[[Path], Any]) -> Job:
        """Start a job, or return the one that runs or has finished under this key.

        Parameters
        ----------
        key
            What the job answers; equal questions share a job.
        request
            Plain JSON values for the worker; ``output`` is added, the file it writes its result to.
        load
            Turns that file into the job's `result`; called in a thread.
        """
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known.state in ("running", "finished"):
                return known
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            job = self._jobs[key] = Job(process)
            self._forget_oldest()
        threading.Thread(target=self._follow, args=(job, request, load), daemon=True).start()
        return job

    def cancel(self, key: Hashable) -> None:
        """End a running job; the engine's files are written whole or not at all, so it may just stop."""
        job = self.get(key)
        if job is not None and job.state == "running":
            job.state = "cancelled"
            job.process.terminate()

    def forget(self, key: Hashable) -> None:
        """Drop a job that failed or was cancelled, so that it can be asked for anew."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state in ("failed", "cancelled"):
                del self._jobs[key]

    def _forget_oldest(self) -> None:
        """Keep the registry bounded; a running job is never dropped."""
        for key in [key for key, job in self._jobs.items() if job.state != "running"]:
            if len(self._jobs) <= _MAX_JOBS:
                break
            del self._jobs[key]

    @staticmethod
    def _follow(job: Job, request: dict[str, Any], load: Callable[[Path], Any]) -> None:
        """Send the request, take in progress until the worker ends, and load what it left."""
        with tempfile.TemporaryDirectory(prefix="inshrink-job-") as folder:
            output = Path(folder) / "result"
            state, result = "failed", None
            problem: Problem | None = _DIED
            try:
                problem = _converse(job, {**request, "output": str(output)}) or _DIED
                if job.process.wait() == 0 and output.exists():
                    state, problem, result = "finished", None, load(output)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("a job failed: %s", error)
                job.process.kill()
                job.process.wait()
        job.ended_at = time.monotonic()
        if job.state == "running":
            # The state comes last: a page that sees it must find the result.
            job.result, job.problem = result, problem
            job.state = state


def _converse(job: Job, request: dict[str, Any]) -> Problem | None:
    """Exchange messages with the worker until it closes its output; return the problem it reported."""
    stdin, stdout = job.process.stdin, job.process.stdout
    if stdin is None or stdout is None:
        raise OSError("the worker has no pipes")
    problem = None
    with stdin, stdout:
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        for line in stdout:
            message = json.loads(line)
            if "problem" in message:
                problem = Problem(*message["problem"])
            else:
                job.done, job.total = int(message["done"]), int(message["total"])
                job.item = str(message.get("item", ""))
    return problem
