"""An archive that is a folder on a local or mounted file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from inshrink_core.archive.storage.contract import Creation, Lock, RangeFile, Storage, Tag, checked, digest_of
from inshrink_core.errors import LockedError, StorageError
from inshrink_core.execution import (
    NotRegularError,
    is_temporary,
    make_folders,
    new_file,
    open_regular,
    read_regular,
    remove_empty,
    sync_path,
    temporary_path,
    write_durably,
)

fcntl: Any
try:
    import fcntl
except ImportError:  # archives are read on such systems, and not written
    fcntl = None

LOCK_NAME: Final = "lock"
_PID_NBYTES: Final = 32
"""More than the digits of any process id."""

_BUFFER_NBYTES: Final = 1 << 20
"""Blocks are mostly far smaller, so that a frame is a few system calls."""

_PATIENCE_S: Final = 10.0
"""Others hold a folder for as long as it takes to rename a file in it."""


def _read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of an open file from `offset`, fewer only where it ends."""
    chunks = []
    while nbytes > 0:
        chunk = os.pread(descriptor, nbytes, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
        nbytes -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class LocalFile(RangeFile):
    """An open file: replacing it changes nothing for its reader.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self.storage, self.name = LocalStorage(path.parent), str(path)
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.nbytes = os.fstat(self._descriptor).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        return _read_range(self._descriptor, offset, nbytes)


class LocalStorage(Storage):
    """A folder, its files written under a temporary name, synced, renamed, and their folder synced.

    Parameters
    ----------
    root
        The archive's folder.

    Notes
    -----
    File systems compare nothing before they rename. `Creation.commit` and `replace` do so while they hold
    the archive's folder (``flock``), so that of several in the same moment one comes after the other. Where
    folders cannot be locked, it is the writer's lock alone that keeps others out.
    """

    n_at_once = 1

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root

    @classmethod
    def at(cls, url: str) -> LocalStorage:
        """Return the folder of a URL, ``file:///path``."""
        return cls(Path("/" + url.partition(":")[2].lstrip("/")))

    def _place(self, path: str) -> Path:
        return self.root / checked(path)

    def _folder(self, folder: str) -> Path:
        return self._place(folder) if folder else self.root

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the file ends."""
        descriptor = open_regular(self._place(path))
        try:
            return self.counted(_read_range(descriptor, offset, nbytes))
        finally:
            os.close(descriptor)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        found = self._place(path).stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularError(self.root / path)
        return found.st_size

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        try:
            return tuple(os.listdir(self._folder(folder)))  # noqa: PTH208 - names, no paths
        except FileNotFoundError:
            return ()

    def open(self, path: str) -> LocalFile:
        """Return an open file."""
        return LocalFile(self._place(path))

    def is_locked(self) -> bool:
        """Tell whether a writer is at work."""
        return _is_locked(self.root / LOCK_NAME)

    def lock(self) -> Lock:
        """Return the right to write, which ends with its process."""
        return _file_lock(self.root)

    def share(self) -> Lock:
        """Return the right to write parts, which ends with its process."""
        return _file_lock(self.root, shared=True)

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of a file, and its digest as its tag."""
        content = self.counted(read_regular(self._place(path)))
        return content, digest_of(content)

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin a file under a temporary name beside its place."""
        return _NewFile(self, self._place(path), over=over)

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Give a file new content; after a crash it has the old or the new, whole."""
        target = self._place(path)
        with self.folder_lock():
            try:
                found = digest_of(read_regular(target))
            except (FileNotFoundError, NotRegularError):
                found = None
            if found != expected:
                raise self.overtaken(path)
            write_durably(target, content)
        return digest_of(content)

    def delete(self, path: str) -> None:
        """Remove a file; harmless where there is none."""
        self._place(path).unlink(missing_ok=True)

    def sync(self, folder: str) -> None:
        """Sync a folder."""
        sync_path(self._folder(folder))

    def recover(self, folders: tuple[str, ...]) -> None:
        """Make and sync folders, and remove temporary files in them, but not behind a link."""
        for folder in filter(None, folders):
            require_own(self._place(folder))
            self._place(folder).mkdir(exist_ok=True)
        for folder in folders:
            _remove_temporaries(self._folder(folder))
        for folder in reversed(folders):
            self.sync(folder)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder and its parents, so that their names last."""
        made = make_folders(self.root)
        try:
            yield
        except LockedError:  # another process makes the same archive: what is here is its own
            raise
        except BaseException:
            if self.root.absolute() in made:
                with contextlib.suppress(OSError):  # leaves nothing of an archive that could not be made
                    for folder in (*(path for path in self.root.iterdir() if path.is_dir()), self.root):
                        _remove_temporaries(folder)
                        (folder / LOCK_NAME).unlink(missing_ok=True)
                        folder.rmdir()
                remove_empty(made)
            raise

    @contextlib.contextmanager
    def building(self) -> Iterator[LocalStorage]:
        """Give a folder of a temporary name, which is renamed."""
        temporary = temporary_path(self.root)
        shutil.rmtree(temporary, ignore_errors=True)  # what was left by one that was cut off
        make_folders(self.root.parent)
        temporary.mkdir()
        try:
            yield LocalStorage(temporary)
            temporary.rename(self.root)
            try:
                sync_path(self.root.absolute().parent)
            except BaseException:
                self.root.rename(temporary)
                raise
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def folder_lock(self) -> Iterator[None]:
        """Lock the folder for a moment, to compare and rename."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            until = time.monotonic() + _PATIENCE_S
            while not _try_lock(descriptor):
                if time.monotonic() > until:
                    raise LockedError("another process holds the folder", where=self.name)
                time.sleep(0.001)
            yield
        finally:
            _unlock(descriptor)


def require_own(folder: Path) -> None:
    """Refuse to write where a folder, which a writer deletes files in, is a link."""
    if folder.is_symlink():
        raise NotRegularError(folder)


class _NewFile(Creation):
    """A file that gets its name once it is whole and on the disk; locked as long as it is open."""

    def __init__(self, storage: LocalStorage, target: Path, *, over: bool) -> None:
        self._storage, self._target, self._over = storage, target, over
        self._temporary = temporary_path(target)
        if target.parent == storage.root or not target.parent.is_dir():
            make_folders(target.parent)  # syncs too what a process that died made and did not sync
        with storage.folder_lock():
            if _is_locked(self._temporary):
                raise LockedError("another process is writing this file", where=str(target))
            self._file = new_file(self._temporary, _BUFFER_NBYTES)
            self._open = True
            _try_lock(self._file.fileno())

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)

    def commit(self) -> None:
        """Sync the file and rename it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            with contextlib.nullcontext() if self._over else self._storage.folder_lock():
                if not self._over and os.path.lexists(self._target):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._target))
                self._temporary.replace(self._target)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()
            with contextlib.suppress(OSError):  # the next writer cleans up
                self._temporary.unlink(missing_ok=True)


def _remove_temporaries(folder: Path) -> None:
    for path in folder.iterdir():
        if is_temporary(path.name):
            path.unlink(missing_ok=True)


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file or folder unless another process has; True where the system has no such locks (NFS)."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_locked(path: Path) -> bool:
    """Whether another process has locked a file."""
    try:
        descriptor = open_regular(path, follow=False)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _unlock(descriptor: int) -> None:
    """Unlock and close a file; a child that is being forked may have it open, too."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # the lock ends also where the system complains
        os.close(descriptor)


def _file_lock(root: Path, *, shared: bool = False) -> Lock:
    """Return the right to write an archive: ``flock`` on a file inside of it, which ends with its process.

    Parameters
    ----------
    root
        The archive's folder.
    shared
        Let others hold it that share it, too.

    Raises
    ------
    LockedError
        Another process, or another writer of this one, holds it.
    """
    if fcntl is None:
        raise StorageError("archives can be written on systems with flock only", where=str(root))
    descriptor = open_regular(root / LOCK_NAME, os.O_RDWR | os.O_CREAT, follow=False)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        if not shared:
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException as error:
        pid = os.pread(descriptor, _PID_NBYTES, 0).decode("ascii", "replace")
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
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

    def end() -> None:
        with contextlib.suppress(OSError):  # the pid is information only
            os.ftruncate(descriptor, 0)
        _unlock(descriptor)

    lock = Lock(end)
    _LOCKS[lock] = descriptor
    return lock


_LOCKS: Final[WeakKeyDictionary[Lock, int]] = WeakKeyDictionary()


def _forget_locks() -> None:
    """In a forked child: the lock ends with its process, not with the last worker that was forked from it."""
    for lock, descriptor in list(_LOCKS.items()):
        if not lock.released:
            lock.released = True
            with contextlib.suppress(OSError):
                os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
