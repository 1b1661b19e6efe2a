"""Engines perform tasks in other processes: of this machine, or on a Ray cluster.

A task calls a function of this project with JSON data. It may be restarted after a worker died, so it must be
idempotent. Engines exchange requests, progress and results, never tensors.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pkgutil import resolve_name
from typing import IO, Any, Final, NamedTuple, cast

from inshrink_core.errors import EngineError, InputError
from inshrink_core.execution.process import start_python, user_environment
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.execution.threads import default_threads

THREADS: Final = "threads"
"""No engine: the threads of this process."""

N_ATTEMPTS: Final = 3
"""Attempts at a task: one that ended this many workers would also end the next."""

SECONDS_TO_TIDY_UP: Final = 1.0
"""Time in which a terminated worker may remove unfinished files."""

_WORKER: Final = "inshrink_core.execution.worker"


class Task(NamedTuple):
    """A part of the work.

    Parameters
    ----------
    function
        ``MODULE:NAME``; called with `argument` and a callback that takes its `Progress`.
    argument
        JSON data.
    directory
        The working directory, the base of relative paths.
    """

    function: str
    argument: Any
    directory: str


class Work(NamedTuple):
    """Tasks to perform.

    Parameters
    ----------
    tasks
        Returns the tasks, given their approximate number and the threads of each.
    workers
        Number of concurrent tasks; by default as many as fit.
    threads
        Threads of each worker; by default chosen by the engine.
    progress
        Called with the total progress of all tasks, from any thread, by one at a time.
    """

    tasks: Callable[[int, int], Sequence[Task]]
    workers: int | None = None
    threads: int | None = None
    progress: OnProgress | None = None


class TotalProgress:
    """The total progress of all tasks; the size of tasks that have not begun is estimated.

    Parameters
    ----------
    n_tasks
        Number of tasks.
    progress
        Called with the sum.
    """

    def __init__(self, n_tasks: int, progress: OnProgress | None) -> None:
        self._n, self._progress = n_tasks, progress
        self._rows: dict[int, tuple[int, int]] = {}
        self._most = 0
        self._lock = threading.Lock()

    def add(self, task: int, now: Progress) -> None:
        """Add the progress of a task."""
        if self._progress is None:
            return
        with self._lock:
            self._rows[task] = now.done, now.total
            done, total = (sum(column) for column in zip(*self._rows.values(), strict=True))
            # A restarted task does not reduce the sum.
            self._most = max(self._most, done)
            total = max(self._most, total * self._n // len(self._rows))
            self._progress(Progress(now.stage, self._most, total, now.step, now.detail))


Engine = Callable[[Work], list[Any]]
"""Returns the results of the tasks in order; an error of a task or of the callback ends all workers first."""


def engine_of(name: str) -> Engine | None:
    """Return an engine by name; None for threads.

    Raises
    ------
    InputError
        The engine is unknown.
    """
    if name == THREADS:
        return None
    if name not in ENGINES:
        raise InputError(f"--engine {name}", remedy=f"choose one of {', '.join((THREADS, *ENGINES))}")
    return ENGINES[name]


def packed(value: Any) -> str:
    """Return a value as text for exchange with a worker of this process."""
    return base64.b64encode(pickle.dumps(value)).decode()


class _Processes:
    """The worker processes of some tasks, one for each attempt at a task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[str]] = []
        self._over = False

    def perform(self, at: int, task: Task, progress: OnProgress) -> Any:
        """Perform a task in a new process, or in another if that dies; return its result."""
        for _ in range(N_ATTEMPTS):
            if answer := self._attempt(task, progress):
                return answer[0]
        what = f"the process that worked on part {at + 1} ended {N_ATTEMPTS} times before it was done"
        remedy = "the machine may be short of memory: use fewer --workers; the same command continues"
        raise EngineError(what, remedy=remedy)

    def _attempt(self, task: Task, progress: OnProgress) -> list[Any]:
        """Perform a task in a new process; return its result in a list, an empty one if the process died."""
        with self._lock:
            if self._over:
                return []
            process = start_python(["-m", _WORKER], errors=2, environment=user_environment())
            self._started.append(process)
        requests, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        with process:
            try:
                requests.write(json.dumps(task._asdict()) + "\n")
                requests.flush()
            except BrokenPipeError:
                with contextlib.suppress(BrokenPipeError):
                    requests.close()
            for line in answers:
                # The line comes from a process that this one started, so unpickling is safe.
                kind, value = pickle.loads(base64.b64decode(line))
                if kind == "error":
                    raise value
                if kind == "result":
                    return [value]
                progress(value)
        return []

    def end(self) -> None:
        """End every process, interrupting active ones."""
        with self._lock:
            self._over = True
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(SECONDS_TO_TIDY_UP)
            except subprocess.TimeoutExpired:
                process.kill()


def _on_processes(work: Work) -> list[Any]:
    """Perform work in processes of this machine."""
    workers = work.workers or max(1, default_threads() // (work.threads or 1))
    tasks = work.tasks(workers, work.threads or max(1, default_threads() // workers))
    total = TotalProgress(len(tasks), work.progress)
    processes, pool = _Processes(), ThreadPoolExecutor(workers, thread_name_prefix="inshrink-engine")
    try:
        done = [
            pool.submit(processes.perform, at, task, partial(total.add, at)) for at, task in enumerate(tasks)
        ]
        for future in as_completed(done):
            future.result()  # raises the first error
        return [future.result() for future in done]
    finally:
        processes.end()
        pool.shutdown(cancel_futures=True)


def _on_ray(work: Work) -> list[Any]:
    return cast("list[Any]", resolve_name("inshrink_core.execution.ray_engine:perform")(work))


ENGINES: Final[dict[str, Engine]] = {"processes": _on_processes, "ray": _on_ray}
"""Every engine except threads, by name."""
