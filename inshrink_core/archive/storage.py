"""Where the bytes of an archive lie: three calls that a folder, a file or a bucket can answer."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Protocol

from inshrink_core.errors import InshrinkError, NotFoundError, StorageError

__all__ = ["LocalStorage", "Storage", "storage_error"]


class Storage(Protocol):
    """Read access to the files of one archive, by POSIX path relative to it.

    Implementations may be shared between threads. They raise FileNotFoundError for a path that is
    not there, and other OSErrors for what the system refuses; readers turn both into Inshrink's own.
    """

    name: str
    """The archive, for messages."""

    bytes_read: int
    """Bytes returned by `read` so far."""

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        ...


class LocalStorage:
    """An archive that is a folder on a local or mounted file system.

    Parameters
    ----------
    root
        The archive's folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)
        self.bytes_read = 0
        self._counting = threading.Lock()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        chunks = []
        with (self.root / path).open("rb", buffering=0) as file:
            while nbytes > 0:
                chunk = os.pread(file.fileno(), nbytes, offset)
                if not chunk:
                    break
                chunks.append(chunk)
                offset += len(chunk)
                nbytes -= len(chunk)
        content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        with self._counting:
            self.bytes_read += len(content)
        return content

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return (self.root / path).stat().st_size

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        try:
            return tuple(sorted(path.name for path in (self.root / folder).iterdir()))
        except FileNotFoundError:
            return ()


_REMEDY = "what was committed before is intact: see that the disk is well, and run it again"
"""Where no number says more, above all EIO."""

_REMEDIES = {
    errno.ENOSPC: "free some space and run it again; what was committed before is intact",
    errno.EDQUOT: "your quota is used up: free some space and run it again",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
}


def storage_error(error: OSError, what: str, where: str) -> InshrinkError:
    """Return the error to raise for what the system refused, with the remedy its number calls for."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such file or directory", where=where)
    reason = error.strerror or type(error).__name__
    return StorageError(f"{what}: {reason}", where=where, remedy=_REMEDIES.get(error.errno or 0, _REMEDY))
