"""Archives in memory, for the harness and for tests: a storage without folders."""

import errno
import os
import threading
from typing import Final

from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.errors import LockedError


class StoredObjects(dict[str, tuple[bytes, Tag]]):
    """Content and tag of every object by its key; `one` is held where they are compared and changed."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.locked: set[str] = set()
        self._n_written = 0

    def put(self, key, content):
        """Write an object, with a tag that no other ever had."""
        self._n_written += 1
        tag = Tag(str(self._n_written))
        self[key] = content, tag
        return tag


_PROCESS: Final = StoredObjects()
"""What all URLs of this process name."""


class MemoryStorage(Storage):
    """An archive in the memory of this process.

    Parameters
    ----------
    name
        Its URL. Storages of one name have the same objects.
    """

    n_at_once = 1

    def __init__(self, name):
        super().__init__(name)
        self._objects = _PROCESS
        self._root = name.partition("://")[2].strip("/")

    def key(self, path):
        """Return what an object is called among all of the process."""
        return f"{self._root}/{checked(path)}"

    def read(self, path, offset, nbytes):
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        return self.counted(self._found(path)[0][offset : offset + max(0, nbytes)])

    def size(self, path):
        """Return the size of an object in bytes."""
        return len(self._found(path)[0])

    def names(self, folder):
        """Return every name in a folder."""
        root = self.key(folder) + "/" if folder else f"{self._root}/"
        with self._objects.lock:
            return tuple(
                {key[len(root) :].partition("/")[0] for key in self._objects if key.startswith(root)}
            )

    def _found(self, path):
        found = self._objects.get(self.key(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def is_locked(self):
        """Tell whether a writer is at work."""
        return self._root in self._objects.locked

    def lock(self):
        """Return the right to write, of one writer in this process."""
        locked = self._objects.locked
        with self._objects.lock:
            if self._root in locked:
                raise LockedError("this process is writing this archive already", where=self.name)
            locked.add(self._root)
        return Lock(lambda: locked.discard(self._root))

    def load(self, path):
        """Return the content of an object and its tag."""
        content, tag = self._found(path)
        return self.counted(content), tag

    def create(self, path, *, over=False):
        """Begin an object."""
        return _NewObject(self._objects, self.key(path), over=over)

    def replace(self, path, content, expected):
        """Give an object new content, if its tag is the one expected."""
        key = self.key(path)
        with self._objects.lock:
            if self._objects.get(key, (b"", None))[1] != expected:
                raise self.conflict(path)
            return self._objects.put(key, bytes(content))

    def delete(self, path):
        """Remove an object; harmless where there is none."""
        with self._objects.lock:
            self._objects.pop(self.key(path), None)


class _NewObject(Creation):
    """Bytes that become an object."""

    def __init__(self, objects, key, *, over):
        self._objects, self._key, self._over = objects, key, over
        self._content = bytearray()

    def write(self, content):
        """Append bytes."""
        self._content += content

    def commit(self):
        """Put the object, if there is none."""
        with self._objects.lock:
            if self._key in self._objects and not self._over:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._key)
            self._objects.put(self._key, bytes(self._content))

    def abort(self):
        """Let the bytes go."""
        self._content.clear()
