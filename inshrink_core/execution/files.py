"""Open files only if they are regular, and write files atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO, Final

from inshrink_core.errors import ExistsError
from inshrink_core.execution.folders import sync_path

_TEMP_SUFFIX: Final = ".tmp"

_NOT_BLOCKING: Final = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK)
"""Errors of opening forbidden symbolic links, pipes and sockets without readers, and folders."""


class NotRegularError(OSError):
    """A path names a pipe, socket, device, folder or link instead of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EINVAL, "not a regular file", os.fspath(path))


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Return the descriptor of a regular file; never waits for another process.

    Parameters
    ----------
    path
        The file.
    flags
        As of `os.open`.
    follow
        Whether the path may be a symbolic link. Writers must not follow one.

    Raises
    ------
    NotRegularError
        The path is not a regular file.
    OSError
        The system refused.
    """
    flags |= _NOT_BLOCKING | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        with contextlib.suppress(FileNotFoundError):
            # Check before opening: opening some devices has side effects.
            _require_regular(path, os.stat(path, follow_symlinks=follow))  # noqa: PTH116 - as os.open
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise NotRegularError(path) if error.errno in _NO_FILE else error from None
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularError(path)


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the content of a regular file.

    Raises
    ------
    OSError
        As `open_regular`; or the file has more than `most` bytes.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", os.fspath(path))
    return content


def new_file(path: Path, buffering: int = -1) -> IO[bytes]:
    """Create a file for writing in place of any leftover of another process; never follows links."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open(open_regular(path, flags, follow=False), "wb", buffering=buffering)


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a temporary file: a leading dot and the suffix ``.tmp``."""
    return name.startswith(".") and name.endswith(_TEMP_SUFFIX)


def temporary_name(name: str) -> str:
    """Return the name of a file while it is incomplete."""
    return f".{name}{_TEMP_SUFFIX}"


def temporary_path(path: Path) -> Path:
    """Return the path at which a file is written before its rename."""
    return path.with_name(temporary_name(path.name))


def write_durably(path: Path, content: bytes) -> None:
    """Replace the content of a file: after a crash it has the whole old or new content."""
    temporary = temporary_path(path)
    try:
        with new_file(temporary) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_path(path.absolute().parent)


def require_free(path: Path, force: bool) -> None:
    """Refuse to overwrite an existing file.

    Raises
    ------
    ExistsError
        The path is a folder, or exists and `force` is False.
    """
    if path.is_dir():
        raise ExistsError("a folder is there already", where=str(path), remedy="choose another name")
    if os.path.lexists(path) and not force:
        raise ExistsError(
            "the file already exists", where=str(path), remedy="write elsewhere, or use --force to replace it"
        )
