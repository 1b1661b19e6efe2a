"""What a system refuses, in Inshrink's errors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from inshrink_core.archive.layout import RESTORE_REMEDY
from inshrink_core.errors import DamagedError, InshrinkError, NotFoundError, StorageError
from inshrink_core.execution import NotRegularError

_REMEDY = "what was there before is intact: see that the disk is well, and run it again"
"""Where no number says more, above all EIO."""

_REMEDIES = {
    errno.ENOSPC: "free some space and run it again; what was there before is intact",
    errno.EDQUOT: "your quota is used up: free some space and run it again",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
}


def storage_error(error: OSError, what: str, where: str) -> InshrinkError:
    """Return the error to raise for what the system refused, with the remedy its number calls for."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such file or directory", where=where)
    if isinstance(error, NotRegularError):
        found = f"{error.filename} is a pipe, a device, a folder or a link, not a file"
        return DamagedError(f"{what}: {found}", where=where, remedy=f"remove it, and {RESTORE_REMEDY}")
    reason = error.strerror or type(error).__name__
    return StorageError(f"{what}: {reason}", where=where, remedy=_REMEDIES.get(error.errno or 0, _REMEDY))


@contextlib.contextmanager
def storage_errors(what: str, where: str | Path) -> Iterator[None]:
    """Raise what the system refuses as `storage_error` tells it."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, str(where)) from error
