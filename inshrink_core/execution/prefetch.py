"""Compute results in background threads before they are requested."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any


class Prefetcher:
    """Works on items in order, before their results are requested.

    Parameters
    ----------
    work
        Returns the result of an item.
    items
        The items, each with its size.
    room
        Largest total size of computed results that were not requested yet.
    n_threads
        Number of items in work at a time. The threads are daemons.

    Examples
    --------
    >>> ahead = Prefetcher(str.upper, [("a", 1), ("b", 1), ("c", 1)], room=2)
    >>> ahead.get("a"), ahead.get("c"), ahead.get("b"), ahead.get("z")
    ('A', 'C', 'B', 'Z')
    >>> ahead.stop()
    """

    def __init__(
        self, work: Callable[[Any], Any], items: Iterable[tuple[Any, int]], room: int, n_threads: int = 1
    ) -> None:
        self._work, self._todo, self._room = work, OrderedDict(items), room
        self._started: dict[Any, tuple[Future[Any], int]] = {}
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name="inshrink-ahead", daemon=True)
            for _ in range(min(n_threads, len(self._todo)))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_ready)
                if not self._todo:
                    return
                item, nbytes = self._todo.popitem(last=False)
                self._room -= nbytes
                future: Future[Any] = Future()
                self._started[item] = future, nbytes
            try:
                future.set_result(self._work(item))
            except BaseException as error:
                future.set_exception(error)

    def _is_ready(self) -> bool:
        return not self._todo or next(iter(self._todo.values())) <= self._room

    def get(self, item: Any) -> Any:
        """Return the result of an item; computes it here if it was not begun, or was requested before."""
        with self._changed:
            self._todo.pop(item, None)
            future, nbytes = self._started.pop(item, (None, 0))
            self._changed.notify_all()
        if future is None:
            return self._work(item)
        result = future.result()
        with self._changed:
            self._room += nbytes
            self._changed.notify_all()
        return result

    def stop(self, *, wait: bool = False) -> None:
        """Begin no further items; with `wait`, wait for those in work."""
        with self._changed:
            self._todo.clear()
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()
