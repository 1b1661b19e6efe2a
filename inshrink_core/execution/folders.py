"""Durable folders, whose names survive a power loss, and scratch folders, which are always removed."""

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
    """Make the names in a folder durable, or the content of a file that a library wrote."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
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
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        with contextlib.ExitStack() as lock, contextlib.suppress(FileNotFoundError):
            lock.enter_context(locked(folder))
            if folder.is_dir():  # it was not removed before it was locked
                return folder, lock.pop_all()


def _remove_left(parent: Path) -> None:
    """Remove unlocked working folders, as far as possible."""
    for path in sorted(parent.iterdir()):
        ours = path.name.startswith(_PREFIX) and path.name.endswith(_SUFFIX)
        if ours and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError), locked(path, wait=False):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder; the lock ends with the process. Without system locks, only `wait=True` proceeds."""
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
