"""Bytes that are fetched together before they are read, where every request is a wait.

What was fetched is held by the digest of the frame that it is of, for the whole process and within bounds:
a frame never changes, so whoever opens the same archive again need not ask for it again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, NamedTuple

from inshrink_core.archive.storage.contract import Range, Storage

MOST_AHEAD_NBYTES: Final = 64 << 20
"""Fetched in one go: of a chain, the frames as they are where they take no more."""

_WINDOW_NBYTES: Final = 32 << 20
"""Of a longer chain, the columns that are fetched while those before them are decoded."""

_GAP_NBYTES: Final = 1 << 18
"""Bytes between two spans that are rather read along than skipped by another request."""


class Span(NamedTuple):
    """Bytes of a frame.

    Parameters
    ----------
    digest
        Of the frame; nothing is held of one whose digest is not known.
    path, begin
        The object it lies in, and where it begins there.
    offset, nbytes
        Which bytes, counted from its begin.
    is_last
        Whether the object should end with them.
    """

    digest: bytes
    path: str
    begin: int
    offset: int
    nbytes: int
    is_last: bool = False

    @property
    def at(self) -> int:
        """Where the bytes begin in the object."""
        return self.begin + self.offset


class Held:
    """Spans of frames in memory; where they would be too many, those go that were used longest ago.

    Parameters
    ----------
    most_nbytes
        Of all of them.

    Examples
    --------
    >>> held = Held(100)
    >>> held.put(b"digest", 10, b"0123456789")
    >>> held.get(b"digest", 12, 3), held.get(b"digest", 12, 30)
    (b'234', None)
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most = most_nbytes
        self._spans: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def put(self, digest: bytes, offset: int, content: bytes) -> None:
        """Hold a span of a frame."""
        if not digest or len(content) > self._most:
            return
        with self._lock:
            spans = self._spans.setdefault(digest, {})
            self._nbytes += len(content) - len(spans.get(offset, b""))
            spans[offset] = content
            self._spans.move_to_end(digest)
            while self._nbytes > self._most:
                self._forget_one()

    def _forget_one(self) -> None:
        """Forget the oldest span of the frame that was used longest ago."""
        digest, spans = next(iter(self._spans.items()))
        self._nbytes -= len(spans.pop(next(iter(spans))))
        if not spans:
            del self._spans[digest]

    def get(self, digest: bytes, offset: int, nbytes: int) -> bytes | None:
        """Return bytes of a frame; None where they are not held."""
        found = self._find(digest, offset, nbytes)
        return None if found is None else found[1][offset - found[0] : offset - found[0] + nbytes]

    def has(self, digest: bytes, offset: int, nbytes: int) -> bool:
        """Tell whether bytes of a frame are held."""
        return self._find(digest, offset, nbytes) is not None

    def _find(self, digest: bytes, offset: int, nbytes: int) -> tuple[int, bytes] | None:
        with self._lock:
            for start, content in self._spans.get(digest, {}).items():
                if start <= offset and offset + nbytes <= start + len(content):
                    self._spans.move_to_end(digest)
                    return start, content
        return None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hold nothing of what was held before while the context is open, and it alone after."""
        with self._lock:
            kept, self._spans, self._nbytes = (self._spans, self._nbytes), OrderedDict(), 0
        try:
            yield
        finally:
            with self._lock:
                self._spans, self._nbytes = kept

    def clear(self) -> None:
        """Forget all of it."""
        with self._lock:
            self._spans.clear()
            self._nbytes = 0

    def drop(self, digest: bytes) -> None:
        """Forget a frame, whose bytes are not what they should be."""
        with self._lock:
            self._nbytes -= sum(map(len, self._spans.pop(digest, {}).values()))


ENDS: Final = Held(32 << 20)
"""Ends of frames, with their indexes."""

BLOCKS: Final = Held(2 * MOST_AHEAD_NBYTES)
"""What lies before them."""


def held_bytes(digest: bytes, offset: int, nbytes: int) -> bytes | None:
    """Return bytes of a frame, from wherever they are held; None where they are not."""
    found = ENDS.get(digest, offset, nbytes)
    return BLOCKS.get(digest, offset, nbytes) if found is None else found


def is_held(digest: bytes, offset: int, nbytes: int) -> bool:
    """Tell whether bytes of a frame are in memory."""
    return ENDS.has(digest, offset, nbytes) or BLOCKS.has(digest, offset, nbytes)


@contextmanager
def nothing_held() -> Iterator[None]:
    """Read as a process does that has just begun."""
    with ENDS.aside(), BLOCKS.aside():
        yield


def forget_all() -> None:
    """Hold nothing: what is read from now on is what lies there."""
    ENDS.clear()
    BLOCKS.clear()


def forget(digest: bytes) -> None:
    """Hold nothing of a frame."""
    ENDS.drop(digest)
    BLOCKS.drop(digest)


def fetch(storage: Storage, spans: Iterable[Span], held: Held = BLOCKS) -> None:
    """Have spans in memory that are not there yet, in one round trip and as few requests as there can be.

    What cannot be fetched is not held: whoever reads it is told why.

    Parameters
    ----------
    storage
        Where the frames lie.
    spans
        Bytes of any frames in it.
    held
        Where they are held.
    """
    missing = [s for s in dict.fromkeys(spans) if s.digest and not is_held(s.digest, s.offset, s.nbytes)]
    groups = list(_near(sorted(missing, key=lambda span: (span.path, span.at))))
    asked = [Range(path, at, end - at + is_last) for path, at, end, is_last, _ in groups]
    for group, content in zip(groups, storage.ranges(asked), strict=True):
        if isinstance(content, Exception) or len(content) != group.end - group.at:
            continue  # an object that is longer than it should be, or shorter, is looked at when it is read
        for (digest, begin), members in group.frames.items():
            first, last = members[0], max(members, key=lambda span: span.offset + span.nbytes)
            part = content[first.at - group.at : begin + last.offset + last.nbytes - group.at]
            held.put(digest, first.offset, part)


class _Group(NamedTuple):
    """Spans of one object that are read with one request."""

    path: str
    at: int
    end: int
    is_last: bool
    frames: dict[tuple[bytes, int], list[Span]]


def _near(spans: Sequence[Span]) -> Iterator[_Group]:
    """Yield spans that lie near each other together; they are sorted."""
    group: _Group | None = None
    for span in spans:
        end = span.at + span.nbytes
        if group is None or span.path != group.path or span.at > group.end + _GAP_NBYTES:
            if group is not None:
                yield group
            group = _Group(span.path, span.at, end, span.is_last, {})
        else:
            group = group._replace(end=max(end, group.end), is_last=group.is_last or span.is_last)
        group.frames.setdefault((span.digest, span.begin), []).append(span)
    if group is not None:
        yield group


class Windows:
    """Columns of spans that are used about in their order: fetched some at a time, the next ones ahead.

    Parameters
    ----------
    storage
        Where the frames lie.
    columns
        What each of them reads, by its name. One that is larger than can be held is left to its reader.

    Notes
    -----
    At most three windows of 32 MB are in memory that were not used up: the one in use, the one that is
    fetched meanwhile, and what was left of the one before.
    """

    def __init__(self, storage: Storage, columns: Mapping[str, Sequence[Span]]) -> None:
        self._storage = storage
        self._windows: list[list[Span]] = []
        self._window_of: dict[str, int] = {}
        room = 0
        for name, spans in columns.items():
            nbytes = sum(span.nbytes for span in spans)
            if nbytes > MOST_AHEAD_NBYTES:
                continue
            if not self._windows or nbytes > room:
                self._windows.append([])
                room = _WINDOW_NBYTES
            self._windows[-1] += spans
            self._window_of[name] = len(self._windows) - 1
            room -= nbytes
        self._fetching: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inshrink-ahead")

    def need(self, name: str) -> bool:
        """Have a column in memory; False where it is none of these."""
        number = self._window_of.get(name)
        if number is None:
            return False
        with self._lock:
            for ahead in range(number, min(number + 2, len(self._windows))):
                if ahead not in self._fetching:
                    spans = self._windows[ahead]
                    self._fetching[ahead] = self._pool.submit(fetch, self._storage, spans)
        self._fetching[number].result()
        return True

    def close(self) -> None:
        """Fetch nothing more."""
        self._pool.shutdown(cancel_futures=True)
