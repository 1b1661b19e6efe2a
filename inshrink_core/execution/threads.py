"""Ordered, bounded mapping over threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's ``mallopt``."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def prepare_process() -> None:
    """Prepare a process of this project, with one worker per processor, for work with tensors.

    PyTorch then computes in the calling thread only: its own threads would wait by spinning and take
    processors from the workers. The many objects of PyTorch and numba are excluded from garbage collection,
    both during import and at exit. Memory of freed tensors is reused: glibc would map each large tensor anew,
    and the kernel would fill it with zeros.
    """
    _reuse_memory()
    if not {"torch", "numba"} <= sys.modules.keys():
        with without_collection():
            # No kernel calls BLAS, for which numba would import SciPy.
            absent: Any = None
            blas = sys.modules.setdefault("scipy.linalg.cython_blas", absent)
            for name in ("torch", "numba.np.arraymath"):
                importlib.import_module(name)
            if blas is absent:
                del sys.modules["scipy.linalg.cython_blas"]
            gc.freeze()
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause garbage collection, which would traverse many new objects repeatedly and find no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _reuse_memory() -> None:
    """Make glibc use one heap for all threads, and keep up to 256 MiB of free memory at its end."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        set_option = ctypes.CDLL(None).mallopt
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 1 << 28)):
            set_option(option, value)


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
        Called from worker threads if `threads` > 1.
    items
        Consumed lazily.
    threads
        Workers; 1 computes in the calling thread.
    weight
        Approximate memory and time of an item, at least 1. By default all items weigh the same.

    Yields
    ------
    Result
        In input order. The first error is raised in place of its result, and no further item starts.

    Notes
    -----
    Results that exist at any time weigh at most ``threads + 1`` times the heaviest item so far. Memory is
    bounded by this window, not by the number of items; beside a heavy item, many light ones are computed.
    Items start in order, except the last ones, which fit the window together: they start heaviest first, so
    that no thread begins a heavy item when the others are idle.

    Examples
    --------
    >>> list(ordered_map(lambda n: n * n, range(5), threads=2))
    [0, 1, 4, 9, 16]
    """
    if threads <= 1:
        for item in items:
            yield function(item)
        return
    window: deque[list[Any]] = deque()  # weight, item and future of each
    heaviest = total = 0
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="inshrink") as pool:
        try:
            for item in items:
                size = 1 if weight is None else weight(item)
                heaviest, total = max(heaviest, size), total + size
                window.append([size, item, pool.submit(function, item)])
                while total > threads * heaviest:
                    size, _, future = window.popleft()
                    yield future.result()
                    total -= size
            # No more items follow: of those not begun, start the heaviest first.
            waiting = [entry for entry in window if entry[2].cancel()]
            for entry in sorted(waiting, key=lambda entry: -entry[0]):
                entry[2] = pool.submit(function, entry[1])
            while window:
                yield window.popleft()[2].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
