"""Run tasks on a Ray cluster, with retries after a worker died."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

from inshrink_core.errors import EngineError, IncompatibleError, MissingExtraError
from inshrink_core.execution.engines import N_ATTEMPTS, SECONDS_TO_TIDY_UP, Task, TotalProgress, Work
from inshrink_core.execution.process import empty_directory
from inshrink_core.execution.progress import Progress

_TASKS_PER_WORKER: Final = 2
"""With one task per worker, machines that join later would get none. An explicit count is a limit."""


def _work(expected: str, task: Task) -> tuple[Any, Progress | None]:
    """Perform a task in a Ray process; return its result and last progress."""
    from inshrink_core.execution.worker import perform

    found = version("inshrink")
    if found != expected:
        what = "a machine of the cluster has another version of Inshrink"
        raise IncompatibleError(what, expected=expected, found=found)
    last: deque[Progress] = deque(maxlen=1)
    return perform(task, last.append), last[0] if last else None


@contextlib.contextmanager
def _connected() -> Iterator[Any]:
    """Yield Ray, as initialized by this process, or connected to RAY_ADDRESS, a local or a new cluster.

    Raises
    ------
    EngineError
        The cluster does not answer.
    MissingExtraError
        Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", "ray") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            # Workers import modules from their working directory; an empty one is safe.
            ray.init(
                runtime_env={"working_dir": str(empty_directory())},
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = f"Ray cannot be reached: {' '.join(str(error).split())[:300]}"
        remedy = "`ray status` describes the cluster; without RAY_ADDRESS one is started on this machine"
        raise EngineError(what, where=os.environ.get("RAY_ADDRESS", ""), remedy=remedy) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def perform(work: Work) -> list[Any]:
    """Perform work on a cluster (`inshrink_core.execution.engines.Engine`).

    Raises
    ------
    EngineError
        The cluster does not answer, or the workers of a task died repeatedly.
    MissingExtraError
        Ray is not installed.
    """
    with _connected() as ray:
        threads = work.threads or 1
        slots = max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        tasks = work.tasks(work.workers or _TASKS_PER_WORKER * slots, threads)
        total = TotalProgress(len(tasks), work.progress)
        remote = ray.remote(num_cpus=threads, max_retries=N_ATTEMPTS - 1)(_work)
        waiting = list(enumerate(tasks))[::-1]
        at_work: dict[Any, int] = {}
        results: dict[int, Any] = {}
        try:
            while waiting or at_work:
                # Surplus tasks wait in the cluster, available to machines that join.
                while waiting and len(at_work) < (work.workers or len(tasks)):
                    at, task = waiting.pop()
                    at_work[remote.remote(version("inshrink"), task)] = at
                [reference], _ = ray.wait(list(at_work))
                at = at_work.pop(reference)
                results[at], now = _result(ray, reference, at)
                if now is not None:
                    total.add(at, now)
        finally:
            _end(ray, list(at_work))
        return [results[at] for at in range(len(tasks))]


def _result(ray: Any, reference: Any, at: int) -> Any:
    """Return the result of a task, or raise its original error."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        what = f"the workers of part {at + 1} died repeatedly: {' '.join(str(error).split())[:300]}"
        remedy = "the machines may be short of memory; the same command continues where it was"
        raise EngineError(what, remedy=remedy) from error


def _end(ray: Any, at_work: list[Any]) -> None:
    """Interrupt tasks, and kill those that do not end in time."""
    for reference in at_work:
        ray.cancel(reference, force=False)
    if at_work:
        _, left = ray.wait(at_work, num_returns=len(at_work), timeout=SECONDS_TO_TIDY_UP)
        for reference in left:
            ray.cancel(reference, force=True)
