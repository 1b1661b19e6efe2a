"""The contract of a storage: the operations that an archive needs of a folder, a bucket or a dictionary."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NewType, NoReturn

from inshrink_core.archive.layout import RESTORE_REMEDY
from inshrink_core.errors import (
    ConflictError,
    DamagedError,
    InputError,
    NotFoundError,
    StorageError,
    UnsafePathError,
)
from inshrink_core.execution.files import NotRegularError, is_temporary
from inshrink_core.execution.mirror import Listed

Tag = NewType("Tag", str)
"""Identifies the content of an object; opaque except to its storage. Different contents have other tags."""

_REMEDY: Final = "what was there before is intact: see that the disk is well, and run it again"
"""Remedy for error numbers without a specific one, above all EIO."""

_REMEDIES: Final = {
    errno.ENOSPC: "free some space and run it again; what was there before is intact",
    errno.EDQUOT: "your quota is used up: free some space and run it again",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
}

_PART: Final = r"(?!\.{1,2}(?:/|$))[^/\0]+"
_NAME: Final = re.compile(rf"{_PART}(?:/{_PART})*")


def checked(path: str) -> str:
    """Return the name of an object if it is valid.

    Raises
    ------
    UnsafePathError
        The name is empty, absolute, leads out of the archive, contains NUL, or is that of a temporary object.

    Examples
    --------
    >>> checked("frames/00000001-0.frame")
    'frames/00000001-0.frame'
    """
    if not _NAME.fullmatch(path) or is_temporary(path.rpartition("/")[2]):
        raise UnsafePathError("no object of an archive can have this name", where=repr(path))
    return path


def digest_of(content: bytes) -> Tag:
    """Return the SHA-256 of a content, as its tag."""
    return Tag(hashlib.sha256(content).hexdigest())


@contextlib.contextmanager
def storage_errors(what: str, where: str | Path) -> Iterator[None]:
    """Convert OSErrors to Inshrink's errors, with the remedy for the error number."""
    where = str(where)
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{what}: no such file or directory", where=where) from error
    except NotRegularError as error:
        found = f"{error.filename} is a pipe, a device, a folder or a link, not a file"
        remedy = f"remove it, and {RESTORE_REMEDY}"
        raise DamagedError(f"{what}: {found}", where=where, remedy=remedy) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = _REMEDIES.get(error.errno or 0, _REMEDY)
        raise StorageError(f"{what}: {reason}", where=where, remedy=remedy) from error


class RangeFile:
    """One object, read by ranges; may be shared between threads.

    Parameters
    ----------
    storage, path
        The storage of the object, and its path there.

    Attributes
    ----------
    storage
        The storage of the object.
    name
        The object, for messages.
    nbytes
        Its size in bytes.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage, self._path = storage, path
        self.name, self.nbytes = f"{storage.name.rstrip('/')}/{path}", storage.size(path)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object."""
        return self.storage.read(self._path, offset, max(0, min(nbytes, self.nbytes - offset)))


def _returned(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call()
    except Exception as error:
        return error


class Creation(AbstractContextManager["Creation", None]):
    """An object being written, invisible before `commit`.

    As a context manager it aborts the object unless it was committed.
    """

    @abstractmethod
    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes; the caller may change the buffer afterwards."""

    @abstractmethod
    def commit(self) -> Any:
        """Make the whole object visible under its name.

        Its bytes are durable then; its name is durable after `Storage.sync`. An object of
        `Storage.create_once` may stay invisible until `Storage.gather`, which needs what is returned; that
        can be pickled.

        Raises
        ------
        FileExistsError
            An object of that name exists: nothing changes.
        OSError
            The system refused; the object does not exist, except if the outcome is unknown.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the object; does nothing after `commit` or when repeated."""

    def __exit__(self, *error: object) -> None:
        self.abort()


class Lock:
    """The right to write an archive.

    Parameters
    ----------
    end
        Called on release.

    Attributes
    ----------
    released
        Whether `release` was called.
    """

    def __init__(self, end: Callable[[], object] = lambda: None) -> None:
        self._end, self.released = end, False

    def release(self) -> None:
        """Release the lock; may be called repeatedly."""
        if not self.released:
            self.released = True
            self._end()


class Storage(ABC):
    """The objects of one archive, by POSIX path relative to it.

    A readable storage implements `read`, `size` and `names`; a writable one also `lock`, `load`, `create`,
    `replace` and `delete`. A storage overrides other methods if it needs them or can do better.

    It may be shared between threads. It raises FileNotFoundError for a missing object, and other OSErrors for
    refusals of the system, which callers convert to Inshrink's errors.

    Parameters
    ----------
    name
        The archive's path or URL, for messages.

    Attributes
    ----------
    bytes_read, requests
        Number of bytes read so far, and of requests for bytes, sizes and names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = self.requests = 0
        self._counting = threading.Lock()

    def counted(self, content: bytes = b"") -> bytes:
        """Count a request, on any thread, and the bytes of its response; return the bytes."""
        with self._counting:
            self.bytes_read += len(content)
            self.requests += 1
        return content

    @classmethod
    def at(cls, url: str) -> Storage:
        """Return the storage of an archive at a URL; makes no request."""
        return cls(url)

    # ---- reading ---------------------------------------------------------------------------------

    n_at_once: int = 32
    """Number of requests that take about the time of one. Above 1, readers batch requests and prefetch; at 1,
    as for a disk, they read sequentially.
    """

    @abstractmethod
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""

    @abstractmethod
    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder ("": the archive's), in any order, unfinished objects included."""

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of a small object and its tag; a writable storage reads both from one state."""
        content = self.read(path, 0, self.size(path))
        return content, digest_of(content)

    def together(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Run reading calls at the same time; return the result or exception of each."""
        n_threads = min(self.n_at_once, len(calls))
        if n_threads <= 1:
            return [_returned(call) for call in calls]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="inshrink-read") as pool:
            return list(pool.map(_returned, calls))

    def open(self, path: str) -> RangeFile:
        """Return an object for reading; if the storage can, later replacements do not affect it."""
        return RangeFile(self, path)

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the sorted names of objects and folders in a folder; empty if the folder does not exist."""
        return tuple(sorted(name for name in self.names(folder) if not is_temporary(name)))

    def remains(self, folder: str) -> tuple[str, ...]:
        """Return the sorted names of unfinished objects, of an active or an interrupted writer."""
        return tuple(sorted(name for name in self.names(folder) if is_temporary(name)))

    def is_locked(self) -> bool:
        """Return whether a writer holds the lock. A writer that starts during the call may be refused."""
        return False

    def objects(self, path: str = "") -> Iterable[Listed]:
        """Return every object below this address, of a run; with a path, only the object of that path.

        Raises
        ------
        InputError
            Runs cannot be read from such addresses.
        """
        raise InputError(
            "runs are read from file systems, and from addresses of s3, gs, az and hf",
            where=self.name,
            remedy="copy the run here",
        )

    def read_listed(self, listed: Listed, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object that `objects` returned.

        Raises
        ------
        DamagedError
            The object has changed.
        """
        raise NotImplementedError

    absent: str = ""
    """Remedy in the message for an address without content."""

    # ---- writing ---------------------------------------------------------------------------------

    writable: bool = True
    """Whether the storage implements the writing methods."""

    exclusive: bool = True
    """Whether `lock` excludes other writers. If not, unlisted objects may belong to other writers and are
    ignored, and many processes may create objects (`create_once`) that one of them lists (`gather`).
    """

    def written(self) -> Storage:
        """Return the storage for a writer; refuse a place without the guarantees that writing needs."""
        return self

    def trust(self, digests: Mapping[str, bytes]) -> None:  # noqa: B027 - most keep nothing
        """Set the SHA-256 of objects; local copies with the same digest may serve reads."""

    def flush(self) -> None:  # noqa: B027 - most have nothing to do
        """Wait until everything written is visible to other readers, for a storage with an upload queue."""

    def refuse(self) -> NoReturn:
        """Raise InputError: the storage is read-only."""
        raise InputError(
            "archives are written on local or mounted file systems, and where a storage for it is installed",
            where=self.name,
            remedy="write it here, then copy it: inshrink export ARCHIVE --pack FILE",
        )

    def lock(self) -> Lock:
        """Return the right to write, until it is released or the process ends.

        In a place without locks it excludes no writer: of two writers, `replace` refuses one.

        Raises
        ------
        LockedError
            Another writer holds the lock.
        """
        self.refuse()

    def share(self) -> Lock:
        """Return the right to write parts of frames, shared by many processes but excluding `lock`.

        Raises
        ------
        LockedError
            A writer is active.
        InputError
            The place does not support such locks.
        """
        raise InputError(
            "this place has no locks, which frames in parts need",
            where=self.name,
            remedy="write the parts on a local or shared file system, and pack the archive into it",
        )

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object, of any size.

        Parameters
        ----------
        path
            Its name.
        over
            Replace an existing object of that name; by default `Creation.commit` refuses.
        """
        self.refuse()

    def create_once(self, path: str) -> Creation:
        """Begin an object of any size, with a name that no other writer uses again."""
        return self.create(path)

    def gather(self, staged: Mapping[str, Any], path: str, content: bytes, expected: Tag | None) -> None:
        """Replace an object that lists others, created by several processes; raises as `replace`."""
        self.replace(path, content, expected)

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Replace the content of an object if it is unchanged; durable when the method returns.

        Concurrent readers get the old or the new content.

        Parameters
        ----------
        path
            Its name.
        content
            The whole new content.
        expected
            The tag of the present content; None if the object must not exist.

        Returns
        -------
        Tag
            The tag of the new content.

        Raises
        ------
        ConflictError
            The content is not the expected one, or the object unexpectedly exists or is missing; nothing
            changes.
        """
        self.refuse()

    def conflict(self, path: str) -> ConflictError:
        """Return the error for an object whose content differs from the one `replace` expected."""
        return ConflictError(
            "another writer changed the archive",
            where=f"{self.name}, {path}",
            remedy="what it wrote stays; open the archive again",
        )

    def delete(self, path: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self.refuse()

    def sync(self, folder: str) -> None:  # noqa: B027 - most have nothing to do
        """Make the names in a folder durable, if earlier operations did not."""

    def recover(self, folders: tuple[str, ...]) -> None:  # noqa: B027
        """Prepare folders for a writer, which holds the lock: create them and delete unfinished objects.

        Every object listed afterwards is durable, even if its writer was interrupted before it synced.
        """

    def made(self) -> AbstractContextManager[None]:
        """Create the place of a new archive; after an error in the block, remove it."""
        return contextlib.nullcontext()

    def building(self) -> AbstractContextManager[Storage]:
        """Yield a storage in which a new archive is assembled; the end of the block moves it to its place.

        The place must be empty. A storage that cannot move an archive assembles it at its final place: its
        manifest is written last, and after an error the caller deletes the objects it created.
        """
        return contextlib.nullcontext(self)


class OverlaidStorage(Storage):
    """A read-only storage with some objects in memory.

    Parameters
    ----------
    under
        The storage of all other objects.
    contents
        Content of objects by path; may change.
    """

    writable = False

    def __init__(self, under: Storage, contents: MutableMapping[str, bytes]) -> None:
        super().__init__(under.name)
        self._under, self.contents = under, contents
        self.n_at_once, self.exclusive = under.n_at_once, under.exclusive

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object."""
        content = self.contents.get(path)
        if content is not None:
            return content[offset : offset + nbytes]
        return self._under.read(path, offset, nbytes)

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        content = self.contents.get(path)
        return self._under.size(path) if content is None else len(content)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        parts = (path.rpartition("/") for path in tuple(self.contents))
        return tuple({name for parent, _, name in parts if parent == folder}.union(self._under.names(folder)))
