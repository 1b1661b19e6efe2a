"""Read one frame file: header, index and blocks, each verified before use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from inshrink_core.archive import layout
from inshrink_core.archive.document import unpack_value
from inshrink_core.archive.index import FrameIndex
from inshrink_core.archive.storage.blocks import CACHE, Span
from inshrink_core.archive.storage.contract import Storage, storage_errors
from inshrink_core.errors import DamagedError, InshrinkError, MissingFrameError, NotFoundError
from inshrink_core.frame import BlockEntry, FrameInfo, FramePart

_SUFFIX_NBYTES: Final = 4096
"""Size of the first read at the end of a frame: one page, enough for the trailer and an index of a few
hundred blocks.
"""

_AHEAD_NBYTES: Final = 1 << 16
"""Read-ahead for blocks that are read in order: opening a file takes longer than decoding a small tensor.
Each open frame buffers at most this much.
"""

_END_NBYTES: Final = 1 << 16
"""Read at the end of a remote frame: transferring this much takes no longer than the request itself."""

_COMPLETE_NBYTES: Final = 4 * _END_NBYTES
"""A remote frame of at most this size is read as a whole."""


class FrameFile(NamedTuple):
    """The place of a frame or part: a file, or `nbytes` bytes of a segment from `offset` on.

    If `digest` is known, reads use the block cache.
    """

    storage: Storage
    path: str
    offset: int | None = None
    nbytes: int = 0
    digest: bytes = b""

    @classmethod
    def of(cls, storage: Storage, part: FramePart) -> Self:
        """Return the place of a part of a frame that the archive lists."""
        digest = b"" if storage.n_at_once == 1 else part.digest
        return cls(storage, part.path, part.offset, part.nbytes, digest)

    @property
    def where(self) -> str:
        """The frame's name in messages."""
        at = "" if self.offset is None else f", offset {self.offset}"
        return f"{self.storage.name}, frame {self.path}{at}"

    def span(self, offset: int, nbytes: int) -> Span:
        """Return the span to prefetch for a range of bytes."""
        last = self.offset is None and offset + nbytes == self.nbytes
        return Span(self.digest, self.path, self.offset or 0, offset, nbytes, last)

    @property
    def ends(self) -> tuple[Span, ...]:
        """The spans that opening the frame reads: header and end, or all of a small frame."""
        if self.nbytes <= _COMPLETE_NBYTES:
            return (self.span(0, self.nbytes),)
        header = self.span(0, layout.FRAME_HEADER_NBYTES)
        return header, self.span(self.nbytes - _END_NBYTES, _END_NBYTES)

    def read(self, offset: int, nbytes: int, *, ahead: bool = False) -> bytes:
        """Read exactly `nbytes` bytes; a frame that vanished or shrank raises an Inshrink error.

        With `ahead`, return the following bytes too if these few are not in the block cache.
        """
        cached = CACHE.get(self.digest, offset, nbytes)
        if cached is not None:
            return cached
        begin = (self.offset or 0) + offset
        if ahead and nbytes < _AHEAD_NBYTES:
            with contextlib.suppress(OSError):  # the error may concern bytes behind the block only
                content = self.storage.read(self.path, begin, min(_AHEAD_NBYTES, self.nbytes - offset))
                if len(content) >= nbytes:
                    return content
        with _frame_errors(self.where):
            content = self.storage.read(self.path, begin, nbytes)
        if len(content) != nbytes:
            raise layout.damaged(
                f"the frame ends early, at offset {offset + len(content)}",
                self.where,
                expected=f"{nbytes} bytes from offset {offset}",
                found=f"{len(content)}",
            )
        return content


@contextlib.contextmanager
def _frame_errors(where: str) -> Iterator[None]:
    with storage_errors("the frame cannot be read", where):
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFrameError(
                "the frame's file is missing", where=where, remedy="fetch it from where the archive came from"
            ) from error


def read_envelope(file: FrameFile) -> tuple[layout.FrameHeader, layout.Trailer, bytes, bytes]:
    """Read and check everything around the blocks of a frame, in two or three small reads.

    Returns
    -------
    header, trailer, document, small
        The frame without its large blocks: the index document, and the small blocks.

    Raises
    ------
    MissingFrameError
        The file is missing.
    DamagedError, IncompatibleError
        The frame is damaged or incomplete, or its version is not supported.
    """

    def end_of(size: int) -> tuple[int, int]:
        return max(0, size - _SUFFIX_NBYTES), min(_SUFFIX_NBYTES, size)

    size = file.nbytes
    if file.offset is None and not CACHE.has(file.digest, *end_of(size)):
        with _frame_errors(file.where):
            size = file.storage.size(file.path)
    suffix = file.read(*end_of(size))
    try:
        start = file.read(0, min(layout.FRAME_HEADER_NBYTES, size))
        header = layout.FrameHeader.parse(start, file.where)
        fields = suffix[-layout.TRAILER_NBYTES :]
        trailer = layout.Trailer.parse(layout.FRAME, fields, size, file.where)
        beyond = size - trailer.offset
        tail = suffix[-beyond:] if beyond <= len(suffix) else file.read(trailer.offset, beyond)
        covered = tail[: -layout.TRAILER_NBYTES]
        if not trailer.covers(fields, start, covered):
            raise layout.damaged("the checksum of the frame's index does not match", file.where)
    except InshrinkError:
        CACHE.drop(file.digest)
        raise
    n_small = len(covered) - trailer.nbytes
    return header, trailer, covered[n_small:], covered[:n_small]


_CONTENT: Final = "content"
_MEMORY: Final = "memory"


def joined_memory(memories: Iterable[Any]) -> Any:
    """Merge the encoder state of several parts: maps are united, other values come from the first part.

    Examples
    --------
    >>> joined_memory([None, {"rate": 0.1, "held": {"a": 1}}, {"rate": 0.1, "held": {"b": 2}}])
    {'rate': 0.1, 'held': {'a': 1, 'b': 2}}
    """
    joined: dict[Any, Any] = {}
    for memory in memories:
        for name, value in memory.items() if isinstance(memory, dict) else ():
            before = joined.setdefault(name, value)
            if isinstance(before, dict) and isinstance(value, dict):
                joined[name] = before | value
    return joined or None


class FrameReader:
    """The blocks of one frame. Holds no open file; safe to share between threads.

    Parameters
    ----------
    storage
        The archive's storage.
    info
        The frame, as the archive lists it.
    indices
        The resolved index of each part, by part number.

    Raises
    ------
    DamagedError
        The parts contradict each other.

    Attributes
    ----------
    entries, tensors, attached
        All blocks in the frame's order; those of tensors, and the attachments.
    derived
        What a caller makes of the frame, to keep it as long as the frame is cached.
    """

    def __init__(self, storage: Storage, info: FrameInfo, indices: Mapping[int, FrameIndex]) -> None:
        self.info, self.indices = info, indices
        self.derived: Any = None
        self._where = f"{storage.name}, frame {info.path} (step {info.step})"
        self._files = {part.number: FrameFile.of(storage, part) for part in info.files}
        self._small_at = {
            number: min((entry.offset for entry in index.entries if entry.crc is None), default=0)
            for number, index in indices.items()
        }
        self._ahead: dict[int, tuple[int, bytes]] = {}
        self.entries: tuple[BlockEntry, ...] = _united(indices, self._where)
        self.tensors = tuple(entry for entry in self.entries if not entry.attachment)
        self.attached = tuple(entry for entry in self.entries if entry.attachment)
        self._by_key = {(entry.key, entry.attachment): entry for entry in self.entries}
        if len(self._by_key) != len(self.entries):
            raise layout.damaged("two parts of the frame hold the same block", self._where)

    @property
    def meta(self) -> dict[str, Any]:
        """A fresh copy of the metadata that the writer committed with the frame; sequences are lists.

        For a frame in several parts, the metadata that all parts share, and their merged encoder state.
        """
        apart = self.apart
        meta = {key: value for key, value in self.meta_of(min(self.indices)).items() if key not in apart}
        if _MEMORY in apart:
            meta[_MEMORY] = joined_memory(self.meta_of(part).get(_MEMORY) for part in sorted(self.indices))
        return meta

    @property
    def apart(self) -> frozenset[str]:
        """The keys of metadata that differ between parts; empty for a single part."""
        return frozenset().union(*map(self.differing_meta_of, self.indices))

    def meta_of(self, part: int) -> dict[str, Any]:
        """Return a fresh copy of the metadata committed with a part."""
        meta = self.indices[part].meta
        return {key: unpack_value(value, self._where, lists=True) for key, value in meta.items()}

    def differing_meta_of(self, part: int) -> frozenset[str]:
        """Return the keys of metadata in which a part differs from the first."""
        first, other = (self.indices[number].meta for number in (min(self.indices), part))
        return frozenset(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))

    def contradictions(self, part: int) -> frozenset[str]:
        """Return the keys of metadata in which a part contradicts the first.

        Content lists may differ; encoder states may hold different tensors, but not different values of one.
        """
        apart = self.differing_meta_of(part) - {_CONTENT}
        if _MEMORY in apart:
            first, other = (self.meta_of(number).get(_MEMORY) for number in (min(self.indices), part))
            apart -= {_MEMORY} if joined_memory([first, other]) == joined_memory([other, first]) else set()
        return apart

    @property
    def overhead_nbytes(self) -> int:
        """Bytes of the frame that are not payload: header, padding, index and trailer."""
        return self.info.nbytes - sum(entry.stored_nbytes for entry in self.entries)

    def entry(self, key: str, attachment: bool = False) -> BlockEntry:
        """Return the entry of a tensor or attachment.

        Raises
        ------
        NotFoundError
            The frame has no such block.
        """
        found = self.find(key, attachment)
        if found is None:
            raise NotFoundError(
                f"there is no {'attachment' if attachment else 'tensor'} '{key}' at step {self.info.step}",
                where=self._where,
                remedy="`inshrink inspect` lists the tensors",
            )
        return found

    def find(self, key: str, attachment: bool = False) -> BlockEntry | None:
        """Return the entry of a tensor or attachment; None if the frame does not have it."""
        return self._by_key.get((key, attachment))

    def spans(self, key: str, attachment: bool = False) -> list[Span]:
        """Return the span to prefetch for a block; none for a small block, which comes with the index."""
        entry = self.find(key, attachment)
        if entry is None or entry.crc is None:
            return []
        return [self._files[entry.part].span(entry.offset, entry.nbytes)]

    def read(self, entry: BlockEntry) -> bytes:
        """Return the payload of a block of this frame; consecutive neighbours share one read.

        Raises
        ------
        DamagedError
            The bytes end early, or their checksum does not match.
        MissingFrameError
            The frame was removed meanwhile.
        """
        if entry.crc is None:
            begin = entry.offset - self._small_at[entry.part]
            return self.indices[entry.part].small[begin : begin + entry.nbytes]
        file = self._files[entry.part]
        start, content = self._ahead.get(entry.part, (-layout.LARGE_ALIGNMENT, b""))
        begin = entry.offset - start
        if begin < 0 or begin + entry.nbytes > len(content):
            follows = 0 <= begin < len(content) + layout.LARGE_ALIGNMENT
            content, begin = file.read(entry.offset, entry.nbytes, ahead=follows), 0
        end = begin + entry.nbytes
        left = content if end < len(content) else b""
        self._ahead[entry.part] = (entry.offset - begin if left else entry.offset + entry.nbytes), left
        payload = content[begin:end]
        crc = layout.crc32c(payload)
        if crc != entry.crc:
            CACHE.drop(file.digest)
            raise DamagedError(
                f"the checksum of block '{entry.key}' at offset {entry.offset} does not match",
                where=f"{file.storage.name}, frame {file.path} (step {self.info.step})",
                expected=f"{entry.crc:#010x}",
                found=f"{crc:#010x}",
                remedy="restore the frame from a backup; `inshrink verify` lists every damaged block",
            )
        return payload


def _united(indices: Mapping[int, FrameIndex], where: str) -> tuple[BlockEntry, ...]:
    """Return the blocks of all present parts: the tensors in frame order, then the attachments."""
    if len(indices) == 1:
        return next(iter(indices.values())).entries
    tensors: dict[int, BlockEntry] = {}
    entries = [entry for index in indices.values() for entry in index.entries]
    attached = [entry for entry in entries if entry.attachment]
    for index in indices.values():
        rows = [entry for entry in index.entries if not entry.attachment]
        tensors.update(zip(index.places or (), rows, strict=True))
    if len(entries) - len(attached) != len(tensors):
        raise layout.damaged("two parts of the frame hold a tensor in the same place", where)
    if max(tensors, default=-1) >= len(tensors):
        raise layout.damaged("no part of the frame holds the tensor of some place", where)
    if any(entry.part for entry in attached):
        raise layout.damaged("a part that is not the first holds attachments", where)
    return (*(tensors[place] for place in sorted(tensors)), *attached)
