"""Writing that survives a crash (temporary name, fsync, rename, fsync of the folder), and the lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final
from weakref import WeakSet

from inshrink_core.archive.layout import FRAME_FOLDER
from inshrink_core.errors import ExistsError, LockedError, NotFoundError, StorageError
from inshrink_core.execution import NotRegularError, new_file, open_regular, sync_path

__all__ = [
    "LOCK_NAME",
    "TEMP_SUFFIX",
    "WriterLock",
    "is_temporary",
    "remove_remains",
    "remove_temporaries",
    "replacing",
    "require_free",
    "require_own",
    "require_place",
    "write_durably",
]

LOCK_NAME: Final = "lock"
TEMP_SUFFIX: Final = ".tmp"
_PID_NBYTES: Final = 32
"""More than the digits of any process id."""


def is_temporary(name: str) -> bool:
    """Tell whether a name is one of our temporary files: a dot in front and the suffix behind."""
    return name.startswith(".") and name.endswith(TEMP_SUFFIX)


def temporary_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f".{path.name}{TEMP_SUFFIX}")


def write_durably(path: Path, content: bytes) -> None:
    """Give a file new content: after a crash it has the old or the new, whole."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name once it is whole and on the disk; nothing stays after an error."""
    temporary = temporary_path(path)
    try:
        with new_file(temporary) as file:
            yield file
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


class WriterLock:
    """The right to write an archive: ``flock`` on a file inside of it, so that it ends with its process.

    Parameters
    ----------
    root
        The archive's folder.

    Raises
    ------
    LockedError
        Another process, or another writer of this one, holds it.
    """

    def __init__(self, root: Path) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise StorageError(
                "archives can be written on systems with flock only", where=str(root)
            ) from error
        self._descriptor = open_regular(root / LOCK_NAME, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            pid = os.pread(self._descriptor, _PID_NBYTES, 0).decode("ascii", "replace")
            os.close(self._descriptor)
            if pid == str(os.getpid()):
                raise LockedError(
                    f"this process is writing this archive already (process {pid})",
                    where=str(root),
                    remedy="close what writes it, such as a saver that was left open",
                ) from error
            holder = f" (process {pid})" if pid.isdigit() else ""
            raise LockedError(
                f"another process is writing this archive{holder}",
                where=str(root),
                remedy="wait until it has finished; readers need not wait",
            ) from error
        except BaseException:
            os.close(self._descriptor)
            raise
        _LOCKS.add(self)

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._descriptor < 0

    def release(self) -> None:
        """Let the next writer in; harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # the pid is information only
                os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):  # a child that is being forked may have it open, too
                _unlock(descriptor)
            with contextlib.suppress(OSError):  # the lock ends also where the system complains
                os.close(descriptor)


def _unlock(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)


_LOCKS: Final[WeakSet[WriterLock]] = WeakSet()


def _forget_locks() -> None:
    """In a forked child: the lock ends with its process, not with the last worker that was forked from it."""
    for lock in list(_LOCKS):
        descriptor, lock._descriptor = lock._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def is_locked(root: Path) -> bool:
    """Tell whether a writer is at work. One that starts at this very moment may be told to wait."""
    try:
        import fcntl

        with open(open_regular(root / LOCK_NAME, follow=False), "rb") as file:  # noqa: PTH123
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ImportError):
        return False
    return False


def require_own(root: Path) -> None:
    """Refuse to write where the folder of frames, which a writer deletes files in, is a link.

    Raises
    ------
    NotRegularError
        It is.
    """
    if (root / FRAME_FOLDER).is_symlink():
        raise NotRegularError(root / FRAME_FOLDER)


def require_place(root: Path, create: bool) -> None:
    """Refuse to make an archive where something else lies."""
    if not create:
        what = "this is not an Inshrink archive" if root.exists() else "there is no such archive"
        raise NotFoundError(
            what, where=str(root), remedy="`inshrink compress RUN -o ARCHIVE` makes one of a run"
        )
    if not root.exists():
        return
    own = {LOCK_NAME, FRAME_FOLDER}
    if not root.is_dir() or _holds_others(root, own):
        raise ExistsError(
            "it exists and is not an Inshrink archive", where=str(root), remedy="choose another name"
        )


def _holds_others(root: Path, own: set[str]) -> bool:
    return any(path.name not in own and not is_temporary(path.name) for path in root.iterdir())


def remove_remains(root: Path) -> None:
    """Leave nothing behind of an archive that could not be made."""
    with contextlib.suppress(OSError):
        for folder in (root / FRAME_FOLDER, root):
            remove_temporaries(folder)
        (root / LOCK_NAME).unlink(missing_ok=True)
        if (root / FRAME_FOLDER).exists():
            (root / FRAME_FOLDER).rmdir()
        root.rmdir()


def remove_temporaries(folder: Path) -> None:
    """Delete what a writer left that was cut off."""
    if folder.is_dir():
        for path in folder.iterdir():
            if is_temporary(path.name):
                path.unlink(missing_ok=True)
