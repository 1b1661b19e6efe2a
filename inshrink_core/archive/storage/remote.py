"""Archives behind a URL that fsspec knows: read only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from inshrink_core.archive.storage.contract import Storage, checked
from inshrink_core.errors import InshrinkError, MissingExtraError, StorageError


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


class RemoteStorage(Storage):
    """A folder on object storage; nothing is asked of it before it is read.

    Parameters
    ----------
    name
        Its URL.

    Notes
    -----
    Reading raises MissingExtraError where fsspec is not installed, and StorageError where the protocol is not
    known or lacks its package.
    """

    writable = False

    @functools.cached_property
    def _system_and_root(self) -> tuple[Any, str]:
        return _file_system(self.name)

    @property
    def _system(self) -> Any:
        return self._system_and_root[0]

    def _place(self, path: str) -> str:
        root = self._system_and_root[1].rstrip("/")
        return f"{root}/{checked(path)}" if path else root

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends; one request."""
        place = self._place(checked(path))
        if nbytes <= 0:
            return b""
        with _storage_errors(self.name):
            content = self._system.cat_file(place, start=offset, end=offset + nbytes)
        return self.counted(bytes(content))

    def whole(self, path: str) -> bytes:
        """Return all of an object; one request."""
        place = self._place(checked(path))
        with _storage_errors(self.name):
            try:
                content = self._system.cat_file(place)
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(place) from error
        return self.counted(bytes(content))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        place = self._place(checked(path))
        self.counted()
        with _storage_errors(self.name):
            found = self._system.info(place)
        if found["type"] == "directory":
            raise FileNotFoundError(place)
        return int(found["size"] or 0)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        place = self._place(folder)
        self.counted()
        with _storage_errors(self.name):
            try:
                # Listings are cached by fsspec, and a writer may have added frames since.
                self._system.invalidate_cache()
                paths = self._system.ls(place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return ()
        return tuple(str(path).rstrip("/").rpartition("/")[2] for path in paths)
