"""Engines: who performs the parts of a work that is shared out: processes of this machine, or Ray's."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, Any, Final, cast

from inshrink_core.errors import EngineError, InputError
from inshrink_core.execution.process import start_python, user_environment
from inshrink_core.execution.tasks import (
    N_ATTEMPTS,
    SECONDS_TO_TIDY_UP,
    Hear,
    Heard,
    Task,
    Told,
    Work,
    unpacked,
)
from inshrink_core.execution.threads import default_threads

THREADS: Final = "threads"
"""No engine: the threads of this process."""

_WORKER: Final = "inshrink_core.execution.worker"

Perform = Callable[[Work], list[Any]]


@dataclass(frozen=True)
class Engine:
    """Who performs parts.

    Parameters
    ----------
    package
        What must be installed for it; the extra has the same name. Empty for nothing.
    opened
        Gives what performs one `Work` after the other, with workers that stay until the context ends, and
        returns the results of its tasks in order. Whatever is raised, by a task or by who is told of
        progress, ends all workers before it is raised; then there is no work after it.
    """

    package: str
    opened: Callable[[], AbstractContextManager[Perform]]

    def perform(self, work: Work) -> list[Any]:
        """Perform a work with workers of its own."""
        with self.opened() as perform:
            return perform(work)

    @property
    def is_installed(self) -> bool:
        """Whether it can be had."""
        return not self.package or find_spec(self.package) is not None


def installed_engines() -> tuple[str, ...]:
    """Return the names of the engines that can be had, threads first."""
    return (THREADS, *(name for name, engine in ENGINES.items() if engine.is_installed))


def engine_of(name: str) -> Engine | None:
    """Return an engine by its name; None for threads.

    Raises
    ------
    InputError
        There is no such engine.
    """
    if name == THREADS:
        return None
    if name not in ENGINES:
        raise InputError(f"--engine {name}", remedy=f"choose one of {', '.join((THREADS, *ENGINES))}")
    return ENGINES[name]


# ---- processes of this machine -------------------------------------------------------------------


class _Team:
    """Worker processes, each of which performs one task at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self._over = False

    def perform(self, at: int, task: Task, hear: Hear) -> None:
        """Have a task performed by a worker that has nothing to do, by another where one dies."""
        try:
            for _ in range(N_ATTEMPTS):
                if self._performed(at, task, hear) or self._over:
                    return
        except BaseException as error:  # whatever it is, it is raised where tasks are waited for
            hear(Heard(at, "error", error))
            return
        problem = EngineError(
            f"the process that worked on part {at + 1} ended {N_ATTEMPTS} times before it was done",
            remedy="the machine may be short of memory: use fewer --workers; the same command goes on",
        )
        hear(Heard(at, "error", problem))

    def _performed(self, at: int, task: Task, hear: Hear) -> bool:
        """Have a task performed; False where its worker died."""
        process = self._worker()
        if process is None:
            return True
        requests, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        with contextlib.suppress(BrokenPipeError):
            requests.write(json.dumps(task._asdict()) + "\n")
            requests.flush()
        for line in answers:
            heard = Heard(at, *unpacked(line))
            if heard.kind != "now":
                with self._lock:
                    self._idle.append(process)
            hear(heard)
            if heard.kind != "now":
                return True
        return False

    def _worker(self) -> subprocess.Popen[str] | None:
        """Return a worker without work, a new one if need be; None where the work is over."""
        with self._lock:
            if self._over:
                return None
            if self._idle:
                return self._idle.pop()
            started = start_python(["-m", _WORKER], errors=2, environment=user_environment())
            self._all.append(started)
            return started

    def end(self) -> None:
        """End every worker, and wait until they have: those at work are interrupted."""
        with self._lock:
            self._over = True
        for process in self._all:
            process.terminate()
        for process in self._all:
            try:
                process.wait(SECONDS_TO_TIDY_UP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Close what was spoken through, when nobody listens any more."""
        for process in self._all:
            with contextlib.suppress(BrokenPipeError):
                cast("IO[str]", process.stdin).close()
            cast("IO[str]", process.stdout).close()


@contextlib.contextmanager
def _on_processes() -> Iterator[Perform]:
    """Give what performs tasks in processes of this machine."""
    team = _Team()
    try:
        yield functools.partial(_performed_by, team)
    finally:
        team.end()
        team.close()


def _performed_by(team: _Team, work: Work) -> list[Any]:
    workers = work.workers or max(1, default_threads() // (work.threads or 1))
    tasks = work.tasks(workers, work.threads or max(1, default_threads() // workers))
    told = Told(len(tasks), work.progress)
    said: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    results: dict[int, Any] = {}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="inshrink-engine")
    try:
        for at, task in enumerate(tasks):
            pool.submit(team.perform, at, task, said.put)
        while len(results) < len(tasks):
            heard = said.get()
            if heard.kind == "error":
                raise heard.value
            if heard.kind == "result":
                results[heard.at] = heard.value
            told.hear(heard)
    finally:
        if len(results) < len(tasks):
            team.end()
        pool.shutdown(cancel_futures=True)
    return [results[at] for at in range(len(tasks))]


def _on_ray() -> AbstractContextManager[Perform]:
    from inshrink_core.execution.ray_engine import opened

    return opened()


ENGINES: Final = {"processes": Engine("", _on_processes), "ray": Engine("ray", _on_ray)}
"""Every engine but threads, by its name."""
