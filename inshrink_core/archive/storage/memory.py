"""Archives in memory: as a bucket has them, and over another storage."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import MutableMapping
from typing import Final

from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.errors import LockedError


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
        return _MemoryLock(self._objects, self._root, self.name)

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


class _MemoryLock(Lock):
    """A name among those that are being written."""

    def __init__(self, objects: _Objects, root: str, name: str) -> None:
        self._objects, self._root = objects, root
        with objects.one:
            if root in objects.locked:
                raise LockedError("this process is writing this archive already", where=name)
            objects.locked.add(root)

    def release(self) -> None:
        """Let the next writer in."""
        if not self.released:
            super().release()
            self._objects.locked.discard(self._root)


class OverlaidStorage(Storage):
    """A storage some of whose objects are in memory, to read from.

    Parameters
    ----------
    under
        Where all others lie.
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
        """Bytes read from where the others lie."""
        return self._under.bytes_read

    @property
    def requests(self) -> int:
        """How often the place where the others lie was asked."""
        return self._under.requests

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        content = self.held.get(path)
        return (
            self._under.read(path, offset, nbytes) if content is None else content[offset : offset + nbytes]
        )

    def suffix(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object, and its size."""
        return super().suffix(path, nbytes) if path in self.held else self._under.suffix(path, nbytes)

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        content = self.held.get(path)
        return self._under.size(path) if content is None else len(content)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        parts = [path.rpartition("/") for path in tuple(self.held)]
        held = {name for parent, _, name in parts if parent == folder}
        return tuple(held.union(self._under.names(folder)))
