"""Write one part of an archive's frames, beside processes that write the other parts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from inshrink_core.archive import layout
from inshrink_core.archive.catalog import Catalog, missing_parts, parts_in_words
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.reader import ArchiveReader, is_archive
from inshrink_core.archive.storage.contract import Creation, Lock, Storage, storage_errors
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.archive.writer import ArchiveWriter
from inshrink_core.errors import ConflictError, InputError, LockedError
from inshrink_core.frame import FrameInfo, FrameKind

_PATIENCE_S: Final = 30.0
"""How long to wait for others, which hold the lock while they create an archive or list its frames."""

_N_LOOKS: Final = 5
"""Listings to try: other processes may add files while a folder is listed."""


def _agree(where: str) -> str:
    return (
        "give every part the same run, steps, settings and number of parts, or give up those that are there: "
        f"inshrink commit {where} --discard"
    )


class PartWriter(AbstractContextManager["PartWriter", None]):
    """Writes one part of new frames; a context manager that shares the archive's lock with the other parts.

    Parameters
    ----------
    path
        The archive's folder; created if it does not exist.
    part, n_parts
        The part's number, from 0, and the number of parts.
    salt
        Salt of the frame ids, the same for all parts: parts of another attempt never complete these frames.
    generation
        Generation of the next frame if the storage has no locks; the same for all parts (`SharedFrame`).

    Raises
    ------
    ConflictError
        Frames of another job wait for parts.
    LockedError
        A writer of whole frames is active.
    InputError
        The part number is out of range, or the archive cannot be written in parts.
    StorageError
        The storage refused.

    Attributes
    ----------
    reader
        Reads the archive's frames, and this part of pending frames.
    written
        The part that was committed last, for `SharedFrame.commit`.

    Notes
    -----
    Every part gives the same generations to the same steps: those that follow the manifest's, in order. A
    frame is live once its last part exists; `commit_parts` lists it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        part: int,
        n_parts: int,
        salt: bytes = b"",
        generation: int | None = None,
    ) -> None:
        if not (0 <= part < n_parts <= layout.MAX_PARTS):
            raise InputError(
                f"there is no {parts_in_words([part], n_parts)}",
                expected=f"I/N with 1 ≤ I ≤ N ≤ {layout.MAX_PARTS}",
            )
        self.part, self.n_parts, self.salt = part, n_parts, salt
        self._frame: FrameWriter | None = None
        self._lock: Lock | None = None
        self.storage: Storage = storage_at(path)
        self._path, self._here = path, partial(_of_part, part)
        self._open(generation)

    def _open(self, generation: int | None) -> None:
        with storage_errors("the archive cannot be opened for writing", os.fspath(self._path)):
            if generation is None:
                self._lock = _shared_lock(self.storage, self._path)
            try:
                if hasattr(self, "reader"):
                    self.reader.refresh()
                else:
                    self.reader: ArchiveReader = ArchiveReader(self.storage, self._here)
                self._look(generation)
            except BaseException:
                self.suspend()
                raise

    def _look(self, generation: int | None) -> None:
        """Check the pending frames, again if they change meanwhile, and set the next generation."""
        for look in range(_N_LOOKS):
            if look:
                time.sleep(0.02)
                self.reader.refresh()
            self.reader.catalog.require_complete(self.reader.path)
            try:
                _require_same_job(self.reader, self.n_parts)
            except ConflictError:
                if look + 1 == _N_LOOKS:
                    raise
                continue
            break
        catalog = self.reader.catalog
        here = {frame.frame_id for frame in self._here(catalog)}
        self._waiting = [frame for frame in catalog.pending if frame.frame_id not in here]
        after = catalog.pending[-1].generation + 1 if catalog.pending else catalog.next_generation
        self._next = after if generation is None else generation

    def suspend(self) -> None:
        """Abort an unfinished frame and release the lock, so that frames can be committed; repeatable."""
        if self._frame is not None:
            self._frame.abort()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def resume(self, salt: bytes, generation: int | None = None) -> None:
        """Take the lock again for frames with another salt, and reload the archive.

        Raises as the constructor.
        """
        self.salt = salt
        self._open(generation)

    def begin(
        self,
        *,
        step: int,
        kind: FrameKind | str,
        parent_id: bytes | None,
        branch: int = 0,
        external: bool = False,
    ) -> FrameWriter:
        """Start this part of the next frame (`ArchiveWriter.begin`).

        Raises
        ------
        ConflictError
            Another part has a different frame in its place: the parts were given different steps.
        """
        where, kind = self.storage.name, FrameKind(kind)
        waiting = self._waiting[0] if self._waiting else None
        generation = self._next if waiting is None else waiting.generation
        archive_id = self.reader.archive_id
        frame_id = layout.derive_frame_id(archive_id, parent_id, step, branch, generation, self.salt)
        if waiting is not None and (waiting.frame_id, waiting.kind) != (frame_id, kind):
            others = [file.number for file in waiting.files]
            raise ConflictError(
                f"{parts_in_words(others[:1], self.n_parts)} has other steps or keyframes than this one",
                where=where,
                expected=f"a {waiting.kind} of step {waiting.step}",
                found=f"a {kind} of step {step}",
                remedy=_agree(where),
            )
        info = FrameInfo(frame_id, parent_id, step, kind, branch, generation, self.n_parts, ())
        header = layout.FrameHeader(archive_id, info, self.part, external)
        parents = self.reader.inherited(kind, parent_id, self.n_parts)
        create = self.storage.create_once
        self._frame = FrameWriter(self.storage, (header,), parents, self._publish, create=create)
        return self._frame

    def _publish(self, files: Sequence[Creation], info: FrameInfo) -> None:
        """Commit the part under its name."""
        try:
            self.written = WrittenPart(info, {info.path: files[0].commit()})
        except FileExistsError as error:
            raise ConflictError(
                f"another process has written {parts_in_words([self.part], self.n_parts)} of this frame",
                where=f"{self.storage.name}, {info.path}",
                remedy="what it wrote stays; run this part again",
            ) from error
        self.storage.sync(layout.FRAME_FOLDER)
        self.reader.see(info)
        if self._waiting:
            self._waiting.pop(0)
        else:
            self._next += 1

    def meta_of_others(self) -> dict[str, Any]:
        """Return another part's metadata of the first frame that waits for this part; empty if none waits."""
        if not self._waiting:
            return {}
        frame = self._waiting[0]
        reader = ArchiveReader(self.storage, partial(_of_part, frame.files[0].number))
        return reader.frame(frame.frame_id).meta

    def __exit__(self, *error: object) -> None:
        self.suspend()


def _of_part(part: int, catalog: Catalog) -> Iterator[FrameInfo]:
    """Yield one part of the pending frames that have it."""
    for frame in catalog.pending:
        for file in frame.files:
            if file.number == part:
                yield replace(frame, files=(file,))


def _shared_lock(storage: Storage, path: str | os.PathLike[str]) -> Lock:
    """Return the shared lock of an archive, created if it does not exist; wait for others to release it."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if storage.exclusive and not is_archive(path):
                ArchiveWriter(path, create=True).close()
            return storage.share()
        except LockedError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _require_same_job(reader: ArchiveReader, n_parts: int) -> None:
    """Refuse to write into an archive whose frames wait for parts of another job."""
    pending = reader.catalog.pending
    waiting = {frame.generation for frame in pending}
    before = {None, *(frame.frame_id for frame in reader.frames if frame.generation not in waiting)}
    for frame in pending:
        if frame.n_parts != n_parts or frame.parent_id not in before:
            raise ConflictError(
                f"the frame of step {frame.step}, which another job began, waits for {missing_parts(frame)}",
                where=reader.path,
                remedy=_agree(reader.path),
            )
        before = {frame.frame_id}


class WrittenPart(NamedTuple):
    """A part of a frame, and the storage's data to list its files (`Creation.commit`)."""

    part: FrameInfo
    files: Mapping[str, Any]


class SharedFrame:
    """A frame in parts written by several processes without an exclusive lock; this process lists it.

    Parameters
    ----------
    path
        The archive.

    Attributes
    ----------
    generation
        Generation of all parts; no file of the archive has it.

    Raises
    ------
    InputError
        The storage has locks, or does not support parts.
    NotFoundError, DamagedError, StorageError
        The archive does not exist, or its manifest cannot be read.

    Notes
    -----
    The parts do not count until the manifest lists the frame. The manifest is replaced only if it has not
    changed since the parts were begun. If another writer was faster, or discarded the parts, they are never
    listed, and a later writer deletes them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._storage = storage_at(path)
        if self._storage.exclusive:
            self._storage.share()  # raises InputError
        with storage_errors("the archive cannot be opened for writing", os.fspath(path)):
            content, self._tag = self._storage.load(MANIFEST_NAME)
            self._manifest = Manifest.parse(content, f"{self._storage.name}, manifest")
            taken = max(map(layout.file_number, self._storage.names(layout.FRAME_FOLDER)), default=0)
        self.generation = max(self._manifest.next_generation, taken + 1)

    def commit(self, written: Sequence[WrittenPart]) -> None:
        """List the frame.

        Parameters
        ----------
        written
            The parts that the processes have written (`PartWriter.written`).

        Raises
        ------
        ConflictError
            The parts do not form one frame, or another writer has changed the archive.
        StorageError
            The storage refused; the archive shows whether the frame is listed.
        """
        where, parts = self._storage.name, [each.part for each in written]
        frame = layout.joined(parts)
        same = {(part.frame_id, part.kind, part.n_parts, part.generation) for part in parts}
        numbers = [file.number for file in frame.files]
        if len(same) != 1 or frame.generation != self.generation or numbers != [*range(frame.n_parts)]:
            raise ConflictError("the parts are not those of one frame", where=where, remedy=_agree(where))
        with storage_errors("the frame cannot be listed", where):
            files = {path: staged for each in written for path, staged in each.files.items()}
            self._storage.gather(files, MANIFEST_NAME, self._manifest.with_frame(frame).pack(), self._tag)


class Committed(NamedTuple):
    """Result of a commit: listed frames, frames that still wait for parts, and discarded frames."""

    listed: tuple[FrameInfo, ...]
    waiting: tuple[FrameInfo, ...]
    discarded: tuple[FrameInfo, ...] = ()


def commit_parts(path: str | os.PathLike[str], *, discard: bool = False) -> Committed:
    """List every frame of an archive whose parts are all present.

    Parameters
    ----------
    path
        The archive.
    discard
        Discard frames that wait for parts, and frames whose parts contradict each other.

    Raises
    ------
    ConflictError
        Parts contradict each other, and `discard` is False: nothing is listed.
    LockedError
        A part or another writer is active.
    NotFoundError, DamagedError, StorageError
        As `ArchiveWriter`.
    """
    with storage_errors("the parts cannot be committed", os.fspath(path)):
        before = {frame.generation for frame in ArchiveReader.open(path).catalog.manifest.frames}
    with ArchiveWriter(path, pending="discard" if discard else "keep") as writer:
        listed = tuple(frame for frame in writer.manifest.frames if frame.generation not in before)
        return Committed(listed, writer.reader.catalog.pending, writer.discarded)
