"""Storages of archives; ``docs/guides/storage.md`` adds one.

Everything that is written and read of an archive passes through a `Storage`. Only this package knows folders
and URLs; the rest of `inshrink_core.archive` knows objects by their names.
"""

from inshrink_core.archive.storage.contract import (
    Creation,
    Lock,
    OverlaidStorage,
    RangeFile,
    Storage,
    Tag,
    checked,
    storage_error,
    storage_errors,
)
from inshrink_core.archive.storage.local import LOCK_NAME, LocalStorage
from inshrink_core.archive.storage.registry import found_at, object_at, storage_at
from inshrink_core.text import is_url, was_url

__all__ = [
    "LOCK_NAME",
    "Creation",
    "LocalStorage",
    "Lock",
    "OverlaidStorage",
    "RangeFile",
    "Storage",
    "Tag",
    "checked",
    "found_at",
    "is_url",
    "object_at",
    "storage_at",
    "storage_error",
    "storage_errors",
    "was_url",
]
