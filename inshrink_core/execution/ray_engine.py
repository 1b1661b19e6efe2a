"""Ray as an engine: parts are tasks, started wherever there is room, and again where a worker died."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

from inshrink_core.errors import EngineError, IncompatibleError, MissingExtraError
from inshrink_core.execution.process import empty_directory
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.work import N_ATTEMPTS, SECONDS_TO_TIDY_UP, Heard, Task, Told, Work

_SECONDS_BETWEEN: Final = 0.5

_TASKS_PER_WORKER: Final = 2
"""Of one each, a machine that joins would get none."""


class _Board:
    """Where tasks write how far they are, and the driver reads it: a process that does nothing else."""

    def __init__(self) -> None:
        self._news: dict[int, Progress] = {}

    def write(self, at: int, now: Progress) -> None:
        """Say how far a task is."""
        self._news[at] = now

    def read(self) -> dict[int, Progress]:
        """Return what is new."""
        news, self._news = self._news, {}
        return news


def _work(expected: str, at: int, task: Task, board: Any) -> Any:
    """Perform a task in a process of Ray's."""
    from inshrink_core.execution.worker import perform, seldom

    found = version("inshrink")
    if found != expected:
        what = "a machine of the cluster has another version of Inshrink"
        raise IncompatibleError(what, expected=expected, found=found)
    return perform(task, seldom(lambda now: board.write.remote(at, now), _SECONDS_BETWEEN))


def _ray() -> Any:
    """Return Ray.

    Raises
    ------
    MissingExtraError
        It is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray


@contextlib.contextmanager
def _connected() -> Iterator[Any]:
    """Give Ray: as this process has it, else the cluster of RAY_ADDRESS or this machine's, else a new one.

    Raises
    ------
    EngineError
        The cluster does not answer.
    """
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            # Workers would look for modules where this process stands; now it is in an empty folder.
            ray.init(
                runtime_env={"working_dir": str(empty_directory())},
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"Ray cannot be reached: {' '.join(str(error).split())[:300]}",
            where=os.environ.get("RAY_ADDRESS", ""),
            remedy="`ray status` tells of the cluster; without RAY_ADDRESS one is started on this machine",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def perform(work: Work) -> list[Any]:
    """Perform tasks on a cluster (`inshrink_core.execution.engines.Engine`).

    Raises
    ------
    EngineError
        The cluster does not answer, or the workers of a task died again and again.
    MissingExtraError
        Ray is not installed.
    """
    with _connected() as ray:
        threads = work.threads or 1
        slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        tasks = work.tasks(_TASKS_PER_WORKER * (work.workers or slots), threads)
        told = Told(len(tasks), work.progress)
        remote = ray.remote(num_cpus=threads, max_retries=N_ATTEMPTS - 1)(_work)
        board = ray.remote(num_cpus=0)(_Board).remote()
        waiting = list(enumerate(tasks))[::-1]
        at_work: dict[Any, int] = {}
        results: dict[int, Any] = {}
        try:
            while waiting or at_work:
                # What there is no room for waits in the cluster, where a machine that joins finds it.
                while waiting and len(at_work) < (work.workers or len(tasks)):
                    at, task = waiting.pop()
                    at_work[remote.remote(version("inshrink"), at, task, board)] = at
                done, _ = ray.wait(list(at_work), timeout=_SECONDS_BETWEEN)
                for at, now in _read(ray, board).items():
                    told.hear(Heard(at, "now", now))
                for one in done:
                    results[at_work[one]] = _result(ray, one, at_work[one])
                    del at_work[one]
        finally:
            _end(ray, list(at_work))
            ray.kill(board)
    return [results[at] for at in range(len(tasks))]


def _read(ray: Any, board: Any) -> dict[int, Progress]:
    """Read the board; where it is not there at the moment, there is nothing new."""
    with contextlib.suppress(ray.exceptions.RayError):
        news: dict[int, Progress] = ray.get(board.read.remote(), timeout=_SECONDS_BETWEEN)
        return news
    return {}


def _result(ray: Any, one: Any, at: int) -> Any:
    """Return the result of a task, or raise its error as it was."""
    try:
        return ray.get(one)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"the workers of part {at + 1} died again and again: {' '.join(str(error).split())[:300]}",
            remedy="the machines may be short of memory; the same command goes on where it was",
        ) from error


def _end(ray: Any, at_work: list[Any]) -> None:
    """End tasks: they are interrupted, and killed where that takes long."""
    for one in at_work:
        ray.cancel(one, force=False)
    if at_work:
        _, left = ray.wait(at_work, num_returns=len(at_work), timeout=SECONDS_TO_TIDY_UP)
        for one in left:
            ray.cancel(one, force=True)
