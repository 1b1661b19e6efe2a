"""Find the storage of a path or URL; each URL scheme is an entry point."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inshrink_core.archive.storage.contract import RangeFile, Storage
from inshrink_core.archive.storage.local import LocalFile, LocalStorage
from inshrink_core.errors import NotFoundError, StorageError
from inshrink_core.execution.files import NotRegularError
from inshrink_core.execution.mirror import STORAGES
from inshrink_core.plugins import plugin
from inshrink_core.text import url_of


def _opened(url: str) -> Storage:
    scheme = url.partition(":")[0].lower()
    point = plugin(STORAGES, scheme)
    if point is None:
        raise StorageError(f"there is no object storage of the name '{scheme}'", where=f"{scheme}://…")
    storage: Storage = point.load().at(url)
    return storage


def storage_at(place: str | os.PathLike[str]) -> Storage:
    """Return the storage of an archive by its path or URL.

    Raises
    ------
    StorageError
        No storage of this scheme is installed.
    """
    url = url_of(place)
    return LocalStorage(Path(place)) if url is None else _opened(url)


def place_of(place: str | os.PathLike[str]) -> Path | str:
    """Return a path or, for the path form of a URL, the URL."""
    url = url_of(place)
    return Path(place) if url is None else url


def local_beside(place: str | os.PathLike[str], suffix: str) -> Path:
    """Return the local folder beside an archive; for a URL, one beside its upload queue."""
    url = url_of(place)
    if url is None:
        return Path(place).with_name(f"{Path(place).name}{suffix}")
    from inshrink_core.archive.storage.uploads import queue_folder

    folder = queue_folder(url)
    return folder.with_name(f"{folder.name}{suffix}")


def object_at(place: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage of the folder around a path or URL, and the name in it."""
    url = url_of(place)
    if url is None:
        return LocalStorage(Path(place).parent), Path(place).name
    folder, _, name = url.rstrip("/").rpartition("/")
    return _opened(folder), name


def find_at(place: str | os.PathLike[str]) -> Storage | RangeFile | None:
    """Return the folder or object at a path or URL; None if nothing exists there.

    Raises
    ------
    NotFoundError
        The path is neither a file nor a folder.
    OSError, StorageError, MissingExtraError
        The place cannot be read.
    """
    url = url_of(place)
    if url is None:
        path = Path(place)
        if path.is_dir():
            return LocalStorage(path)
        if path.is_file():
            return LocalFile(path)
        if os.path.lexists(path):
            raise NotFoundError("this is neither a file nor a folder", where=str(path))
        return None
    if "/" in url.rstrip("/").partition("://")[2]:
        around, name = object_at(url)
        with contextlib.suppress(FileNotFoundError, NotRegularError):
            return around.open(name)
    found = _opened(url)
    return found if found.list("") else None
