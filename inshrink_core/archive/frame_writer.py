"""Writing one frame: blocks are passed to the storage at once, the name appears when all is durable."""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from inshrink_core.archive.document import compress_document, pack_value
from inshrink_core.archive.index import (
    INDEX_DICTIONARY,
    MAX_ATTRIBUTES,
    BlockColumns,
    FrameIndex,
    SmallBlocks,
    pack_index,
)
from inshrink_core.archive.layout import (
    FRAME,
    TRAILER_NBYTES,
    FrameHeader,
    Trailer,
    align,
    crc32c,
    joined,
)
from inshrink_core.archive.storage import Creation, Storage, storage_errors
from inshrink_core.errors import InputError
from inshrink_core.frame import FrameInfo


class FrameSink(ABC):
    """A frame that is being written, in one part or in several; it is dropped unless it is committed.

    Parameters
    ----------
    release
        Called once the frame is committed or aborted.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release, self._open = release, True

    @abstractmethod
    def add(
        self,
        key: str,
        codec: str,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: tuple[Any, ...] = (),
        attachment: bool = False,
        place: int | None = None,
    ) -> None:
        """Append a block (`FrameWriter.add`)."""

    @abstractmethod
    def commit(self, meta: Mapping[str, Any]) -> FrameInfo:
        """Make the frame durable and list it (`FrameWriter.commit`)."""

    @abstractmethod
    def _drop(self) -> None:
        """Leave nothing of what was written."""

    def abort(self) -> None:
        """Drop the frame; harmless after `commit`."""
        if self._open:
            self._close()
            self._drop()

    def _close(self) -> None:
        self._open = False
        self._release()

    @contextlib.contextmanager
    def _aborting(self, what: str, where: str) -> Iterator[None]:
        """Leave nothing of the frame where something fails."""
        try:
            with storage_errors(what, where):
                yield
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()


class FrameWriter(FrameSink):
    """One frame being written; made by `ArchiveWriter.begin`.

    As a context manager it aborts on an exception, and when `commit` was not called. Memory is
    bounded by one payload, the small blocks (64 KiB) and the index.

    Parameters
    ----------
    file
        Where its bytes go.
    where
        The archive, for messages.
    header
        What the frame is.
    parent
        Resolved index of the parent, from which a delta frame inherits; None in a keyframe.
    publish
        Called with the frame once all bytes are written; commits the file and lists the frame.
    release
        Called once the frame is committed or aborted.
    """

    def __init__(
        self,
        file: Creation,
        where: str,
        header: FrameHeader,
        parent: FrameIndex | None,
        publish: Callable[[FrameInfo], None],
        release: Callable[[], None],
    ) -> None:
        super().__init__(release)
        self._file = file
        self._header, self._parent, self._publish = header, parent, publish
        self.where = f"{where}, frame of step {header.step}"
        self._seen: set[tuple[str, bool]] = set()
        self._columns: tuple[list[Any], list[Any]] = ([], [])
        self._runs = [0]
        self._nbytes: list[int] = []
        self._back: list[int] = []
        self._crcs: list[int] = []
        self._small = SmallBlocks()
        self._places: list[int] = []
        self._digest = hashlib.sha256()
        self._offset = 0
        self._write(header.pack())

    def add(
        self,
        key: str,
        codec: str,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: tuple[Any, ...] = (),
        attachment: bool = False,
        place: int | None = None,
    ) -> None:
        """Append a block; its bytes go to the file before this returns, but those of a small one.

        Parameters
        ----------
        key
            Unique among the tensors, or among the attachments, of the frame.
        codec
            Bitstream of the payload, ``name/version``.
        payload
            The bytes; not kept.
        attributes
            At most 16 msgpack values; sequences inside come back as tuples.
        attachment
            True for opaque bytes of the rest, False for a tensor.
        place
            Of a tensor in a part: which of the frame's tensors it is, each above the one before; by default
            the next.

        Raises
        ------
        InputError
            There is such a key already, or its place is not above the last, a value cannot be stored, or the
            frame is closed.
        StorageError
            The system refused, as on a full disk; the frame is aborted.
        """
        self._require_open()
        if (key, attachment) in self._seen:
            raise InputError(f"block '{key}' was added twice", where=self.where)
        if len(attributes) > MAX_ATTRIBUTES:
            raise InputError(
                f"block '{key}' has too many attributes",
                where=self.where,
                expected=f"at most {MAX_ATTRIBUTES}",
                found=f"{len(attributes)}",
            )
        if not (isinstance(key, str) and isinstance(codec, str)):
            raise InputError("key and codec of a block are text", where=self.where)
        following = self._places[-1] + 1 if self._places else 0
        if place is not None and place < following:
            raise InputError(
                f"block '{key}' is not in the frame's order",
                where=self.where,
                expected=f"a place from {following} on",
                found=f"{place}",
            )
        pack_value([key, codec, attributes])
        content = _as_bytes(payload)
        back = self._small.add(len(self._nbytes), content)
        if back is None:
            padding = align(self._offset, len(content)) - self._offset
            self._write(bytes(padding))
            self._write(content)
            self._crcs.append(crc32c(content))
        if (len(self._runs) % 2 == 0) != attachment:  # the last run is of the other sort
            self._runs.append(0)
        self._runs[-1] += 1
        self._seen.add((key, attachment))
        if not attachment:
            self._places.append(following if place is None else place)
        self._columns[attachment].append((key, codec, attributes))
        self._nbytes.append(len(content))
        self._back.append(back or 0)

    def commit(self, meta: Mapping[str, Any]) -> FrameInfo:
        """Write the index, make the frame durable, and list it in the manifest.

        A writer that groups frames makes a small one durable later (`ArchiveWriter.flush`).

        Parameters
        ----------
        meta
            What describes the frame, by key: msgpack values, maps with text keys. A delta frame
            stores only what differs from its parent's.

        Raises
        ------
        InputError
            A value cannot be stored, or the frame is closed.
        StorageError
            The system refused; the archive is as it was before the frame.
        """
        self._require_open()
        if not all(isinstance(key, str) for key in meta):
            raise InputError("meta has text keys only", where=self.where)
        index = FrameIndex(
            _columns(self._columns[0]),
            _columns(self._columns[1]),
            tuple(self._runs),
            tuple(self._nbytes),
            tuple(self._crcs),
            {key: pack_value(value) for key, value in meta.items()},
            tuple(self._back),
            places=tuple(self._places) if self._header.n_parts > 1 else None,
        )
        raw = pack_index(index, self._parent)
        info = self._finish(compress_document(raw, INDEX_DICTIONARY), len(raw))
        with self._aborting("the frame cannot be committed", self.where):
            self._publish(info)
        self._close()
        return info

    def _drop(self) -> None:
        self._file.abort()

    def drop(self) -> None:
        """Drop the frame, and what was not published of it, too."""
        self.abort()
        self._file.abort()

    def _finish(self, document: bytes, raw_nbytes: int) -> FrameInfo:
        """Write what follows the large blocks."""
        tail = bytes(self._small.content) + document
        file_nbytes = self._offset + len(tail) + TRAILER_NBYTES
        trailer = Trailer(self._offset, file_nbytes, len(document), raw_nbytes)
        self._write(tail)
        self._write(trailer.pack(FRAME, self._header.pack(), tail))
        return self._header.info(self._offset, self._digest.digest())

    def _write(self, content: bytes | memoryview) -> None:
        with self._aborting("the frame cannot be written", self.where):
            self._file.write(content)
        self._digest.update(content)
        self._offset += len(content)

    def _require_open(self) -> None:
        if not self._open:
            raise InputError("the frame was committed or aborted already", where=self.where)


class PartedFrameWriter(FrameSink):
    """A frame in several parts that one writer writes.

    Parameters
    ----------
    parts
        Each writes one part, and publishes nothing.
    publish
        Called with the frame once all parts are written.
    release
        Called once the frame is committed or aborted.
    route
        Returns the part of a tensor by its key.
    apart
        By part, what its meta says beside the frame's.
    """

    def __init__(
        self,
        parts: Sequence[FrameWriter],
        publish: Callable[[FrameInfo], None],
        release: Callable[[], None],
        route: Callable[[str], int],
        apart: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(release)
        self._parts, self._publish = parts, publish
        self._route, self._apart = route, apart or ({},) * len(parts)
        self._where = parts[0].where
        self._next = 0

    def add(
        self,
        key: str,
        codec: str,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: tuple[Any, ...] = (),
        attachment: bool = False,
        place: int | None = None,
    ) -> None:
        """Append a block to its part (`FrameWriter.add`)."""
        place = self._next if place is None else place
        with self._aborting("the frame cannot be written", self._where):
            part = self._parts[0 if attachment else self._route(key)]
            part.add(key, codec, payload, attributes=attributes, attachment=attachment, place=place)
            if not attachment:
                self._next = place + 1

    def commit(self, meta: Mapping[str, Any]) -> FrameInfo:
        """Write every part, make all of them durable, and list the frame (`FrameWriter.commit`)."""
        with self._aborting("the frame cannot be committed", self._where):
            rows = [part.commit({**meta, **own}) for part, own in zip(self._parts, self._apart, strict=True)]
            info = joined(rows)
            self._publish(info)
        self._close()
        return info

    def _drop(self) -> None:
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.drop)


def begin_frame(
    storage: Storage,
    header: FrameHeader,
    parents: Mapping[int, FrameIndex],
    publish: Callable[[Sequence[Creation], FrameInfo], None],
    release: Callable[[], None],
    *,
    route: Callable[[str], int] = lambda key: 0,
    apart: Sequence[Mapping[str, Any]] = (),
    grouped: Callable[[Storage, str], Creation] | None = None,
) -> FrameSink:
    """Begin the files of a frame.

    Parameters
    ----------
    storage, header
        Where it lies, and what it is: of its parts, the first, and how many there are.
    parents
        What each part inherits from, by number; nothing in a keyframe.
    publish
        Called with the files and the frame, when all of it is written.
    release
        Called once the frame is committed or aborted.
    route, apart
        As of `PartedFrameWriter`.
    grouped
        Makes the file of a frame in one part; by default the storage.
    """
    if header.n_parts == 1:
        with storage_errors("the frame cannot be written", storage.name):
            file = storage.create(header.path) if grouped is None else grouped(storage, header.path)
        return FrameWriter(
            file, storage.name, header, parents.get(0), lambda info: publish([file], info), release
        )
    files: list[Creation] = []
    parts: list[FrameWriter] = []
    with contextlib.ExitStack() as stack:
        for number in range(header.n_parts):
            own = header._replace(part=number)
            with storage_errors("the frame cannot be written", storage.name):
                files.append(stack.enter_context(storage.create(own.path)))
            parts.append(
                FrameWriter(files[-1], storage.name, own, parents.get(number), _nothing, _nothing_done)
            )
        stack.pop_all()
    return PartedFrameWriter(parts, lambda info: publish(files, info), release, route, apart)


def _nothing(info: FrameInfo) -> None:
    """Publish nothing: the parts are published together."""


def _nothing_done() -> None:
    """Release nothing."""


def _as_bytes(payload: bytes | bytearray | memoryview) -> bytes | memoryview:
    """View any buffer as bytes; an empty one cannot be cast."""
    if isinstance(payload, bytes):
        return payload
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else b""


def _columns(blocks: list[Any]) -> BlockColumns:
    return BlockColumns(*zip(*blocks, strict=True)) if blocks else BlockColumns()
