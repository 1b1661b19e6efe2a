"""Files that others may have put there, opened only if they are regular; files that a crash leaves whole."""

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
"""Errors of opening links that must not be followed, pipes and sockets without readers, and folders."""


class NotRegularError(OSError):
    """A pipe, a socket, a device, a folder or a link is where a file must be."""

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
        Whether the file itself may be a link. Whoever writes must not follow one.

    Raises
    ------
    NotRegularError
        Something else is there.
    OSError
        The system refused.
    """
    flags |= _NOT_BLOCKING | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        with contextlib.suppress(FileNotFoundError):
            # Looked at first: opening some devices does something.
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
    """Open a new file to write to, in the place of one that another process left; links are not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open(open_regular(path, flags, follow=False), "wb", buffering=buffering)


def is_temporary(name: str) -> bool:
    """Tell whether a name is one of our temporary files: a dot in front and the suffix behind."""
    return name.startswith(".") and name.endswith(_TEMP_SUFFIX)


def temporary_name(name: str) -> str:
    """Return what a file is called before it is whole."""
    return f".{name}{_TEMP_SUFFIX}"


def temporary_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(temporary_name(path.name))


def write_durably(path: Path, content: bytes) -> None:
    """Give a file new content: after a crash it has the old or the new, whole; an error leaves nothing."""
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
    """Refuse to write a file over what is there.

    Raises
    ------
    ExistsError
        There is a folder, or without `force` anything at all.
    """
    if path.is_dir():
        raise ExistsError("a folder is there already", where=str(path), remedy="choose another name")
    if os.path.lexists(path) and not force:
        raise ExistsError(
            "the file exists already",
            where=str(path),
            remedy="write elsewhere, or use --force to replace it",
        )
