"""Objects that are made on the local disk and uploaded behind whoever writes them, in order.

What is on its way into an archive lies in a folder of its own in `waiting_folder`::

    run.inshrink-5c1f0a9e4b7d2c36/
      lock               held by the one process of this machine that writes the archive
      frames/…           frames that are finished, under their own names
      kept/<digest>      frames that are uploaded and may be read again soon
      waiting            a line of JSON: which object (the manifest) is replaced when the frames are uploaded,
                         what it takes the place of, and the frames it speaks of; then its content

An object that is replaced is uploaded after all that were created before it, and only over content that it
was made from. So whoever dies at any moment leaves an archive that is whole, and the next writer on this
machine uploads the rest. Where somebody else has written meanwhile, it is set aside instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final, NamedTuple

from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.archive.storage.local import LOCK_NAME, LocalStorage
from inshrink_core.errors import ConflictError, InshrinkError, LockedError, StorageError
from inshrink_core.execution import make_folders, read_regular, write_durably

_logger = logging.getLogger(__name__)

WAITING_VARIABLE: Final = "INSHRINK_WAITING"
MAX_WAITING_NBYTES: Final = 16 << 30
"""What may lie on the disk before it is uploaded; then whoever writes waits."""

_KEPT_NBYTES: Final = 256 << 20
"""Frames that are uploaded are kept up to here: the next one is encoded relative to them."""

_N_UPLOADS: Final = 4
_MAX_PAUSE_S: Final = 60.0
_RECORD_NAME: Final = "waiting"
_KEPT: Final = "kept"
_MAX_RECORD_NBYTES: Final = 1 << 30
_PIECE_NBYTES: Final = 4 << 20


def waiting_folder(url: str) -> Path:
    """Return where what is on its way to a URL lies on this machine, apart from that of any other URL."""
    named = os.environ.get(WAITING_VARIABLE)
    if named:
        base = Path(named)
    else:
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        base = (state if state.is_absolute() else Path.home() / ".local" / "state") / "inshrink"
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rpartition("/")[2])[:60].lstrip(".")
    return base.absolute() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Waiting(NamedTuple):
    """An object that is to be replaced.

    Parameters
    ----------
    path
        Its name.
    content
        What it gets.
    after
        What was created before, and has to be there first.
    """

    path: str
    content: bytes
    after: tuple[str, ...]


class UploadedStorage(Storage):
    """A storage that whole files are uploaded to, which its writer does not wait for."""

    exclusive = False

    @abstractmethod
    def upload(self, path: str, file: IO[bytes]) -> None:
        """Make an object of a file: whole, or not at all.

        Raises
        ------
        FileExistsError
            There is one of another writer.
        """

    def claim(self, path: str, file: IO[bytes]) -> None:
        """Make an object of a file as `upload` does, for a name that no other writer uses again."""
        self.upload(path, file)

    def holds(self, path: str, file: IO[bytes]) -> bool:
        """Tell whether an object is, byte for byte, a file."""
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return self.size(path) == nbytes and all(
            file.read(_PIECE_NBYTES) == self.read(path, at, _PIECE_NBYTES)
            for at in range(0, nbytes, _PIECE_NBYTES)
        )

    def create_once(self, path: str) -> Creation:
        """Begin an object on the local disk, which is uploaded when it is committed."""
        return _Once(self, checked(path))

    def written(self) -> Storage:
        """Return what a writer uses: objects are made here, and uploaded behind it."""
        return BehindStorage(self)


class BehindStorage(Storage):
    """A bucket as its one writer on this machine sees it: with what is not uploaded yet.

    Parameters
    ----------
    remote
        The bucket's folder.

    Notes
    -----
    `create` and `replace` return when the local disk has it; a thread uploads it. `flush` waits for that.
    After another writer has changed the archive, `create` and `replace` raise ConflictError, and nothing more
    is uploaded.
    """

    exclusive = False

    def __init__(self, remote: UploadedStorage) -> None:
        super().__init__(remote.name)
        self._remote = remote
        self._folder = waiting_folder(remote.name)
        self._local = LocalStorage(self._folder)
        self._names: dict[str, set[str]] = {}
        self._replaced: dict[str, tuple[bytes, Tag] | None] = {}
        """What replaced objects have in the bucket, as this writer knows; nobody else may change them."""
        self._changed = threading.Condition()
        self._queued: list[str] = []
        self._created: set[str] = set()
        """What was created and that nothing which was replaced since speaks of."""
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._waiting: _Waiting | None = None
        self._bases: set[str | None] = set()
        self._busy = self._closing = False
        self._refused: Exception | None = None
        self._conflict: ConflictError | None = None
        self._thread: threading.Thread | None = None

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far, from the bucket."""
        return self._remote.bytes_read

    def _is_here(self, path: str) -> bool:
        return (self._folder / checked(path)).is_file()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        held = self._held(path)
        if held is not None:
            return held[offset : offset + max(0, nbytes)]
        if self._is_here(path):
            with contextlib.suppress(FileNotFoundError):  # uploaded and let go of meanwhile
                return self._local.read(path, offset, nbytes)
        return self._remote.read(path, offset, nbytes)

    def suffix(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object, and its size."""
        held = self._held(path)
        if held is not None:
            return held[max(0, len(held) - nbytes) :] if nbytes else b"", len(held)
        if self._is_here(path):
            with contextlib.suppress(FileNotFoundError):
                return self._local.suffix(path, nbytes)
        return self._remote.suffix(path, nbytes)

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        held = self._held(path)
        if held is not None:
            return len(held)
        if self._is_here(path):
            with contextlib.suppress(FileNotFoundError):
                return self._local.size(path)
        return self._remote.size(path)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder; asks once what others put there."""
        known = self._names.get(folder)
        if known is None:
            known = self._names[folder] = set(self._remote.names(folder))
            if folder and (self._folder / checked(folder)).is_dir():
                known |= {
                    name for name in self._local.list(folder) if (self._folder / folder / name).is_file()
                }
            elif not folder and self._waiting is not None:
                known.add(self._waiting.path)
        return tuple(known)

    def _held(self, path: str) -> bytes | None:
        """Return what a replaced object has, as this writer sees it."""
        waiting = self._waiting
        if waiting is not None and waiting.path == checked(path):
            return waiting.content
        found = self._replaced.get(path)
        return None if found is None else found[0]

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object and its digest as its tag; asks the bucket once."""
        held = self._held(path)
        if held is None:
            self._replaced[path] = self._remote.load(path)
            held = self._replaced[path][0]  # type: ignore[index]
        return held, Tag(_digest(held))

    def whole(self, path: str) -> bytes:
        """Return all of a small object."""
        return held if (held := self._held(path)) is not None else super().whole(path)

    # ---- writing ---------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Return the right to write, which one process of this machine has; others are refused by the tag."""
        make_folders(self._folder)
        try:
            held = self._local.lock()
        except LockedError as error:
            raise LockedError(error.what, where=self.name, remedy=error.remedy) from error
        return _BehindLock(self, held)

    def recover(self, folders: tuple[str, ...]) -> None:
        """Go on with what this machine's last writer left, and begin to upload it."""
        self._local.recover(folders)
        self._remote.recover(folders)
        try:
            self._take_over()
        except ConflictError as error:
            self._set_aside(error)
            self._local.recover(folders)
        listed = () if self._waiting is None else self._waiting.after
        for folder in filter(None, folders):
            for name in self._local.list(folder):
                if f"{folder}/{name}" not in listed:
                    self._local.delete(f"{folder}/{name}")
        self._thread = threading.Thread(target=self._work, name="inshrink-upload", daemon=True)
        self._thread.start()

    def _take_over(self) -> None:
        """Read what waits, and whether it still follows what is in the bucket."""
        try:
            line, _, content = read_regular(self._folder / _RECORD_NAME, _MAX_RECORD_NBYTES).partition(b"\n")
            record = json.loads(line)
            path, after, bases = record["path"], tuple(record["after"]), set(record["bases"])
        except FileNotFoundError:
            self._forget()
            return
        except (ValueError, TypeError, KeyError) as error:
            raise ConflictError("what waits to be uploaded is damaged", where=str(self._folder)) from error
        if _digest(content) != record["content"]:
            raise ConflictError("what waits to be uploaded is damaged", where=str(self._folder))
        try:
            there: tuple[bytes, Tag] | None = self._remote.load(path)
        except FileNotFoundError:
            there = None
        now = None if there is None else _digest(there[0])
        self._replaced[path] = there
        if now == record["content"]:
            self._forget()
        elif now in bases:
            self._waiting, self._bases = _Waiting(path, content, after), bases
            self._queued = [one for one in after if self._is_here(one)]
            _logger.info("%d frames that were not uploaded yet are uploaded now", len(self._queued))
        else:
            raise ConflictError("another writer changed the archive", where=self.name)

    def _set_aside(self, error: ConflictError) -> None:
        """Put what waits out of the way: it does not follow what is in the archive."""
        number = 1
        while (target := self._folder.with_name(f"{self._folder.name}.set-aside-{number}")).exists():
            number += 1
        target.mkdir()
        # The record last: cut off, this is done again.
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == _RECORD_NAME):
            if path.name != LOCK_NAME:
                path.rename(target / path.name)
        _logger.warning(
            "what this machine wrote last and did not upload is not in the archive, and lies in %s: %s",
            *(target, error),
        )

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object on the local disk."""
        self._require()
        if over:
            return self._remote.create(path, over=True)
        return _Behind(self, path, self._local.create(path))

    def created(self, path: str) -> None:
        """Upload an object that is whole on the disk."""
        folder, _, name = path.rpartition("/")
        with self._changed:
            self._queued.append(path)
            self._created.add(path)
            if folder in self._names:
                self._names[folder].add(name)
            self._changed.notify_all()

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Give an object new content, if its digest is the one expected: on the disk, then in the bucket."""
        self._require()
        self._wait_for_room()
        content, new = bytes(content), _digest(bytes(content))
        if self._waiting is not None and self._waiting.path != path:
            self.flush()
        try:
            found: str | None = str(self.load(path)[1])
        except FileNotFoundError:
            found = None
        if found != expected:
            raise self.overtaken(path)
        with self._changed:
            before = self._waiting
            after = sorted({*self._created, *(before.after if before else ())})
            self._bases = {found} if before is None else {*self._bases, found}
            record = {"path": path, "content": new, "after": after, "bases": sorted(self._bases, key=str)}
            write_durably(self._folder / _RECORD_NAME, json.dumps(record).encode() + b"\n" + content)
            self._created.clear()
            self._waiting = _Waiting(path, content, tuple(after))
            if "" in self._names:
                self._names[""].add(path)
            self._changed.notify_all()
        return Tag(new)

    def delete(self, path: str) -> None:
        """Remove an object: at once where nothing speaks of it yet, else when what does not is uploaded."""
        checked(path)
        with self._changed:
            unlisted = path in self._created
            if path in self._queued and unlisted and not self._busy:
                self._queued.remove(path)
                self._created.discard(path)
                self._drop(path)
                return
        if unlisted:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy)
                if path in self._queued:
                    self._queued.remove(path)
                self._created.discard(path)
        else:
            self.flush()
        self._remote.delete(path)
        with self._changed:
            self._drop(path)

    def _drop(self, path: str) -> None:
        """Forget an object."""
        folder, _, name = path.rpartition("/")
        self._names.get(folder, set()).discard(name)
        self._kept.pop(path, None)
        self._replaced.pop(path, None)
        self._local.delete(path)

    def sync(self, folder: str) -> None:
        """Make names on the local disk durable."""
        self._local.sync(folder)

    # ---- uploading -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Return when all that was written is in the bucket.

        Raises
        ------
        ConflictError
            Another writer has changed the archive.
        StorageError
            The store refused. What was written stays on the disk, and is uploaded by this writer when the
            store does not refuse any more, or by the next one on this machine.
        """
        with self._changed:
            self._refused = None
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._is_done()
                    or self._refused is not None
                    or self._conflict is not None
                    or not self._is_at_work()
                )
            )
        self._require()
        if not self._is_done():
            raise self._told()

    def _is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._closing

    def _is_done(self) -> bool:
        return not self._queued and self._waiting is None and not self._busy

    def _told(self) -> StorageError:
        """Return why it is not uploaded, and what becomes of it."""
        error = self._refused
        what = error.what if isinstance(error, InshrinkError) else str(error)
        remedy = error.remedy if isinstance(error, InshrinkError) else ""
        return StorageError(
            f"not everything is uploaded yet: {what}",
            where=self.name,
            remedy=f"{remedy}; what is missing lies in {self._folder}, and the next writer uploads it".lstrip(
                "; "
            ),
        )

    def _require(self) -> None:
        """Raise what ends the writing of this archive."""
        if self._conflict is not None:
            raise ConflictError(
                self._conflict.what,
                where=self.name,
                remedy=f"what it wrote stays; what was not uploaded lies in {self._folder}; open it again",
            )

    def _wait_for_room(self) -> None:
        """Wait while too much lies on the disk."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._nbytes_waiting() <= MAX_WAITING_NBYTES
                    or self._refused is not None
                    or self._conflict is not None
                )
            )
            full = self._nbytes_waiting() > MAX_WAITING_NBYTES
        self._require()
        if full:
            raise self._told()

    def _nbytes_waiting(self) -> int:
        found = 0
        for path in self._queued:
            with contextlib.suppress(OSError):
                found += (self._folder / path).stat().st_size
        return found

    def _work(self) -> None:
        pause = 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._queued or self._waiting is not None)
                if self._closing:
                    return
                paths, waiting, self._busy = tuple(self._queued), self._waiting, True
            try:
                self._upload(paths, waiting)
            except Exception as error:  # told to whoever waits, and tried again
                with self._changed:
                    self._busy = False
                    self._refused = error
                    if isinstance(error, ConflictError):
                        self._conflict = error
                    self._changed.notify_all()
                    if self._conflict is not None:
                        return
                    _logger.warning("not uploaded yet, and tried again: %s", error)
                    self._changed.wait_for(lambda: self._closing or self._refused is None, timeout=pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            else:
                pause = 1.0
                with self._changed:
                    self._busy, self._refused = False, None
                    self._changed.notify_all()

    def _upload(self, paths: tuple[str, ...], waiting: _Waiting | None) -> None:
        """Upload objects, then what speaks of them.

        After a conflict, objects stay that nothing lists: whether a request came through whose answer was
        lost is not known, and the next writer deletes what cannot be listed any more.
        """
        with ThreadPoolExecutor(min(_N_UPLOADS, max(1, len(paths)))) as pool:
            list(pool.map(self._upload_one, paths))
        with self._changed:
            if waiting is None or not set(waiting.after).isdisjoint(self._queued):
                return
        tag = self._replace(waiting)
        with self._changed:
            self._replaced[waiting.path] = (waiting.content, tag)
            if self._waiting is waiting:
                self._forget()
            for path in waiting.after:
                with contextlib.suppress(OSError):
                    self._kept[path] = (self._folder / path).stat().st_size
            while sum(self._kept.values()) > _KEPT_NBYTES:
                path, _ = self._kept.popitem(last=False)
                self._local.delete(path)

    def trust(self, digests: Mapping[str, bytes]) -> None:
        """Read frames from here that the last writer kept, if they are those that the archive has."""
        kept = {path.name: path for path in (self._folder / _KEPT).glob("*")}
        for place, digest in digests.items():
            path = kept.pop(digest.hex(), None)
            if path is not None and not self._is_here(place):
                if path.is_file() and hashlib.sha256(path.read_bytes()).digest() == digest:
                    self._kept[place] = path.stat().st_size
                    path.rename(self._folder / place)
                else:
                    path.unlink()
        for path in kept.values():
            path.unlink()

    def _replace(self, waiting: _Waiting) -> Tag:
        """Replace an object in the bucket, also over what an earlier attempt left whose answer was lost."""
        known = self._replaced.get(waiting.path)
        try:
            return self._remote.replace(waiting.path, waiting.content, known[1] if known else None)
        except ConflictError as conflict:
            try:
                content, tag = self._remote.load(waiting.path)
            except FileNotFoundError:
                raise conflict from None
            with self._changed:
                if _digest(content) not in self._bases:
                    raise
            return self._remote.replace(waiting.path, waiting.content, tag)

    def _upload_one(self, path: str) -> None:
        with (self._folder / path).open("rb") as file:
            try:
                self._remote.claim(path, file)
            except FileExistsError:
                # One that was uploaded before its process died, or another writer's of the same name.
                if not self._remote.holds(path, file):
                    raise ConflictError(
                        "another writer has written this frame", where=f"{self.name}, {path}"
                    ) from None
        with self._changed:
            if path in self._queued:
                self._queued.remove(path)

    def _forget(self) -> None:
        """Note that nothing waits."""
        self._waiting, self._bases = None, set()
        (self._folder / _RECORD_NAME).unlink(missing_ok=True)

    def end(self) -> None:
        """End the thread; what is not uploaded stays on the disk."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):  # what cannot be kept is read from the bucket
            (self._folder / _KEPT).mkdir(exist_ok=True)
            for path in filter(self._is_here, self._kept):
                file = self._folder / path
                file.rename(self._folder / _KEPT / hashlib.sha256(file.read_bytes()).hexdigest())


class _Behind(Creation):
    """An object that is uploaded when it is whole."""

    def __init__(self, storage: BehindStorage, path: str, file: Creation) -> None:
        self._storage, self._path, self._file = storage, path, file

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)

    def commit(self) -> None:
        """Make it durable here."""
        self._file.commit()
        self._storage.created(self._path)

    def abort(self) -> None:
        """Leave nothing of it."""
        self._file.abort()


class _Once(Creation):
    """A file without a name, where what waits lies, that becomes an object by `UploadedStorage.claim`."""

    def __init__(self, storage: UploadedStorage, path: str) -> None:
        self._storage, self._path = storage, path
        folder = waiting_folder(storage.name).parent
        make_folders(folder)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until it is committed

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)

    def commit(self) -> None:
        """Upload it."""
        try:
            self._storage.claim(self._path, self._file)
        finally:
            self.abort()

    def abort(self) -> None:
        """Let the bytes go."""
        self._file.close()


class _BehindLock(Lock):
    """The right to write, of one process of this machine."""

    def __init__(self, storage: BehindStorage, held: Lock) -> None:
        self._storage, self._held = storage, held

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._held.released

    def release(self) -> None:
        """End the uploads, and let the next writer in."""
        if not self._held.released:
            try:
                self._storage.end()
            finally:
                self._held.release()
