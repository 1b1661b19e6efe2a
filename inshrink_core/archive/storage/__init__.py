"""Storages of archives; ``docs/guides/storage.md`` explains how to add one.

All data of an archive pass through a `Storage`. Only this package handles folders and URLs; the rest of
`inshrink_core.archive` addresses objects by name.
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
from inshrink_core.archive.storage.registry import find_at, object_at, storage_at
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
    "find_at",
    "is_url",
    "object_at",
    "storage_at",
    "storage_error",
    "storage_errors",
    "was_url",
]
