"""Ordered, bounded mapping over threads."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def prepare_process() -> None:
    """Prepare a process of our own, whose workers are as many as its processors, for work with tensors.

    PyTorch computes in the calling thread alone from now on: it would give each worker a team of threads,
    which wait for each other by spinning and take the processors from the workers. And the many objects
    that PyTorch and numba are made of are never looked through for garbage, neither while they are imported
    nor when the process ends.
    """
    if not {"torch", "numba"} <= sys.modules.keys():
        gc.disable()
        try:
            for name in ("torch", "numba"):
                importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    import torch

    torch.set_num_threads(1)


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int = 1,
    weight: Callable[[Item], int] | None = None,
) -> Iterator[Result]:
    """Yield ``function(item)`` in the order of the items, computing a few ahead.

    Parameters
    ----------
    function
        Called from worker threads where `threads` > 1.
    items
        Consumed lazily.
    threads
        Workers; 1 computes in the calling thread.
    weight
        About how much memory and time an item takes, at least 1. By default all take the same.

    Yields
    ------
    Result
        In input order. The first error is raised where its result would be, and nothing is
        started after it.

    Notes
    -----
    Results that exist at any time weigh at most ``threads + 1`` times the heaviest item so far, so memory
    is bounded by the window, not by the number of items: beside a heavy item many light ones are computed.
    Items are started in order; the last ones, which fit the window together, heaviest first, so that no
    thread is left with a heavy one when the others have nothing to do.

    Examples
    --------
    >>> list(ordered_map(lambda n: n * n, range(5), threads=2))
    [0, 1, 4, 9, 16]
    """
    if threads <= 1:
        for item in items:
            yield function(item)
        return
    work = _Work(function)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="inshrink") as pool:
        try:
            yield from _windowed(work, pool, items, threads, weight or _one)
        finally:
            work.cancel()


def _one(item: object) -> int:
    """All items take the same."""
    return 1


def _windowed(
    work: _Work[Item, Result],
    pool: ThreadPoolExecutor,
    items: Iterable[Item],
    threads: int,
    weight: Callable[[Item], int],
) -> Iterator[Result]:
    """Admit items to the window, and yield results from its front."""
    window: deque[tuple[int, Future[Result]]] = deque()
    heaviest = held = 0
    for item in items:
        size = weight(item)
        heaviest, held = max(heaviest, size), held + size
        window.append((size, work.add(item, size)))
        pool.submit(work.run_one)
        while held > threads * heaviest:
            freed, future = window.popleft()
            yield future.result()
            held -= freed
    work.heaviest_first()
    while window:
        yield window.popleft()[1].result()


class _Work(Generic[Item, Result]):
    """Items that wait for a thread."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self._function = function
        self._waiting: deque[tuple[int, Item, Future[Result]]] = deque()
        self._lock = threading.Lock()

    def add(self, item: Item, size: int) -> Future[Result]:
        """Let an item wait; return what will be its result."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append((size, item, future))
        return future

    def heaviest_first(self) -> None:
        """Start the heaviest of those that wait first, and of equal ones the first; no more will come."""
        with self._lock:
            self._waiting = deque(sorted(self._waiting, key=lambda one: -one[0]))

    def cancel(self) -> None:
        """Start nothing more."""
        with self._lock:
            self._waiting.clear()

    def run_one(self) -> None:
        """Compute one result."""
        with self._lock:
            if not self._waiting:
                return
            _, item, future = self._waiting.popleft()
        try:
            future.set_result(self._function(item))
        except BaseException as error:  # whatever it is, it is raised where the result would be
            future.set_exception(error)
