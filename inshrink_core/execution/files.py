"""Open only regular files, write files and folders durably, and remove scratch folders in every case."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Self

from inshrink_core.errors import ExistsError

_TEMP_SUFFIX: Final = ".tmp"
_WORK_PREFIX: Final = ".inshrink-"
_WORK_SUFFIX: Final = ".work"

_CACHED_NBYTES: Final = 1 << 19

_NOT_BLOCKING: Final = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK)
"""Errors of opening forbidden symbolic links, pipes and sockets without readers, and folders."""


class Closing:
    """The base of a class with a method `close`, which is called at the end of a ``with`` statement."""

    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    flags |= _NOT_BLOCKING | (0 if follow else os.O_NOFOLLOW)
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


def cached_parts(data: bytes | memoryview) -> Iterator[memoryview]:
    """Yield parts that fit a processor's cache: the kernel copies long buffers several times slower."""
    view = memoryview(data)
    for start in range(0, len(view), _CACHED_NBYTES):
        yield view[start : start + _CACHED_NBYTES]


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
        remedy = "write elsewhere, or use --force to replace it"
        raise ExistsError("the file already exists", where=str(path), remedy=remedy)


def sync_path(path: Path) -> None:
    """Make the names in a folder durable, or the content of a file that a library wrote."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents durably.

    Returns
    -------
    list of Path
        The created folders, outermost first.

    Raises
    ------
    OSError
        The system refused; created folders are removed.

    Notes
    -----
    Every name is synced before a folder is created inside it. Of the existing folders, an interrupted process
    can therefore have left only the innermost unsynced; it is synced too.
    """
    missing: list[Path] = []
    path = folder.absolute()
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    # The folder may belong to another user, and its parent may be unreadable.
    with contextlib.suppress(OSError):
        sync_path(path.parent)
    made: list[Path] = []
    try:
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                made.append(path)
            sync_path(path.parent)
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove folders created by `make_folders` that are empty."""
    for path in reversed(folders):
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Yield a new scratch folder, removed at the end.

    Folders that dead processes left in `parent` are removed first: a folder in use is locked.

    Raises
    ------
    OSError
        The system refused.
    """
    folder, lock = new_locked(parent)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def new_locked(parent: Path) -> tuple[Path, contextlib.ExitStack]:
    """Return a new folder as for `working_folder`, and the lock that protects it until closed.

    Raises
    ------
    OSError
        The system refused.
    """
    _remove_left(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, suffix=_WORK_SUFFIX, dir=parent))
        with contextlib.ExitStack() as lock, contextlib.suppress(FileNotFoundError):
            lock.enter_context(locked(folder))
            if folder.is_dir():  # it was not removed before it was locked
                return folder, lock.pop_all()


def _remove_left(parent: Path) -> None:
    """Remove unlocked working folders, as far as possible."""
    for path in sorted(parent.iterdir()):
        ours = path.name.startswith(_WORK_PREFIX) and path.name.endswith(_WORK_SUFFIX)
        if ours and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError), locked(path, wait=False):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder; the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
