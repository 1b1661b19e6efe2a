"""Tensors decoded on threads before a writer asks for them, a few at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from inshrink_core.execution import recycling

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorSource, TensorSpec

__all__ = ["reading_ahead"]


@contextmanager
def reading_ahead(checkpoint: Checkpoint, order: Iterable[TensorSpec], threads: int) -> Iterator[Checkpoint]:
    """Give the same checkpoint, of which threads read tensors ahead while the context is open.

    Parameters
    ----------
    checkpoint
        Its source may be read by several threads.
    order
        In which its tensors will probably be asked for; any other order works, only slower.
    threads
        How many tensors to read at a time; 1 reads each when it is asked for.

    Notes
    -----
    Tensors that were read and not asked for yet have at most ``threads + 1`` times the bytes of the
    largest one.
    """
    if threads <= 1:
        with recycling():
            yield checkpoint
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="inshrink") as pool:
        ahead = _ReadAhead(checkpoint.source, order, threads, pool)
        try:
            with recycling():
                yield replace(checkpoint, source=ahead)
        finally:
            ahead.stop()


class _ReadAhead:
    """A `TensorSource` that knows what will be asked for next."""

    def __init__(
        self, source: TensorSource, order: Iterable[TensorSpec], threads: int, pool: ThreadPoolExecutor
    ) -> None:
        self._source, self._pool = source, pool
        self._next = deque(order)
        self._room = (threads + 1) * max((spec.nbytes for spec in self._next), default=0)
        self._started: dict[str, Future[Tensor]] = {}
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor, which is being read already if all goes in order."""
        with self._lock:
            self._start_some()
            self._taken.add(spec.key)
            future = self._started.pop(spec.key, None)
        if future is None:
            return self._source.read(spec)
        tensor = future.result()
        with self._lock:
            self._room += spec.nbytes
            self._start_some()
        return tensor

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors."""
        return self._source.skeleton(layout)

    def stop(self) -> None:
        """Start nothing more."""
        with self._lock:
            self._next.clear()
            for future in self._started.values():
                future.cancel()

    def _start_some(self) -> None:
        while self._next and self._next[0].nbytes <= self._room:
            spec = self._next.popleft()
            if spec.key not in self._taken:
                self._room -= spec.nbytes
                self._started[spec.key] = self._pool.submit(self._source.read, spec)
