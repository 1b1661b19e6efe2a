"""Which storage a path or a URL names: one a scheme, found by entry point."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inshrink_core.archive.storage.contract import RangeFile, Storage
from inshrink_core.archive.storage.local import LocalFile, LocalStorage
from inshrink_core.archive.storage.remote import RemoteStorage
from inshrink_core.errors import NotFoundError
from inshrink_core.execution import NotRegularError
from inshrink_core.execution.mirror import STORAGES
from inshrink_core.plugins import plugin
from inshrink_core.text import url_of


def _opened(url: str) -> Storage:
    point = plugin(STORAGES, url.partition(":")[0].lower())
    storage: type[Storage] = RemoteStorage if point is None else point.load()
    return storage.at(url)


def storage_at(place: str | os.PathLike[str]) -> Storage:
    """Return the storage of the archive that lies, or shall lie, at a path or URL.

    Raises
    ------
    MissingExtraError
        A URL of a scheme that only fsspec may know, and it is not installed.
    StorageError
        Nobody knows the scheme.
    """
    url = url_of(place)
    return LocalStorage(Path(place)) if url is None else _opened(url)


def place_of(place: str | os.PathLike[str]) -> Path | str:
    """Return a path, or the URL that it is or was."""
    url = url_of(place)
    return Path(place) if url is None else url


def sole_writer(place: str | os.PathLike[str]) -> None:
    """Say that nobody but this process writes to a URL, so that its store need not be one that compares."""
    url = url_of(place)
    if url is not None:
        from inshrink_core.archive.storage.objects import declare_single_writer

        declare_single_writer(url)


def local_beside(place: str | os.PathLike[str], suffix: str) -> Path:
    """Return the local folder beside an archive; of one at a URL, one of this machine."""
    url = url_of(place)
    if url is None:
        return Path(place).with_name(f"{Path(place).name}{suffix}")
    from inshrink_core.archive.storage.behind import waiting_folder

    folder = waiting_folder(url)
    return folder.with_name(f"{folder.name}{suffix}")


def object_at(place: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage of the folder around a path or URL, and the name in it."""
    url = url_of(place)
    if url is None:
        return LocalStorage(Path(place).parent), Path(place).name
    folder, _, name = url.rstrip("/").rpartition("/")
    return _opened(folder), name


def found_at(place: str | os.PathLike[str]) -> Storage | RangeFile | None:
    """Return what lies at a path or URL: a folder, or one object; None where it is seen that nothing does.

    Raises
    ------
    NotFoundError
        Neither a file nor a folder.
    OSError, StorageError, MissingExtraError
        It cannot be looked at.
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
