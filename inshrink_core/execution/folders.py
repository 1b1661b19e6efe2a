"""Folders that last: names that a power loss does not take back, and scratch folders that leave nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PREFIX: Final = ".inshrink-"
_SUFFIX: Final = ".work"


def sync_path(path: Path) -> None:
    """Make durable what names a folder holds, or the content of a file that a library wrote."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents, so that their names are durable when this returns.

    Returns
    -------
    list of Path
        Those that were not there, outermost first.

    Raises
    ------
    OSError
        The system refused; what was made is removed.

    Notes
    -----
    Every name is synced before a folder is made inside of it, so that of those that are there already
    only the innermost may have been left unsynced by a process that died; it is synced too.
    """
    missing: list[Path] = []
    path = folder.absolute()
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    # It is not ours, and its parent may be closed to us.
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
    """Remove folders made by `make_folders` that are empty."""
    for path in reversed(folders):
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder for what is made on the way; gone at the end.

    Those that died processes left in `parent` are removed first: each is locked while it is in use.

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
    """Return a new folder as `working_folder` makes it, and what holds it until it is closed.

    Raises
    ------
    OSError
        The system refused.
    """
    _remove_left(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        with contextlib.ExitStack() as lock, contextlib.suppress(FileNotFoundError):
            lock.enter_context(locked(folder))
            if folder.is_dir():  # not removed before it was locked
                return folder, lock.pop_all()


def _remove_left(parent: Path) -> None:
    """Remove working folders that no process has locked, as far as possible."""
    for path in sorted(parent.iterdir()):
        ours = path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)
        if ours and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError), locked(path, wait=False):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a folder; the lock ends with the process. Where there are no locks, only who waits goes on."""
    try:
        import fcntl
    except ImportError as error:
        if not wait:
            raise OSError("there are no locks here") from error
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
