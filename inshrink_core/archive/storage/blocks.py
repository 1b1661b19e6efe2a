"""The block cache: bytes of frames, fetched from remote storage in few requests.

The cache is keyed by frame digest, shared by the process and bounded in size. Frames never change, so an
archive that is opened again fetches none of them twice.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from inshrink_core.archive.storage.contract import Storage
from inshrink_core.execution.prefetch import Prefetcher

MAX_PREFETCH_NBYTES: Final = 64 << 20
"""Largest prefetch: a chain up to this size is fetched with complete frames."""

_WINDOW_NBYTES: Final = 32 << 20
"""Longer chains are fetched in windows of columns of this size, while earlier ones are decoded."""

_GAP_NBYTES: Final = 1 << 18
"""A smaller gap between two spans is read along instead of split into another request."""


class Span(NamedTuple):
    """Bytes of a frame.

    Parameters
    ----------
    digest
        SHA-256 of the frame; if empty, nothing is cached.
    path, begin
        The object, and the frame's offset in it.
    offset, nbytes
        The range of bytes in the frame.
    is_last
        Whether the object should end with these bytes.
    """

    digest: bytes
    path: str
    begin: int
    offset: int
    nbytes: int
    is_last: bool = False

    @property
    def at(self) -> int:
        """Offset of the bytes in the object."""
        return self.begin + self.offset


class BlockCache:
    """Spans of frames in memory; evicts the least recently used frame first.

    Parameters
    ----------
    max_nbytes
        Capacity in bytes.

    Examples
    --------
    >>> cache = BlockCache(100)
    >>> cache.put(b"digest", 10, b"0123456789")
    >>> cache.get(b"digest", 12, 3), cache.get(b"digest", 12, 30)
    (b'234', None)
    """

    def __init__(self, max_nbytes: int) -> None:
        self._most = max_nbytes
        self._spans: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def put(self, digest: bytes, offset: int, content: bytes) -> None:
        """Cache a span of a frame."""
        if not digest or len(content) > self._most:
            return
        with self._lock:
            spans = self._spans.setdefault(digest, {})
            self._nbytes += len(content) - len(spans.get(offset, b""))
            spans[offset] = content
            self._spans.move_to_end(digest)
            while self._nbytes > self._most:
                oldest, spans = next(iter(self._spans.items()))
                self._nbytes -= len(spans.pop(next(iter(spans))))
                if not spans:
                    del self._spans[oldest]

    def get(self, digest: bytes, offset: int, nbytes: int) -> bytes | None:
        """Return bytes of a frame; None if they are not cached."""
        found = self._find(digest, offset, nbytes)
        return None if found is None else found[1][offset - found[0] : offset - found[0] + nbytes]

    def has(self, digest: bytes, offset: int, nbytes: int) -> bool:
        """Return whether bytes of a frame are cached."""
        return self._find(digest, offset, nbytes) is not None

    def _find(self, digest: bytes, offset: int, nbytes: int) -> tuple[int, bytes] | None:
        with self._lock:
            for start, content in self._spans.get(digest, {}).items():
                if start <= offset and offset + nbytes <= start + len(content):
                    self._spans.move_to_end(digest)
                    return start, content
        return None

    def drop(self, digest: bytes) -> None:
        """Remove a frame."""
        with self._lock:
            self._nbytes -= sum(map(len, self._spans.pop(digest, {}).values()))

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._spans.clear()
            self._nbytes = 0


CACHE: Final = BlockCache(3 * MAX_PREFETCH_NBYTES)
"""The cache of this process."""


def fetch(storage: Storage, spans: Iterable[Span]) -> None:
    """Cache spans that are not cached yet, in one round trip and as few requests as possible.

    A failed request caches nothing; the later read raises the error.

    Parameters
    ----------
    storage
        The storage of the frames.
    spans
        Bytes of any frames in it.
    """
    missing = [s for s in dict.fromkeys(spans) if s.digest and not CACHE.has(s.digest, s.offset, s.nbytes)]
    if not missing:
        return
    groups = list(_near(sorted(missing, key=lambda span: (span.path, span.at))))
    lengths = [max(span.at + span.nbytes for span in group) - group[0].at for group in groups]
    # One extra byte at the expected end of an object must not exist.
    asked = (
        length + any(span.is_last for span in group) for group, length in zip(groups, lengths, strict=True)
    )
    reads = [
        partial(storage.read, g[0].path, g[0].at, nbytes) for g, nbytes in zip(groups, asked, strict=True)
    ]
    for group, length, content in zip(groups, lengths, storage.together(reads), strict=True):
        if isinstance(content, Exception) or len(content) != length:
            continue  # reading the object raises the error
        frames: dict[tuple[bytes, int], list[Span]] = {}
        for span in group:
            frames.setdefault((span.digest, span.begin), []).append(span)
        for (digest, begin), members in frames.items():
            end = begin + max(span.offset + span.nbytes for span in members)
            CACHE.put(digest, members[0].offset, content[members[0].at - group[0].at : end - group[0].at])


def _near(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Group sorted spans by object and proximity, one group per request."""
    group: list[Span] = []
    end = 0
    for span in spans:
        if group and (span.path != group[0].path or span.at > end + _GAP_NBYTES):
            yield group
            group, end = [], 0
        group.append(span)
        end = max(end, span.at + span.nbytes)
    if group:
        yield group


class Windows:
    """A prefetcher of span columns that are used approximately in order.

    Parameters
    ----------
    storage
        The storage of the frames.
    columns
        The spans of each column, by name. Columns larger than 64 MiB are not prefetched.

    Notes
    -----
    At most three windows of 32 MiB are in memory: one in use and two ahead.
    """

    def __init__(self, storage: Storage, columns: Mapping[str, Sequence[Span]]) -> None:
        windows: list[list[Span]] = []
        self._window_of: dict[str, int] = {}
        room = 0
        for name, spans in columns.items():
            nbytes = sum(span.nbytes for span in spans)
            if nbytes > MAX_PREFETCH_NBYTES:
                continue
            if not windows or nbytes > room:
                windows.append([])
                room = _WINDOW_NBYTES
            windows[-1] += spans
            self._window_of[name] = len(windows) - 1
            room -= nbytes
        sizes = [(i, sum(span.nbytes for span in spans)) for i, spans in enumerate(windows)]
        self._ready: set[int] = set()
        self._lock = threading.Lock()
        self._ahead = Prefetcher(lambda i: fetch(storage, windows[i]), sizes, 2 * _WINDOW_NBYTES)
        weakref.finalize(self, self._ahead.stop)

    def need(self, name: str) -> bool:
        """Wait until a column is cached; return False for a column that is not prefetched."""
        number = self._window_of.get(name)
        if number is None:
            return False
        with self._lock:
            if number not in self._ready:
                self._ahead.get(number)
                self._ready.add(number)
        return True

    def close(self) -> None:
        """Stop fetching."""
        self._ahead.stop(wait=True)
