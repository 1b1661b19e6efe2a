"""An archive in a folder of a local or mounted file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from inshrink_core.archive.storage.contract import Creation, Lock, RangeFile, Storage, Tag, checked, digest_of
from inshrink_core.errors import LockedError
from inshrink_core.execution.files import (
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

LOCK_NAME: Final = "lock"
_PID_NBYTES: Final = 32
"""More than the digits of any process id."""

_BUFFER_NBYTES: Final = 1 << 20
"""Most blocks are far smaller, so writing a frame takes a few system calls."""

_PATIENCE_S: Final = 10.0
"""How long to wait for others, which lock a folder while they rename a file in it."""


def _read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of an open file from `offset`, or fewer at its end."""
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
    """An open file, unaffected by a replacement of the path.

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
        """Return `nbytes` bytes from `offset`, or fewer at the end of the file."""
        return _read_range(self._descriptor, offset, nbytes)


class LocalStorage(Storage):
    """A folder. Files are written under a temporary name, synced and renamed; then their folder is synced.

    Parameters
    ----------
    root
        The archive's folder.

    Notes
    -----
    File systems rename without comparing. `Creation.commit` and `replace` compare while they lock the
    archive's folder (``flock``), so concurrent calls are serialized. If folders cannot be locked, only the
    writer's lock excludes others.
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
        """Return `nbytes` bytes from `offset`, or fewer at the end of the file."""
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
        """Return whether a writer is active."""
        return _is_locked(self.root / LOCK_NAME)

    def lock(self) -> Lock:
        """Return the right to write, which ends with the process."""
        return _file_lock(self.root)

    def share(self) -> Lock:
        """Return the right to write parts, which ends with the process."""
        return _file_lock(self.root, shared=True)

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of a file and, as its tag, its digest."""
        content = self.counted(read_regular(self._place(path)))
        return content, digest_of(content)

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin a file under a temporary name beside its final place."""
        return _NewFile(self, self._place(path), over=over)

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Replace the content of a file; after a crash it has the whole old or new content."""
        target = self._place(path)
        with self.folder_lock():
            try:
                found = digest_of(read_regular(target))
            except (FileNotFoundError, NotRegularError):
                found = None
            if found != expected:
                raise self.conflict(path)
            write_durably(target, content)
        return digest_of(content)

    def delete(self, path: str) -> None:
        """Delete a file; does nothing if it does not exist."""
        self._place(path).unlink(missing_ok=True)

    def sync(self, folder: str) -> None:
        """Sync a folder."""
        sync_path(self._folder(folder))

    def recover(self, folders: tuple[str, ...]) -> None:
        """Create and sync folders, and delete temporary files in them; refuses symbolic links."""
        for folder in filter(None, folders):
            require_private(self._place(folder))
            self._place(folder).mkdir(exist_ok=True)
        for folder in folders:
            _remove_temporaries(self._folder(folder))
        for folder in reversed(folders):
            self.sync(folder)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Create the folder and its parents durably."""
        made = make_folders(self.root)
        try:
            yield
        except LockedError:  # another process creates the same archive and owns the folder
            raise
        except BaseException:
            if self.root.absolute() in made:
                with contextlib.suppress(OSError):  # removes an archive that could not be created
                    for folder in (*(path for path in self.root.iterdir() if path.is_dir()), self.root):
                        _remove_temporaries(folder)
                        (folder / LOCK_NAME).unlink(missing_ok=True)
                        folder.rmdir()
                remove_empty(made)
            raise

    @contextlib.contextmanager
    def building(self) -> Iterator[LocalStorage]:
        """Yield a folder of a temporary name, renamed at the end."""
        temporary = temporary_path(self.root)
        shutil.rmtree(temporary, ignore_errors=True)  # remains of an interrupted process
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
        """Lock the folder briefly, to compare and rename."""
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


def require_private(folder: Path) -> None:
    """Refuse a folder that is a symbolic link, because writers delete files in it."""
    if folder.is_symlink():
        raise NotRegularError(folder)


class _NewFile(Creation):
    """A file that is renamed into place once it is complete and synced; locked while it is open."""

    def __init__(self, storage: LocalStorage, target: Path, *, over: bool) -> None:
        self._storage, self._target, self._over = storage, target, over
        self._temporary = temporary_path(target)
        if target.parent == storage.root or not target.parent.is_dir():
            make_folders(target.parent)  # also syncs folders that an interrupted process created
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
    """Lock a file or folder unless another process has; return True if the system lacks such locks (NFS)."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_locked(path: Path) -> bool:
    """Return whether another process has locked a file."""
    try:
        descriptor = open_regular(path, follow=False)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _unlock(descriptor: int) -> None:
    """Unlock and close a file, which a child process being forked may also have open."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # the lock ends even if the system reports an error
        os.close(descriptor)


def _file_lock(root: Path, *, shared: bool = False) -> Lock:
    """Return the right to write an archive: ``flock`` on a file in its folder, which ends with the process.

    Parameters
    ----------
    root
        The archive's folder.
    shared
        Allow other shared holders.

    Raises
    ------
    LockedError
        Another process, or another writer of this process, holds the lock.
    """
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
    """Release locks in a forked child, so that they end with the parent, not with its last worker."""
    for lock, descriptor in list(_LOCKS.items()):
        if not lock.released:
            lock.released = True
            with contextlib.suppress(OSError):
                os.close(descriptor)


os.register_at_fork(after_in_child=_forget_locks)
