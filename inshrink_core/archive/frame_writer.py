"""Write one frame: blocks go to the storage at once; the file appears under its name when all are durable."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from inshrink_core.archive import layout
from inshrink_core.archive.document import compress_document, pack_value
from inshrink_core.archive.index import INDEX_DICTIONARY, MAX_ATTRIBUTES, FrameIndex, IndexBuilder, pack_index
from inshrink_core.archive.storage.contract import Creation, Storage, storage_errors
from inshrink_core.errors import InputError
from inshrink_core.frame import FrameInfo


class _FrameFile:
    """One file of a frame being written: the whole frame or a part."""

    def __init__(self, file: Creation, header: layout.FrameHeader, parent: FrameIndex | None) -> None:
        self.file, self.index = file, IndexBuilder()
        self._header, self._parent = header, parent
        self._digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self.file.write(content)
        self._digest.update(content)

    def finish(self, meta: Mapping[str, Any]) -> FrameInfo:
        """Write the small blocks, the index and the trailer."""
        raw = pack_index(self.index.finish(meta, several=self._header.frame.n_parts > 1), self._parent)
        document = compress_document(raw, INDEX_DICTIONARY)
        tail = bytes(self.index.small) + document
        file_nbytes = self.index.end + len(tail) + layout.TRAILER_NBYTES
        trailer = layout.Trailer(self.index.end, file_nbytes, len(document), len(raw))
        self.write(tail)
        self.write(trailer.pack(layout.FRAME, self._header.pack(), tail))
        return self._header.listed(file_nbytes, self._digest.digest())


class FrameWriter(AbstractContextManager["FrameWriter", None]):
    """A frame being written, in one file or several parts; created by `ArchiveWriter.begin`.

    As a context manager it aborts the frame on an exception, and if `commit` was not called. Memory use is
    bounded by one payload, the small blocks (64 KiB) and the index.

    Parameters
    ----------
    storage
        The archive's storage.
    headers
        Header of each file to write.
    parents
        Resolved index of each part of the parent, by part number, from which a delta frame inherits.
    publish
        Function that commits and lists the frame; called with the files and the frame once all bytes are
        written.
    route
        Function that returns the file's position for a tensor, given its key.
    apart
        Additional metadata of each file.
    create
        Function that creates a file; by default that of the storage.
    """

    def __init__(
        self,
        storage: Storage,
        headers: Sequence[layout.FrameHeader],
        parents: Mapping[int, FrameIndex],
        publish: Callable[[Sequence[Creation], FrameInfo], None],
        *,
        route: Callable[[str], int] = lambda key: 0,
        apart: Sequence[Mapping[str, Any]] = (),
        create: Callable[[str], Creation] | None = None,
    ) -> None:
        self.where = f"{storage.name}, frame of step {headers[0].frame.step}"
        self._publish, self._route = publish, route
        self._apart = apart or ({},) * len(headers)
        self._seen: set[tuple[str, bool]] = set()
        self._next, self.is_open = 0, True
        self._files: list[_FrameFile] = []
        with self._aborting("the frame cannot be written", storage.name):
            for header in headers:
                created = (create or storage.create)(header.path)
                self._files.append(_FrameFile(created, header, parents.get(header.part)))
                self._files[-1].write(header.pack())

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
        """Append a block; its bytes are written before the call returns, except those of a small block.

        Parameters
        ----------
        key
            Unique among the tensors, or among the attachments, of the frame.
        codec
            Bitstream of the payload, ``name/version``.
        payload
            The bytes; the writer holds no reference to them.
        attributes
            At most 16 msgpack values; sequences among them are read back as tuples.
        attachment
            True for opaque bytes, False for a tensor.
        place
            Position of a tensor among those of the frame, above that of the tensor before it; by default the
            next position.

        Raises
        ------
        InputError
            The key exists already, the place is not above the last one, a value cannot be stored, or the
            frame is closed.
        StorageError
            The storage refused, for example because the disk is full; the frame is aborted.
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
        place = self._next if place is None else place
        if place < self._next:
            raise InputError(
                f"block '{key}' is not in the frame's order",
                where=self.where,
                expected=f"a place from {self._next} on",
                found=f"{place}",
            )
        pack_value([key, codec, attributes])
        content = payload if isinstance(payload, bytes) else memoryview(payload)
        if isinstance(content, memoryview):
            content = content.cast("B") if content.nbytes else b""  # an empty view cannot be cast
        with self._aborting("the frame cannot be written", self.where):
            file = self._files[0 if attachment else self._route(key)]
            padding = file.index.add((key, codec, attributes), content, None if attachment else place)
            if padding is not None:
                file.write(bytes(padding))
                file.write(content)
        self._seen.add((key, attachment))
        if not attachment:
            self._next = place + 1

    def commit(self, meta: Mapping[str, Any]) -> FrameInfo:
        """Write the index, make the frame durable, and list it in the manifest.

        A writer that groups frames makes a small frame durable later (`ArchiveWriter.flush`).

        Parameters
        ----------
        meta
            Metadata of the frame, by key: msgpack values, maps with text keys. A delta frame stores only the
            differences from its parent.

        Raises
        ------
        InputError
            A value cannot be stored, or the frame is closed.
        StorageError
            The storage refused; the archive is as it was before the frame.
        """
        self._require_open()
        with self._aborting("the frame cannot be committed", self.where):
            rows = [
                file.finish({**meta, **extra}) for file, extra in zip(self._files, self._apart, strict=True)
            ]
            info = layout.joined(rows)
            self._publish([file.file for file in self._files], info)
        self.is_open = False
        return info

    def abort(self) -> None:
        """Discard the frame; does nothing after `commit`."""
        if self.is_open:
            self.is_open = False
            with contextlib.ExitStack() as stack:
                for file in self._files:
                    stack.callback(file.file.abort)

    @contextlib.contextmanager
    def _aborting(self, what: str, where: str) -> Iterator[None]:
        try:
            with storage_errors(what, where):
                yield
        except BaseException:
            self.abort()
            raise

    def _require_open(self) -> None:
        if not self.is_open:
            raise InputError("the frame was committed or aborted already", where=self.where)

    def __exit__(self, *error: object) -> None:
        self.abort()
