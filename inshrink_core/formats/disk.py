"""Bytes from files: counted, bounded, and never a surprise from the operating system."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from inshrink_core.errors import DamagedError, NotFoundError, StorageError

__all__ = ["ByteCounter", "FileStamp", "ReadableFile", "stamp_of"]


class ByteCounter:
    """Bytes read from disk so far, added up from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes read so far."""
        return self._total

    def add(self, n_bytes: int) -> None:
        """Count some more bytes."""
        with self._lock:
            self._total += n_bytes


class FileStamp(NamedTuple):
    """What tells that a file is still the same: where it really lies, its size and its time."""

    real_path: str
    nbytes: int
    mtime_ns: int


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a regular file, links followed.

    Raises
    ------
    NotFoundError
        There is no regular file at the path.
    StorageError
        The file system refuses.
    """
    try:
        found = path.stat()
        real_path = os.path.realpath(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such file", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"the file cannot be looked at: {error}", where=str(path)) from error
    if not stat.S_ISREG(found.st_mode):
        raise NotFoundError("not a regular file", where=str(path))
    return FileStamp(real_path, found.st_size, found.st_mtime_ns)


class ReadableFile:
    """An open file that is read by position; use it as a context manager.

    Parameters
    ----------
    path
        The file.
    counter
        Told of every byte read.
    unchanged
        Stamp the file must still have, so that an offset found earlier still means the same. The file it
        was taken of is opened, wherever a link in `path` may lead by now.

    Raises
    ------
    DamagedError
        The file changed since `unchanged`, or is shorter than a read wants.
    """

    def __init__(self, path: Path, counter: ByteCounter, unchanged: FileStamp | None = None) -> None:
        self.path, self._counter = path, counter
        # Not blocking: a pipe in the place of a checkpoint must not hang the reader.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        flags |= 0 if unchanged is None else getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor = os.open(path if unchanged is None else unchanged.real_path, flags)
        except FileNotFoundError as error:
            raise NotFoundError("there is no such file any more", where=str(path)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"the file cannot be opened: {reason}", where=str(path)) from error
        found = os.fstat(self._descriptor)
        self.nbytes = found.st_size
        if unchanged is not None and (
            (found.st_size, found.st_mtime_ns) != unchanged[1:] or not self._is_at(unchanged.real_path)
        ):
            self.close()
            raise DamagedError(
                "the file changed since its header was read", where=str(path), remedy="open the run again"
            )
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise NotFoundError("not a regular file", where=str(path))

    def _is_at(self, real_path: str) -> bool:
        """Tell whether the open file lies where a path without links says."""
        try:
            # What Linux says of the open file cannot be changed behind it, as a path could.
            return str(Path(f"/proc/self/fd/{self._descriptor}").readlink()) == real_path
        except OSError:
            return os.path.realpath(real_path) == real_path

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return exactly `n_bytes` bytes from `offset`."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.nbytes:
            raise DamagedError(
                "the file is shorter than it says",
                where=str(self.path),
                expected=f"{n_bytes} bytes at offset {offset}",
                found=f"{self.nbytes} bytes in all",
                remedy="it may be half-written: wait, or restore it from a backup",
            )
        if n_bytes <= 4096:
            # Thousands of these are read to open a run: no buffer, no loop.
            try:
                data = os.pread(self._descriptor, n_bytes, offset)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", where=str(self.path)) from error
            if len(data) == n_bytes:
                self._counter.add(n_bytes)
                return data
        buffer = bytearray(n_bytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill a writable buffer of bytes from `offset`."""
        done, wanted = 0, len(target)
        while done < wanted:
            try:
                # One read is at most 2 GiB on Linux; 256 MiB keeps other systems' limits away too.
                part = os.preadv(self._descriptor, [target[done : done + (256 << 20)]], offset + done)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", where=str(self.path)) from error
            if part == 0:
                raise DamagedError("the file ended while being read", where=str(self.path))
            done += part
        self._counter.add(wanted)
