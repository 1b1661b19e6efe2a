"""The contract of a storage: what an archive asks of a folder, a bucket or a dictionary."""

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
from typing import Any, Final, NewType, NoReturn, Self, TypeVar

from inshrink_core.archive.layout import RESTORE_REMEDY
from inshrink_core.errors import (
    ConflictError,
    DamagedError,
    InputError,
    InshrinkError,
    NotFoundError,
    StorageError,
    UnsafePathError,
)
from inshrink_core.execution import NotRegularError, is_temporary
from inshrink_core.execution.mirror import Listed

_T = TypeVar("_T")

Tag = NewType("Tag", str)
"""Identifies the content of an object; opaque but to its storage. Another content has another tag."""

_REMEDY: Final = "what was there before is intact: see that the disk is well, and run it again"
"""Where no error number says more, above all EIO."""

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
    """Return the name of an object, if it is one.

    Raises
    ------
    UnsafePathError
        It is empty, absolute, leads out of the archive, has a NUL, or is what unfinished objects are called.

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


def storage_error(error: OSError, what: str, where: str) -> InshrinkError:
    """Return the error to raise for what the system refused, with the remedy that its number calls for."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such file or directory", where=where)
    if isinstance(error, NotRegularError):
        found = f"{error.filename} is a pipe, a device, a folder or a link, not a file"
        return DamagedError(f"{what}: {found}", where=where, remedy=f"remove it, and {RESTORE_REMEDY}")
    reason = error.strerror or type(error).__name__
    return StorageError(f"{what}: {reason}", where=where, remedy=_REMEDIES.get(error.errno or 0, _REMEDY))


@contextlib.contextmanager
def storage_errors(what: str, where: str | Path) -> Iterator[None]:
    """Raise what the system refuses as `storage_error` describes it."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, str(where)) from error


class RangeFile:
    """One object that is read by ranges; may be shared between threads.

    Parameters
    ----------
    storage, path
        Where it is stored.

    Attributes
    ----------
    storage
        Where it is stored.
    name
        The object, for messages.
    nbytes
        Its size.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage, self._path = storage, path
        self.name, self.nbytes = f"{storage.name.rstrip('/')}/{path}", storage.size(path)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        return self.storage.read(self._path, offset, max(0, min(nbytes, self.nbytes - offset)))


def _returned(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error."""
    try:
        return call()
    except Exception as error:
        return error


class Creation(ABC):
    """An object that is being written, and invisible before `commit`.

    As a context manager it is aborted where it was not committed.
    """

    @abstractmethod
    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes, which may be changed afterwards."""

    @abstractmethod
    def commit(self) -> None:
        """Make the object visible under its name, whole.

        Its bytes are durable then; its name is after `Storage.sync`.

        Raises
        ------
        FileExistsError
            There is an object of that name: nothing is changed.
        OSError
            The system refused; the object is not there, unless it cannot be known.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of it; harmless after `commit` and when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()


class Lock:
    """The right to write an archive.

    Parameters
    ----------
    end
        Called when it is released.

    Attributes
    ----------
    released
        Whether `release` was called.
    """

    def __init__(self, end: Callable[[], object] = lambda: None) -> None:
        self._end, self.released = end, False

    def release(self) -> None:
        """Let the next writer in; harmless when repeated."""
        if not self.released:
            self.released = True
            self._end()


class Storage(ABC):
    """The objects of one archive, by POSIX path relative to it.

    A storage that is read gives `read`, `size` and `names`. One that is written gives `lock`, `load`,
    `create`, `replace` and `delete` as well. A storage overrides the others where it needs them or does
    better.

    It may be shared between threads. It raises FileNotFoundError for an object that is not there, and other
    OSErrors for what the system refuses, which its callers turn into Inshrink's own errors.

    Parameters
    ----------
    name
        The archive, for messages: its path or URL.

    Attributes
    ----------
    bytes_read, requests
        Bytes that were read so far, and requests for bytes, sizes and names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = self.requests = 0
        self._counting = threading.Lock()

    def counted(self, content: bytes = b"") -> bytes:
        """Count a request, on any thread, and the bytes of its answer; return them."""
        with self._counting:
            self.bytes_read += len(content)
            self.requests += 1
        return content

    @classmethod
    def at(cls, url: str) -> Storage:
        """Return the storage of an archive by its URL; makes no request."""
        return cls(url)

    # ---- reading ---------------------------------------------------------------------------------

    n_at_once: int = 32
    """How many requests are answered in about the time of one. Where an answer is far away, what will be
    needed is asked for together and ahead; with 1, as of a disk, each read waits for its turn."""

    @abstractmethod
    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""

    @abstractmethod
    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder (empty: the archive's own), in any order, unfinished objects too."""

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of a small object and its tag; a storage that is written returns one state."""
        content = self.read(path, 0, self.size(path))
        return content, digest_of(content)

    def together(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Return what calls of methods that read return, made at the same time, or the error of each."""
        n_threads = min(self.n_at_once, len(calls))
        if n_threads <= 1:
            return [_returned(call) for call in calls]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="inshrink-read") as pool:
            return list(pool.map(_returned, calls))

    def open(self, path: str) -> RangeFile:
        """Return an object to read from; where the storage can, it stays as it is now."""
        return RangeFile(self, path)

    def list(self, folder: str) -> tuple[str, ...]:
        """Return the names of objects and folders in a folder, sorted; none if there is no such folder."""
        return tuple(sorted(name for name in self.names(folder) if not is_temporary(name)))

    def remains(self, folder: str) -> tuple[str, ...]:
        """Return the names of what is unfinished: of a writer at work, or of one that was cut off."""
        return tuple(sorted(name for name in self.names(folder) if is_temporary(name)))

    def is_locked(self) -> bool:
        """Tell whether a writer holds the lock. One that starts at this very moment may be refused."""
        return False

    def objects(self, path: str = "") -> Iterable[Listed]:
        """Return every object below this address, a run's; with a path the one that it names, if it is there.

        Raises
        ------
        InputError
            Runs are not read from such addresses.
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
            It is another by now.
        """
        raise NotImplementedError

    absent: str = ""
    """What to do where nothing is found at an address."""

    facts: dict[str, str] | None = None
    """Facts for the page that the storage writes beside an archive; None where it writes none."""

    # ---- writing ---------------------------------------------------------------------------------

    writable: bool = True
    """Whether it has the methods that write."""

    exclusive: bool = True
    """Whether `lock` keeps others out. Where it does not, an object that the manifest does not list may be
    another writer's, and is taken for nothing; and many may create objects (`create_once`) that one of them
    lists (`gather`)."""

    def written(self) -> Storage:
        """Return the storage through which a writer sees this one; refuse a place that cannot be trusted."""
        return self

    def trust(self, digests: Mapping[str, bytes]) -> None:  # noqa: B027 - most keep nothing
        """Take note of what objects hold, by SHA-256: what is kept of them here may be read if it is that."""

    def flush(self) -> None:  # noqa: B027 - most have nothing to do
        """Return when all that was written is where others read it, for a storage that writes behind."""

    def refuse(self) -> NoReturn:
        """Raise InputError: it can be read only."""
        raise InputError(
            "archives are written on local or mounted file systems, and where a storage for it is installed",
            where=self.name,
            remedy="write it here, then copy it: inshrink export ARCHIVE --pack FILE",
        )

    def lock(self) -> Lock:
        """Return the right to write, until it is released or the process ends.

        A lock of a place without locks excludes no writer: of two, `replace` refuses one.

        Raises
        ------
        LockedError
            Another writer holds it.
        """
        self.refuse()

    def share(self) -> Lock:
        """Return the right to write a part of a frame, which many may hold at a time, and no writer beside.

        Raises
        ------
        LockedError
            A writer is at work.
        InputError
            The place has no such locks.
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
            Whether it takes the place of another of that name, instead of being refused by `Creation.commit`.
        """
        self.refuse()

    def create_once(self, path: str) -> Creation:
        """Begin an object of any size, whose name no other writer uses again."""
        return self.create(path)

    def staged(self, path: str) -> Any:
        """Return what `gather` needs of an object that was created here; it can be pickled."""
        return None

    def gather(self, staged: Mapping[str, Any], path: str, content: bytes, expected: Tag | None) -> None:
        """Replace an object that lists others, which many have created; raises as `replace`."""
        self.replace(path, content, expected)

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Give an object new content, if it is unchanged; durable when this returns.

        Whoever reads meanwhile gets the old content or the new.

        Parameters
        ----------
        path
            Its name.
        content
            All of it.
        expected
            The tag of the content that it takes the place of; None: there is none.

        Returns
        -------
        Tag
            That of the new content.

        Raises
        ------
        ConflictError
            The object is another than expected, or is or is not there: nothing is changed.
        """
        self.refuse()

    def overtaken(self, path: str) -> ConflictError:
        """Return the error to raise where an object has other content than `replace` expected."""
        return ConflictError(
            "another writer changed the archive",
            where=f"{self.name}, {path}",
            remedy="what it wrote stays; open the archive again",
        )

    def delete(self, path: str) -> None:
        """Remove an object; harmless where there is none."""
        self.refuse()

    def sync(self, folder: str) -> None:  # noqa: B027 - most have nothing to do
        """Make durable which names a folder has, where that takes more than what was done before."""

    def recover(self, folders: tuple[str, ...]) -> None:  # noqa: B027
        """Make folders ready for a writer, which holds the lock: they are there, and what is unfinished goes.

        Everything that is listed afterwards is durable, even if who wrote it was cut off before he synced.
        """

    def made(self) -> AbstractContextManager[None]:
        """Make the place of a new archive; after an error in the block, what was made is gone."""
        return contextlib.nullcontext()

    def building(self) -> AbstractContextManager[Storage]:
        """Give where a new archive is put together, which is at its place when the block ends.

        Nothing may be there yet. A storage that cannot move an archive puts it together at its place: its
        manifest is written last, and after an error the caller deletes what it made.
        """
        return contextlib.nullcontext(self)


class OverlaidStorage(Storage):
    """A storage some of whose objects are in memory, to read from.

    Parameters
    ----------
    under
        Where all others are stored.
    contents
        Content of objects by path; may change.
    """

    writable = False

    def __init__(self, under: Storage, contents: MutableMapping[str, bytes]) -> None:
        super().__init__(under.name)
        self._under, self.contents = under, contents
        self.n_at_once, self.exclusive = under.n_at_once, under.exclusive

    def ask(self, path: str, question: Callable[[Storage], _T]) -> _T:
        """Ask the storage below about an object."""
        return question(self._under)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        content = self.contents.get(path)
        if content is not None:
            return content[offset : offset + nbytes]
        return self.ask(path, lambda under: under.read(path, offset, nbytes))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        content = self.contents.get(path)
        return self.ask(path, lambda under: under.size(path)) if content is None else len(content)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        parts = (path.rpartition("/") for path in tuple(self.contents))
        return tuple({name for parent, _, name in parts if parent == folder}.union(self._under.names(folder)))
