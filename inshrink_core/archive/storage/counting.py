"""What reading an archive asks of the place where it lies, counted as a bucket would be asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from inshrink_core.archive.storage.contract import Range, Storage

_Answer = TypeVar("_Answer")


class CountingStorage(Storage):
    """Another storage, to read from as if it were far away.

    Parameters
    ----------
    under
        Where the objects lie.

    Notes
    -----
    `requests` and `bytes_read` are of what was asked through it. `round_trips` are how often somebody waited:
    once for requests that are made at the same time, as long as they are no more than `n_at_once`. What two
    threads ask each on its own counts twice, so there may be fewer.
    """

    writable = False

    def __init__(self, under: Storage) -> None:
        super().__init__(under.name)
        self._under, self.n_at_once = under, max(under.n_at_once, Storage.n_at_once)
        self.round_trips = 0
        self._within = threading.local()

    def answer(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what one request is answered."""
        batch: list[None] | None = getattr(self._within, "batch", None)
        if batch is None:
            self._wait(1)
        else:
            batch.append(None)
        answer = call()
        self.counted(answer if isinstance(answer, bytes) else b"")
        return answer

    def _wait(self, n_trips: int) -> None:
        with self._counting:
            self.round_trips += n_trips

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        return self.answer(partial(self._under.read, path, offset, nbytes))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return self.answer(partial(self._under.size, path))

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        return self.answer(partial(self._under.names, folder))

    def whole(self, path: str) -> bytes:
        """Return all of a small object."""
        return self.answer(partial(self._under.whole, path))

    def ranges(self, asked: Sequence[Range]) -> Sequence[bytes | Exception]:
        """Return ranges of objects, asked for at the same time."""
        return self.together([partial(self.read, *one) for one in asked])

    def together(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Return what calls return, made at the same time."""
        batch: list[None] = []
        answers = super().together([partial(self._in_batch, batch, call) for call in calls])
        self._wait(-(-len(batch) // self.n_at_once))
        return answers

    def _in_batch(self, batch: list[None], call: Callable[[], _Answer]) -> _Answer:
        self._within.batch = batch
        try:
            return call()
        finally:
            self._within.batch = None
