"""Archives in memory, and objects in memory over another storage."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Final, TypeVar

from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.errors import LockedError

_T = TypeVar("_T")


class _Objects(dict[str, tuple[bytes, Tag]]):
    """Content and tag of every object by its key; `one` is held where they are compared and changed."""

    def __init__(self) -> None:
        super().__init__()
        self.one = threading.Lock()
        self.locked: set[str] = set()
        self._n_written = 0

    def put(self, key: str, content: bytes) -> Tag:
        """Write an object, with a tag that no other ever had."""
        self._n_written += 1
        tag = Tag(str(self._n_written))
        self[key] = content, tag
        return tag


_PROCESS: Final = _Objects()
"""What all URLs of this process name."""


class MemoryStorage(Storage):
    """An archive in the memory of this process: for tests, and as an example of a storage without folders.

    Parameters
    ----------
    name
        Its URL. Storages of one name have the same objects.

    Examples
    --------
    >>> storage = MemoryStorage("memory://doctest/run.inshrink")
    >>> with storage.create("frames/1") as creation:
    ...     creation.write(b"some bytes")
    ...     creation.commit()
    >>> MemoryStorage("memory://doctest/run.inshrink").read("frames/1", 5, 100)
    b'bytes'
    """

    n_at_once = 1

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._objects = _PROCESS
        self._root = name.partition("://")[2].strip("/")

    def key(self, path: str) -> str:
        """Return what an object is called among all of the process."""
        return f"{self._root}/{checked(path)}"

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        return self.counted(self._found(path)[0][offset : offset + max(0, nbytes)])

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return len(self._found(path)[0])

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        root = self.key(folder) + "/" if folder else f"{self._root}/"
        with self._objects.one:
            return tuple(
                {key[len(root) :].partition("/")[0] for key in self._objects if key.startswith(root)}
            )

    def _found(self, path: str) -> tuple[bytes, Tag]:
        found = self._objects.get(self.key(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def is_locked(self) -> bool:
        """Tell whether a writer is at work."""
        return self._root in self._objects.locked

    def lock(self) -> Lock:
        """Return the right to write, of one writer in this process."""
        locked = self._objects.locked
        with self._objects.one:
            if self._root in locked:
                raise LockedError("this process is writing this archive already", where=self.name)
            locked.add(self._root)
        return Lock(lambda: locked.discard(self._root))

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object and its tag."""
        content, tag = self._found(path)
        return self.counted(content), tag

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object."""
        return _NewObject(self._objects, self.key(path), over=over)

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Give an object new content, if its tag is the one expected."""
        key = self.key(path)
        with self._objects.one:
            if self._objects.get(key, (b"", None))[1] != expected:
                raise self.overtaken(path)
            return self._objects.put(key, bytes(content))

    def delete(self, path: str) -> None:
        """Remove an object; harmless where there is none."""
        with self._objects.one:
            self._objects.pop(self.key(path), None)


class _NewObject(Creation):
    """Bytes that become an object."""

    def __init__(self, objects: _Objects, key: str, *, over: bool) -> None:
        self._objects, self._key, self._over = objects, key, over
        self._content = bytearray()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._content += content

    def commit(self) -> None:
        """Put the object, if there is none."""
        with self._objects.one:
            if self._key in self._objects and not self._over:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._key)
            self._objects.put(self._key, bytes(self._content))

    def abort(self) -> None:
        """Let the bytes go."""
        self._content.clear()


class OverlaidStorage(Storage):
    """A storage some of whose objects are in memory, to read from.

    Parameters
    ----------
    under
        Where all others are stored.
    held
        Content of objects by path; may change.
    """

    writable = False

    def __init__(self, under: Storage, held: MutableMapping[str, bytes]) -> None:
        super().__init__(under.name)
        self._under, self.held = under, held
        self.n_at_once, self.exclusive = under.n_at_once, under.exclusive

    @property
    def bytes_read(self) -> int:
        """Bytes read from the storage below."""
        return self._under.bytes_read

    @property
    def requests(self) -> int:
        """Requests to the storage below."""
        return self._under.requests

    def ask(self, path: str, question: Callable[[Storage], _T]) -> _T:
        """Ask the storage below about an object."""
        return question(self._under)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        content = self.held.get(path)
        if content is not None:
            return content[offset : offset + nbytes]
        return self.ask(path, lambda under: under.read(path, offset, nbytes))

    def suffix(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object, and its size."""
        if path in self.held:
            return super().suffix(path, nbytes)
        return self.ask(path, lambda under: under.suffix(path, nbytes))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        content = self.held.get(path)
        return self.ask(path, lambda under: under.size(path)) if content is None else len(content)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        parts = [path.rpartition("/") for path in tuple(self.held)]
        held = {name for parent, _, name in parts if parent == folder}
        return tuple(held.union(self._under.names(folder)))
