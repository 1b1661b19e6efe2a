"""Where the bytes of an archive lie: three calls that a folder, a file or a bucket can answer."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from inshrink_core.archive.layout import RESTORE_REMEDY
from inshrink_core.errors import DamagedError, InshrinkError, MissingExtraError, NotFoundError, StorageError
from inshrink_core.execution import NotRegularError, open_regular
from inshrink_core.frame import FrameInfo

__all__ = [
    "LocalStorage",
    "OverlaidStorage",
    "RemoteFile",
    "RemoteStorage",
    "Storage",
    "frame_chunks",
    "frame_digest",
    "is_sound",
    "is_url",
    "open_remote",
    "storage_error",
    "storage_errors",
    "was_url",
]


_CHUNK_NBYTES: Final = 4 << 20
"""Read at a time: one request of a remote archive, and little memory."""


class Storage(Protocol):
    """Read access to the files of one archive, by POSIX path relative to it.

    Implementations may be shared between threads. They raise FileNotFoundError for a path that is
    not there, and other OSErrors for what the system refuses; readers turn both into Inshrink's own.
    """

    name: str
    """The archive, for messages."""

    @property
    def bytes_read(self) -> int:
        """Bytes returned by `read` so far."""
        ...

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        ...


def read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of an open file from `offset`, fewer only where it ends."""
    chunks = []
    while nbytes > 0:
        chunk = os.pread(descriptor, nbytes, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
        nbytes -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class CountingStorage:
    """A storage that counts what is read from it, on any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = 0
        self._counting = threading.Lock()

    def counted(self, content: bytes) -> bytes:
        """Count some bytes and return them."""
        with self._counting:
            self.bytes_read += len(content)
        return content


class LocalStorage(CountingStorage):
    """An archive that is a folder on a local or mounted file system.

    Parameters
    ----------
    root
        The archive's folder.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        descriptor = open_regular(self.root / path)
        try:
            return self.counted(read_range(descriptor, offset, nbytes))
        finally:
            os.close(descriptor)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        found = (self.root / path).stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularError(self.root / path)
        return found.st_size

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        try:
            return tuple(sorted(path.name for path in (self.root / folder).iterdir()))
        except FileNotFoundError:
            return ()


class OverlaidStorage:
    """A storage some of whose files are in memory.

    Parameters
    ----------
    under
        Where all other files lie.
    held
        Content of files by path; may change.
    """

    def __init__(self, under: Storage, held: dict[str, bytes]) -> None:
        self._under, self.held, self.name = under, held, under.name

    @property
    def bytes_read(self) -> int:
        """Bytes read from where the other files lie."""
        return self._under.bytes_read

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        content = self.held.get(path)
        return (
            self._under.read(path, offset, nbytes) if content is None else content[offset : offset + nbytes]
        )

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        content = self.held.get(path)
        return self._under.size(path) if content is None else len(content)

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        parts = [path.rpartition("/") for path in tuple(self.held)]
        held = {name for parent, _, name in parts if parent == folder}
        return tuple(sorted(held.union(self._under.list(folder))))


def frame_chunks(storage: Storage, frame: FrameInfo, nbytes: int) -> Iterator[bytes]:
    """Yield so many bytes piece by piece from where a frame begins."""
    begin = frame.offset or 0
    for offset in range(begin, begin + nbytes, _CHUNK_NBYTES):
        yield storage.read(frame.path, offset, min(_CHUNK_NBYTES, begin + nbytes - offset))


def frame_digest(storage: Storage, frame: FrameInfo) -> bytes:
    """Return the SHA-256 of a frame; of one that is a file of its own, that of the file."""
    nbytes = storage.size(frame.path) if frame.offset is None else frame.nbytes
    digest = hashlib.sha256()
    for chunk in frame_chunks(storage, frame, nbytes):
        digest.update(chunk)
    return digest.digest()


def is_sound(storage: Storage, frame: FrameInfo) -> bool:
    """Whether a frame lies where the manifest says, as it was committed."""
    try:
        return frame_digest(storage, frame) == frame.digest
    except (OSError, StorageError):
        return False


_REMEDY = "what was there before is intact: see that the disk is well, and run it again"
"""Where no number says more, above all EIO."""

_REMEDIES = {
    errno.ENOSPC: "free some space and run it again; what was there before is intact",
    errno.EDQUOT: "your quota is used up: free some space and run it again",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
}


def storage_error(error: OSError, what: str, where: str) -> InshrinkError:
    """Return the error to raise for what the system refused, with the remedy its number calls for."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such file or directory", where=where)
    if isinstance(error, NotRegularError):
        found = f"{error.filename} is a pipe, a device, a folder or a link, not a file"
        return DamagedError(f"{what}: {found}", where=where, remedy=f"remove it, and {RESTORE_REMEDY}")
    reason = error.strerror or type(error).__name__
    return StorageError(f"{what}: {reason}", where=where, remedy=_REMEDIES.get(error.errno or 0, _REMEDY))


@contextlib.contextmanager
def storage_errors(what: str, where: str | Path) -> Iterator[None]:
    """Raise what the system refuses as `storage_error` tells it."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, str(where)) from error


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_JOINED_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: object) -> bool:
    """Tell whether a path names something on object storage.

    Examples
    --------
    >>> is_url("s3://bucket/run.inshrink"), is_url("runs/run.inshrink"), is_url("C:/run.inshrink")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def was_url(path: os.PathLike[str]) -> bool:
    """Tell whether a path was a URL before it became a path, which joins its slashes.

    Examples
    --------
    >>> from pathlib import Path
    >>> was_url(Path("s3://bucket/run.inshrink")), was_url(Path("C:/run.inshrink"))
    (True, False)
    """
    return _JOINED_URL.match(os.fspath(path)) is not None


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Turn what a store refuses into our own errors: each library behind fsspec has its own classes."""
    try:
        yield
    except (FileNotFoundError, InshrinkError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise StorageError(
            f"the object store refused: {reason}", where=url, remedy="check address, access and network"
        ) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path within it."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("fsspec", "remote") from error
    protocol = url.partition("://")[0]
    if protocol not in fsspec.available_protocols():
        raise StorageError(f"there is no object storage of the name '{protocol}'", where=url)
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        # The message is fsspec's: it names the package that speaks this protocol.
        raise StorageError(f"'{protocol}' cannot be read here: {error}", where=url) from error
    except Exception as error:
        raise StorageError(f"the address cannot be used: {error}", where=url) from error
    return system, path


def open_remote(url: str) -> RemoteFile | RemoteStorage:
    """Return what lies at a URL: a file, or else a folder.

    Raises
    ------
    MissingExtraError
        fsspec is not installed.
    FileNotFoundError
        Nothing is there.
    StorageError
        The protocol is not known or lacks its package, or the store refused.
    """
    system, path = _file_system(url)
    with _storage_errors(url):
        found = system.info(path)
    if found["type"] == "directory":
        return RemoteStorage(url, system, path)
    return RemoteFile(url, system, path, int(found["size"] or 0))


class RemoteFile:
    """A file on object storage (`inshrink_core.archive.packed.RangeFile`).

    Parameters
    ----------
    url
        For messages.
    system
        fsspec's file system.
    path
        The file within it.
    nbytes
        Its size.
    """

    def __init__(self, url: str, system: Any, path: str, nbytes: int) -> None:
        self.name, self.nbytes = url, nbytes
        self._system, self._path = system, path

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends; one request."""
        nbytes = min(nbytes, self.nbytes - offset)
        if nbytes <= 0:
            return b""
        with _storage_errors(self.name):
            return bytes(self._system.cat_file(self._path, start=offset, end=offset + nbytes))


class RemoteStorage(CountingStorage):
    """A folder on object storage (`inshrink_core.archive.storage.Storage`).

    Parameters
    ----------
    url
        For messages.
    system
        fsspec's file system.
    root
        The folder within it.
    """

    def __init__(self, url: str, system: Any, root: str) -> None:
        super().__init__(url)
        self._system, self._root = system, root.rstrip("/")

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends; one request."""
        if nbytes <= 0:
            return b""
        with _storage_errors(self.name):
            content = self._system.cat_file(self._place(path), start=offset, end=offset + nbytes)
        return self.counted(bytes(content))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with _storage_errors(self.name):
            return int(self._system.info(self._place(path))["size"])

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; empty if there is no such folder."""
        with _storage_errors(self.name):
            try:
                # Listings are cached by fsspec, and a writer may have added frames since.
                self._system.invalidate_cache()
                paths = self._system.ls(self._place(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return ()
        return tuple(sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths))
