"""Ordered, bounded mapping over threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["default_threads", "ordered_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int = 1
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

    Yields
    ------
    Result
        In input order. The first error is raised where its result would stand, and nothing is
        started after it.

    Notes
    -----
    At most ``threads + 1`` results exist at any time, so memory is bounded by the window, not by
    the number of items.
    """
    if threads <= 1:
        for item in items:
            yield function(item)
        return
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="inshrink") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
