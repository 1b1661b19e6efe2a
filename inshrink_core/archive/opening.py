"""Which storage an archive lies in: a folder, one packed file, or either on object storage."""

from __future__ import annotations

import os
from pathlib import Path

from inshrink_core.archive.catalog import is_archive_storage
from inshrink_core.archive.packed import LocalFile, PackedStorage, is_packed
from inshrink_core.archive.remote import RemoteStorage, is_url, open_remote
from inshrink_core.archive.storage import LocalStorage, Storage, storage_error
from inshrink_core.errors import NotFoundError

__all__ = ["is_archive", "open_storage"]


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is an archive, a folder or packed. Never raises for what it may find there.

    A URL counts as one without being looked at: nothing else that Inshrink reads lies behind a URL.
    """
    if is_url(path):
        return True
    root = Path(path)
    try:
        return is_archive_storage(LocalStorage(root)) if root.is_dir() else is_packed(root)
    except OSError:
        return False


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage that a path or a URL names.

    Raises
    ------
    NotFoundError
        Nothing is there, or a file that is no packed archive.
    DamagedError, IncompatibleError
        A packed archive that cannot be read.
    MissingExtraError
        A URL, and fsspec is not installed.
    StorageError
        The system refused.
    """
    try:
        if isinstance(path, str) and is_url(path):
            found = open_remote(path)
            return found if isinstance(found, RemoteStorage) else PackedStorage(found)
        root = Path(path)
        if root.is_dir():
            return LocalStorage(root)
        if not root.exists():
            raise NotFoundError("there is no such archive", where=str(root))
        if not is_packed(root):
            raise NotFoundError("this file is not an archive", where=str(root))
        return PackedStorage(LocalFile(root))
    except OSError as error:
        raise storage_error(error, "the archive cannot be read", str(path)) from error
