"""The upload queue: objects are made durable on the local disk, and one thread uploads them in order.

Each URL has a folder in `queue_folder`::

    run.inshrink-5c1f0a9e4b7d2c36/
      lock               held by the one process of this machine that writes the archive
      frames/…           finished frames; after their upload the newest stay, up to 256 MiB
      waiting            the SHA-256 of a `Listing`, and the `Listing`: the manifest, the digests of the
                         contents it may replace, and the frames to upload before it

The manifest is uploaded after the frames it lists, and replaces only a content that it was derived from. A
process that dies at any moment therefore leaves a sound archive, and the next writer on this machine uploads
the rest. If another writer changed the archive meanwhile, the queue is quarantined instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from inshrink_core.archive.storage.contract import (
    Creation,
    Lock,
    OverlaidStorage,
    Storage,
    Tag,
    checked,
    digest_of,
)
from inshrink_core.archive.storage.local import LOCK_NAME, LocalStorage
from inshrink_core.errors import ConflictError, LockedError, StorageError, UnsafePathError
from inshrink_core.execution.files import make_folders, read_regular, write_durably

_logger = logging.getLogger(__name__)

QUEUE_VARIABLE: Final = "INSHRINK_WAITING"
MAX_QUEUED_NBYTES: Final = 16 << 30
"""The writer blocks while more than this is queued."""

_CACHED_NBYTES: Final = 256 << 20
"""Most uploaded frames to keep on the disk: the next frame is encoded relative to them."""

_N_UPLOADS: Final = 4
_MAX_PAUSE_S: Final = 60.0
_RECORD_NAME: Final = "waiting"
_MAX_RECORD_NBYTES: Final = 1 << 30
_DIGEST_NBYTES: Final = 32
_PIECE_NBYTES: Final = 4 << 20


def queue_folder(url: str) -> Path:
    """Return the local folder that queues the uploads to a URL."""
    named = os.environ.get(QUEUE_VARIABLE)
    if named:
        base = Path(named)
    else:
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        base = (state if state.is_absolute() else Path.home() / ".local" / "state") / "inshrink"
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rpartition("/")[2])[:60].lstrip(".")
    return base.absolute() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


class Listing(msgspec.Struct, frozen=True):
    """The new content of an object that lists others.

    Parameters
    ----------
    path, content
        The object.
    files
        Objects to upload before it.
    bases
        Digests of the contents that it may replace; None permits an absent object.
    """

    path: str
    content: bytes
    files: tuple[str, ...] = ()
    bases: tuple[str | None, ...] = ()


class UploadedStorage(Storage):
    """A storage that accepts whole files; its writer does not wait for uploads."""

    exclusive = False

    batch_s: float = 0.0
    """Uploads begin after this many seconds, or when the writer flushes."""

    @abstractmethod
    def upload(self, path: str, file: IO[bytes], *, over: bool = False) -> None:
        """Upload a file as an object, atomically.

        Raises
        ------
        FileExistsError
            Another writer created an object of that name, and `over` is False.
        """

    def publish(
        self, files: dict[str, Path], listing: Listing | None, tag: Tag | None, gone: Sequence[str]
    ) -> Tag | None:
        """Upload files, then replace the object that lists them, then delete others; repeatable.

        Parameters
        ----------
        files
            Files by object path; uploaded files are removed from the mapping.
        listing, tag
            The object to replace, and the tag of its present content; None if the object does not exist.
        gone
            Objects to delete.

        Returns
        -------
        Tag or None
            The new tag of the listing.

        Raises
        ------
        ConflictError
            Another writer was faster.
        """
        with ThreadPoolExecutor(min(_N_UPLOADS, max(1, len(files)))) as pool:
            list(pool.map(partial(self._upload_file, files), tuple(files)))
        if listing is not None:
            tag = self.replace(listing.path, listing.content, tag)
        for path in gone:
            self.delete(path)
        return tag

    def _upload_file(self, files: dict[str, Path], path: str) -> None:
        with files[path].open("rb") as file:
            try:
                self.upload(path, file)
            except FileExistsError:
                # Either this machine uploaded the object before a crash, or another writer did.
                if not self.holds(path, file):
                    raise ConflictError(
                        "another writer has written this frame", where=f"{self.name}, {path}"
                    ) from None
        del files[path]

    def holds(self, path: str, file: IO[bytes]) -> bool:
        """Return whether an object equals a file."""
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return self.size(path) == nbytes and all(
            file.read(_PIECE_NBYTES) == self.read(path, at, _PIECE_NBYTES)
            for at in range(0, nbytes, _PIECE_NBYTES)
        )

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object in an unnamed local file; `commit` uploads it."""
        checked(path)
        return NewObject.beside(self, lambda file: self.upload(path, file, over=over))

    def lock(self) -> Lock:
        """Return a lock that excludes no writer: of two writers, the second to commit is refused."""
        return Lock()

    def written(self) -> UploadQueue:
        """Return the upload queue, the storage for writers."""
        return UploadQueue(self)

    @contextlib.contextmanager
    def building(self) -> Iterator[Storage]:
        """Yield an upload queue, which is flushed when the block ends."""
        with self.made():
            queue = self.written()
            lock = queue.lock()
            try:
                queue.recover(("",))
                try:
                    yield queue
                finally:  # after an error, this uploads the caller's deletions
                    queue.flush()
            finally:
                lock.release()


class UploadQueue(OverlaidStorage):
    """The writer's view of a remote storage, including objects that are not uploaded yet.

    Parameters
    ----------
    remote
        The storage to upload to.

    Notes
    -----
    `create` and `replace` return when the object is on the local disk; a thread uploads it, and performs
    deletions. `flush` waits for the thread. After another writer has changed the archive, all three raise
    ConflictError, and nothing more is uploaded. An archive replaces one object, its manifest.
    """

    writable = True

    def __init__(self, remote: UploadedStorage) -> None:
        super().__init__(remote, {})
        self._remote = remote
        self._folder = queue_folder(remote.name)
        self._local = LocalStorage(self._folder)
        self._names: dict[str, set[str]] = {}
        self._tags: dict[str, Tag] = {}
        """Remote tags of the contents that this writer read or replaced."""
        self._changed = threading.Condition()
        self._here: dict[str, int] = {}
        """Sizes of objects that can be read from the local disk."""
        self._queued: list[str] = []
        self._gone: list[str] = []
        self._listing: Listing | None = None
        self._busy = self._closing = self._flushing = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object."""
        if path in self._here:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                return self._local.read(path, offset, nbytes)
        return super().read(path, offset, nbytes)

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        known = self._here.get(path)
        return super().size(path) if known is None else known

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder; queries the remote storage once."""
        known = self._names.get(folder)
        if known is None:
            known = self._names[folder] = set(self._remote.names(folder))
            for paths, change in (((*self._queued, *self.contents), known.add), (self._gone, known.discard)):
                for parent, _, name in (path.rpartition("/") for path in paths):
                    if parent == folder:
                        change(name)
        return tuple(known)

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object and, as its tag, its digest; queries the remote storage once."""
        if path not in self.contents:
            self.contents[path], self._tags[path] = self._remote.load(path)
        return self.contents[path], digest_of(self.contents[path])

    # ---- writing ---------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Return the lock of this machine's single writer; tags exclude writers on other machines.

        Releasing it ends the uploads; the remaining queue stays on the disk.
        """
        make_folders(self._folder)
        try:
            lock = self._local.lock()
        except LockedError as error:
            raise LockedError(error.what, where=self.name, remedy=error.remedy) from error

        def release() -> None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            try:
                if self._thread is not None:
                    self._thread.join()
            finally:
                lock.release()

        return Lock(release)

    def made(self) -> AbstractContextManager[None]:
        """Create the remote place of a new archive."""
        return self._remote.made()

    def recover(self, folders: tuple[str, ...]) -> None:
        """Resume the queue of this machine's last writer, and start the upload thread."""
        self._local.recover(folders)
        self._remote.recover(folders)
        try:
            self._resume()
        except ConflictError as error:
            self._quarantine(error)
        self._thread = threading.Thread(target=self._work, name="inshrink-upload", daemon=True)
        self._thread.start()

    def _resume(self) -> None:
        """Load the last writer's queue if it continues the present remote content."""
        try:
            record = read_regular(self._folder / _RECORD_NAME, _MAX_RECORD_NBYTES)
        except FileNotFoundError:
            return
        damage = ConflictError("the upload queue is damaged", where=str(self._folder))
        if hashlib.sha256(record[_DIGEST_NBYTES:]).digest() != record[:_DIGEST_NBYTES]:
            raise damage
        try:
            listing = msgspec.msgpack.decode(record[_DIGEST_NBYTES:], type=Listing)
            files = [path for path in listing.files if (self._folder / checked(path)).is_file()]
        except (msgspec.DecodeError, UnsafePathError) as error:
            raise damage from error
        now = self._digest(listing.path)
        if now == digest_of(listing.content):
            self._finish()
        elif now in listing.bases:
            self._listing, self.contents[listing.path], self._queued = listing, listing.content, files
            self._here = {path: (self._folder / path).stat().st_size for path in files}
            _logger.info("%d frames that were not uploaded yet are uploaded now", len(files))
        else:
            raise ConflictError("another writer changed the archive", where=self.name)

    def _digest(self, path: str) -> Tag | None:
        """Return the digest of the object in this writer's view; None if it does not exist."""
        try:
            return self.load(path)[1]
        except FileNotFoundError:
            return None

    def _quarantine(self, error: ConflictError) -> None:
        """Quarantine the queue, because it does not continue the present archive."""
        number = 1
        while (target := self._folder.with_name(f"{self._folder.name}.quarantined-{number}")).exists():
            number += 1
        target.mkdir()
        # The record is moved last: if interrupted, the next writer repeats the move.
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == _RECORD_NAME):
            if path.name != LOCK_NAME:
                path.rename(target / path.name)
        _logger.warning(
            "the last files that this machine wrote were not uploaded; they are in %s: %s", *(target, error)
        )

    def trust(self, digests: Mapping[str, bytes]) -> None:
        """Serve frames of the last writer from the local disk if their digests match the archive's."""
        for path in self._folder.glob("*/*"):
            name = path.relative_to(self._folder).as_posix()
            if name in self._here:
                continue
            if digests.get(name) == hashlib.sha256(path.read_bytes()).digest():
                self._here[name] = path.stat().st_size
            else:
                path.unlink()

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object on the local disk."""
        self._require()
        file = self._local.create(path)
        return NewObject(file.write, lambda: self._created(path, file), file.abort)

    def _created(self, path: str, file: Creation) -> None:
        """Commit an object to the disk, and queue it."""
        file.commit()
        folder, _, name = path.rpartition("/")
        with self._changed:
            self._here[path] = (self._folder / path).stat().st_size
            self._queued.append(path)
            self._names.get(folder, set()).add(name)
            self._changed.notify_all()

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Replace the content of an object if its digest is `expected`: on the disk, then remotely."""
        self._require()
        if self._is_full():
            self._wait(lambda: not self._is_full())
        content, found = bytes(content), self._digest(path)
        if found != expected:
            raise self.conflict(path)
        with self._changed:
            bases = self._listing.bases if self._listing else ()
            listing = Listing(path, content, tuple(sorted(self._queued)), (*bases, found))
            record = msgspec.msgpack.encode(listing)
            write_durably(self._folder / _RECORD_NAME, hashlib.sha256(record).digest() + record)
            self._listing, self.contents[path] = listing, content
            self._names.get("", set()).add(path)
            self._changed.notify_all()
        return digest_of(content)

    def delete(self, path: str) -> None:
        """Delete an object, remotely once the listing without it is uploaded."""
        folder, _, name = checked(path).rpartition("/")
        with self._changed:
            self._names.get(folder, set()).discard(name)
            self.contents.pop(path, None)
            if path in self._queued and not self._busy:
                self._queued.remove(path)
                self._evict(path)
            else:
                self._gone.append(path)
            self._changed.notify_all()

    def _evict(self, path: str) -> None:
        self._here.pop(path, None)
        self._local.delete(path)

    def sync(self, folder: str) -> None:
        """Make file names on the local disk durable."""
        self._local.sync(folder)

    # ---- uploading -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything is uploaded.

        Raises
        ------
        ConflictError
            Another writer has changed the archive.
        StorageError
            The store refused. The objects stay on the disk; this writer uploads them once the store accepts
            requests again, or the next writer on this machine does.
        """
        self._require()
        self._wait(lambda: not (self._is_pending() or self._busy))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Upload at once until a condition holds; raise the upload's error otherwise."""
        with self._changed:
            self._error, self._flushing = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_done() or self._error is not None or self._closing)
            self._flushing, done = False, is_done()
        self._require()
        if not done:
            what, remedy = getattr(self._error, "what", self._error), getattr(self._error, "remedy", "")
            rest = f"the missing files are in {self._folder}; the next writer uploads them"
            raise StorageError(
                f"not everything is uploaded yet: {what}",
                where=self.name,
                remedy=f"{remedy}; {rest}".lstrip("; "),
            )

    def _is_full(self) -> bool:
        return sum(self._here.get(path, 0) for path in self._queued) > MAX_QUEUED_NBYTES

    def _is_pending(self) -> bool:
        return bool(self._queued or self._gone or self._listing is not None)

    def _require(self) -> None:
        """Raise the conflict that ended the writing of this archive."""
        if isinstance(self._error, ConflictError):
            raise ConflictError(
                self._error.what,
                where=self.name,
                remedy=f"the files that were not uploaded stay in {self._folder}; open it again",
            )

    def _work(self) -> None:
        pause = 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._is_pending())
                self._changed.wait_for(lambda: self._closing or self._flushing, self._remote.batch_s)
                if self._closing:
                    return
                paths, listing, gone = tuple(self._queued), self._listing, tuple(self._gone)
                self._busy = True
                files = {path: self._folder / path for path in paths}
            error: Exception | None = None
            try:
                tag = self._publish(files, listing, gone)
                pause = 1.0
            except Exception as refused:  # flush raises it; the upload is tried again
                error = refused
            with self._changed:
                self._queued = [path for path in self._queued if path in files or path not in paths]
                if error is None:
                    self._published(listing, tag, gone)
                self._busy, self._error = False, error
                self._changed.notify_all()
                if isinstance(error, ConflictError):
                    return
                if error is not None:
                    _logger.warning("not uploaded yet, and tried again: %s", error)
                    self._changed.wait_for(lambda: self._closing or self._error is None, pause)
                    pause = min(2 * pause, _MAX_PAUSE_S)

    def _publish(self, files: dict[str, Path], listing: Listing | None, gone: Sequence[str]) -> Tag | None:
        """Upload the queue.

        After a conflict, unlisted objects remain; the next writer deletes them.
        """
        tag = None if listing is None else self._tags.get(listing.path)
        try:
            return self._remote.publish(files, listing, tag, gone)
        except ConflictError as conflict:
            # The response to an earlier attempt may have been lost.
            if listing is None:
                raise
            try:
                content, tag = self._remote.load(listing.path)
            except FileNotFoundError:
                raise conflict from None
            if digest_of(content) not in listing.bases:
                raise
            return self._remote.publish(files, listing, tag, gone)

    def _published(self, listing: Listing | None, tag: Tag | None, gone: Sequence[str]) -> None:
        if listing is not None and tag is not None:
            self._tags[listing.path] = tag
            if self._listing is listing:
                self._finish()
        for path in gone:
            self._gone.remove(path)
            self._evict(path)
        uploaded = [path for path in self._here if path not in self._queued]
        while sum(self._here[path] for path in uploaded) > _CACHED_NBYTES:
            self._evict(uploaded.pop(0))

    def _finish(self) -> None:
        """Remove the record of an uploaded listing."""
        self._listing = None
        (self._folder / _RECORD_NAME).unlink(missing_ok=True)


class NewObject(Creation):
    """An object written to a local file, then committed or discarded.

    Parameters
    ----------
    write
        Appends bytes.
    give
        Turns the file into an object.
    drop
        Removes the file; may be called repeatedly.
    """

    def __init__(
        self, write: Callable[[Any], object], give: Callable[[], object], drop: Callable[[], object]
    ) -> None:
        self._write, self._give, self._drop = write, give, drop

    @classmethod
    def beside(cls, storage: Storage, give: Callable[[IO[bytes]], object]) -> NewObject:
        """Return an object in an unnamed file, beside the upload queue of a storage."""
        folder = queue_folder(storage.name).parent
        make_folders(folder)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until it is committed
        return cls(file.write, lambda: give(file), file.close)

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._write(content)

    def commit(self) -> Any:
        """Turn the file into an object."""
        try:
            return self._give()
        finally:
            self._drop()

    def abort(self) -> None:
        """Discard the file."""
        self._drop()
