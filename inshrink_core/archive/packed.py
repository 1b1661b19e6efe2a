"""Reading a packed archive: one file that answers as the folder would, by ranges."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Final, Protocol

from inshrink_core.archive.pack_layout import (
    PACK_HEADER_NBYTES,
    PACK_MAGIC,
    PACK_TRAILER_MAGIC,
    PACK_TRAILER_NBYTES,
    PackTrailer,
    align_file,
    parse_directory,
    parse_header,
)
from inshrink_core.errors import DamagedError

__all__ = ["LocalFile", "PackedStorage", "RangeFile", "is_packed"]

_SUFFIX_NBYTES: Final = 64 << 10
"""First read at the end: trailer, directory and manifest of some hundred frames, in one request."""


class RangeFile(Protocol):
    """One file that is read by ranges; may be shared between threads."""

    name: str
    """The file, for messages."""

    nbytes: int
    """Its size."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        ...


class LocalFile:
    """A file of a local or mounted file system, held open: replacing it changes nothing for its reader.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self.nbytes = os.fstat(self._descriptor).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        chunks = []
        while nbytes > 0:
            chunk = os.pread(self._descriptor, nbytes, offset)
            if not chunk:
                break
            chunks.append(chunk)
            offset += len(chunk)
            nbytes -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def is_packed(path: Path) -> bool:
    """Tell whether a local file is a packed archive, by its first bytes; or, damaged there, by its last."""
    if not path.is_file():
        return False
    with path.open("rb", buffering=0) as file:
        if file.read(len(PACK_MAGIC)) == PACK_MAGIC:
            return True
        file.seek(-min(len(PACK_TRAILER_MAGIC), path.stat().st_size), os.SEEK_END)
        return file.read() == PACK_TRAILER_MAGIC


class PackedStorage:
    """The storage of a packed archive (`inshrink_core.archive.storage.Storage`).

    Parameters
    ----------
    file
        The one file.

    Raises
    ------
    DamagedError
        Header, directory or trailer are not valid.
    IncompatibleError
        A newer version packed it.

    Notes
    -----
    Opening takes two reads, of the first 16 bytes and of the last 64 kB. What lies in the latter, as
    the manifest does in most archives, is not read again.
    """

    def __init__(self, file: RangeFile) -> None:
        self.name = file.name
        self.bytes_read = 0
        self._file = file
        self._counting = threading.Lock()
        header = self._fetch(0, min(PACK_HEADER_NBYTES, file.nbytes))
        parse_header(header, self.name)
        start = max(file.nbytes - _SUFFIX_NBYTES, PACK_HEADER_NBYTES)
        self._suffix_offset, self._suffix = start, self._fetch(start, file.nbytes - start)
        tail = self._suffix[-PACK_TRAILER_NBYTES:]
        trailer = PackTrailer.parse(tail, file.nbytes, self.name)
        directory = self._range(trailer.directory_offset, trailer.directory_nbytes)
        trailer.check_crc(tail, header, directory, self.name)
        self._files = {found.path: found for found in parse_directory(directory, trailer, self.name)}

    @property
    def overhead_nbytes(self) -> int:
        """Bytes of the file that belong to none of the archive's: header, padding, directory, trailer."""
        return self._file.nbytes - sum(found.nbytes for found in self._files.values())

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the packed file's own part ends."""
        found = self._files.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return self._range(found.offset + offset, max(0, min(nbytes, found.nbytes - offset)))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path].nbytes

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        parts = [path.rpartition("/") for path in self._files]
        return tuple(sorted(name for parent, _, name in parts if parent == folder))

    def stray_padding(self) -> tuple[str, ...]:
        """Return the files with bytes other than zero before them, where there should be padding."""
        end, found = PACK_HEADER_NBYTES, []
        for packed in self._files.values():
            if any(self._range(end, align_file(end) - end)):
                found.append(packed.path)
            end = packed.offset + packed.nbytes
        return tuple(found)

    def _range(self, offset: int, nbytes: int) -> bytes:
        """Return a span of the packed file, from memory where the first read brought it."""
        if offset >= self._suffix_offset:
            begin = offset - self._suffix_offset
            return self._suffix[begin : begin + nbytes]
        return self._fetch(offset, nbytes)

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        content = self._file.read(offset, nbytes)
        with self._counting:
            self.bytes_read += len(content)
        if len(content) != nbytes:
            raise DamagedError(
                f"the packed archive ends early, at offset {offset + len(content)}", where=self.name
            )
        return content
