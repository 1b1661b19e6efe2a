"""Removing and rewriting frames of an archive, packing and unpacking it."""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from inshrink_core.archive import layout
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.index import BlockColumns, FrameIndex
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import PackedFile, align_file, pack_directory, pack_header
from inshrink_core.archive.reader import ArchiveReader
from inshrink_core.archive.segment import (
    MAX_SMALL_FILES,
    batches,
    discard,
    frame_chunks,
    gathered,
    placed,
    separate,
    with_digests,
)
from inshrink_core.archive.storage import Creation, Storage, found_at, object_at, storage_at, storage_errors
from inshrink_core.archive.writer import ArchiveWriter
from inshrink_core.errors import DamagedError, ExistsError, InputError, NotFoundError
from inshrink_core.execution.progress import Counter, OnProgress
from inshrink_core.frame import FrameInfo, FrameKind, FramePart


def remove_frames(writer: ArchiveWriter, ids: Iterable[bytes]) -> None:
    """Remove frames for good: tombstones first, then the files.

    Raises
    ------
    NotFoundError
        No frame has such an id.
    InputError
        A delta frame that stays needs one of them as its reference; nothing is removed.
    """
    wanted = set(ids)
    known = {frame.frame_id: frame for frame in (*writer.reader.missing, *writer.reader.frames)}
    for frame_id in sorted(wanted - known.keys()):
        raise NotFoundError(f"there is no frame {frame_id.hex()}", where=writer.reader.path)
    with Rewrite(writer, ()) as rewrite:
        rewrite.switch(known[frame_id] for frame_id in sorted(wanted))


_FAILED: Final = "the archive cannot be rewritten"

_NEVER: Final = "\0"
"""No key, codec or attribute of a block: inheriting nothing is differing from this everywhere."""


class Rewrite:
    """Rewrites some frames of an archive and removes others; use it as a context manager.

    New frames get generations that are among the tombstones, so that they are not live before the
    switch. `switch` writes the one manifest that lists them in the place of the old ones; then the
    old files are deleted. Without `switch` everything stays as it was.

    Parameters
    ----------
    writer
        The archive, open for writing.
    frames
        The frames to be rewritten. Their order stays: generations are given out in it.

    Raises
    ------
    StorageError
        The system refused.

    Notes
    -----
    A rewritten frame keeps its id, step and branch, so references to it stay valid. Write
    children before their parents: as they inherit nothing, they are readable beside either version.
    """

    def __init__(self, writer: ArchiveWriter, frames: Iterable[FrameInfo]) -> None:
        self._writer = writer
        self._storage, self._where = writer.storage, writer.storage.name
        self._old = {frame.frame_id: frame for frame in sorted(frames, key=lambda frame: frame.generation)}
        self._new: dict[bytes, FrameInfo] = {}
        self._made: tuple[FrameInfo, ...] = ()
        self._frame: FrameWriter | None = None
        self._switched = False
        writer.flush(remote=False)
        first = writer.manifest.next_generation
        self._generations = {frame_id: first + i for i, frame_id in enumerate(self._old)}
        reserved = self._generations.values()
        manifest = replace(
            writer.manifest,
            tombstones=tuple(sorted({*writer.manifest.tombstones, *reserved})),
            next_generation=first + len(self._old),
        )
        if self._old:
            writer.write_manifest(manifest, _FAILED)

    def begin(
        self, frame_id: bytes, *, kind: FrameKind, parent_id: bytes | None, external: bool = False
    ) -> FrameWriter:
        """Start the new version of a frame.

        Parameters
        ----------
        frame_id
            One of the frames given.
        kind
            Keyframe or delta.
        parent_id
            The frame it continues from: its parent, or a nearer ancestor that stays.
        external
            Whether decoding a keyframe needs what the archive does not hold.

        Raises
        ------
        InputError
            It is not one of them, or is written already.
        StorageError
            The system refused.
        """
        if frame_id not in self._old or frame_id in self._new:
            raise InputError(f"frame {frame_id.hex()} is not to be rewritten", where=self._where)
        old, archive_id = self._old[frame_id], self._writer.manifest.archive_id
        place = (old.step, kind, old.branch, self._generations[frame_id], external)
        header = layout.FrameHeader(archive_id, frame_id, parent_id, *place, n_parts=old.n_parts)
        inherited = self._writer.reader.inherited(kind, parent_id, old.n_parts)
        parents = {number: _inheriting_nothing(index.meta) for number, index in inherited.items()}
        parts, apart = self._parts_of(old) if old.n_parts > 1 else ({}, [])
        self._frame = FrameWriter(
            *(self._storage, header.parts, parents, self._publish),
            route=lambda key: parts.get(key, 0),
            apart=apart,
        )
        return self._frame

    def _parts_of(self, old: FrameInfo) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return the part of each tensor of a frame, and what each part says beside its meta."""
        before = self._writer.reader.frame(old.frame_id)
        return {entry.key: entry.part for entry in before.entries if not entry.attachment}, [
            {key: value for key, value in before.meta_of(number).items() if key in before.apart}
            for number in range(old.n_parts)
        ]

    def _publish(self, files: Sequence[Creation], info: FrameInfo) -> None:
        """Give a frame its name: it is not live, as its generation is buried."""
        for file in files:
            file.commit()
        self._new[info.frame_id] = info

    def switch(self, gone: Iterable[FrameInfo] = ()) -> None:
        """Put the new frames in the place of the old, and remove others, all at once.

        Parameters
        ----------
        gone
            Frames to remove for good. No delta frame that stays may have one as its parent.

        Raises
        ------
        InputError
            A frame was not rewritten, or a frame that stays needs one that goes; nothing is changed.
        StorageError
            The system refused.
        """
        if self._new.keys() != self._old.keys():
            raise InputError("not every frame was rewritten", where=self._where)
        removed = {frame.generation: frame for frame in (*gone, *self._old.values())}
        stay = self._writer.manifest.without_frames(frozenset(removed))
        frames = tuple(sorted((*stay.frames, *self._new.values()), key=lambda frame: frame.generation))
        _require_references(frames, removed.values(), self._where)
        fresh = set(self._generations.values())
        manifest = replace(stay, frames=frames, tombstones=tuple(sorted(set(stay.tombstones) - fresh)))
        try:
            # The names of the new frames must be durable before a manifest lists them.
            with storage_errors(_FAILED, self._where):
                self._storage.sync(layout.FRAME_FOLDER)
                # The frames that stay of segments from which others go are written anew.
                left = {frame.path for frame in removed.values() if frame.offset is not None}
                rows = [[frame for frame in frames if frame.path == path] for path in sorted(left)]
                manifest = gathered(self._storage, manifest, rows)
            self._made = manifest.frames
            self._writer.write_manifest(manifest, _FAILED)
        finally:
            self._switched = self._writer.manifest == manifest
        self._writer.delete_unlisted((*removed.values(), *frames))
        self._writer.gather()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._frame is not None:
            self._frame.abort()
        if not self._switched:
            self._writer.delete_unlisted((*self._new.values(), *self._made))


def _inheriting_nothing(meta: Mapping[str, bytes]) -> FrameIndex:
    """Return an index whose columns no frame inherits; only its meta is."""
    columns = BlockColumns((_NEVER,), (_NEVER,), ((_NEVER,),))
    return FrameIndex(columns, columns, (), (), (), meta, places=(-1,))


def _require_references(frames: Iterable[FrameInfo], removed: Iterable[FrameInfo], where: str) -> None:
    """Refuse to leave a delta frame without its parent."""
    rows = tuple(frames)
    gone = {frame.frame_id: frame for frame in removed}
    for frame_id in {frame.frame_id for frame in rows}:
        gone.pop(frame_id, None)
    for frame in rows:
        if frame.kind is FrameKind.DELTA and frame.parent_id in gone:
            raise InputError(
                f"step {gone[frame.parent_id].step} is the reference of step {frame.step}, "
                f"and step {frame.step} would lose it",
                where=where,
                remedy="remove both, or re-key the one that stays",
            )


def pack_archive(
    reader: ArchiveReader,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: OnProgress | None = None,
) -> int:
    """Write the live frames and a manifest of them into one file.

    Parameters
    ----------
    reader
        The archive, a folder or packed itself.
    target
        The file to make.
    force
        Replace the file if it exists.
    progress
        Called after each piece copied.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    ExistsError
        The target exists and `force` is not set, or is a folder.
    MissingFrameError, DamagedError
        A frame is gone, or not the one that was committed: nothing is written.
    StorageError
        The system refused; nothing is left behind.

    Notes
    -----
    Memory is bounded by 4 MiB. Every frame's SHA-256 is compared as it is copied. Frames that a writer
    commits meanwhile are not in it.
    """
    storage, name = object_at(target)
    where = os.fspath(target)
    with storage_errors("the archive cannot be packed", where):
        _require_free(target, force)
        reader.require_whole()
        with storage.create(name, over=force) as file:
            nbytes = _write(reader, file, _counter(reader, progress, "pack"))
            try:
                file.commit()
            except FileExistsError:
                _require_free(target, force)
                raise
        storage.sync("")
    return nbytes


def _require_free(target: str | os.PathLike[str], force: bool) -> None:
    """Refuse to write over what is there."""
    found, where = found_at(target), os.fspath(target)
    if isinstance(found, Storage):
        raise ExistsError("a folder is there already", where=where, remedy="choose another name")
    if found is not None and not force:
        raise ExistsError(
            "the file exists already", where=where, remedy="write elsewhere, or use --force to replace it"
        )


def _write(reader: ArchiveReader, file: Creation, counter: Counter) -> int:
    """Write header, frames, manifest, directory and trailer, and return how many bytes they are."""
    files: list[PackedFile] = []
    frames: list[FrameInfo] = []
    header = pack_header()
    file.write(header)
    end = len(header)
    for frame in reader.frames:
        place, digests = separate(frame), []
        for part, at in zip(frame.files, place.files, strict=True):
            files.append(PackedFile(at.path, align_file(end), part.nbytes))
            file.write(bytes(files[-1].offset - end))
            digests.append(_copy(reader, frame, part, file, counter))
            end = files[-1].offset + part.nbytes
        frames.append(with_digests(place, digests))
    content = replace(_manifest(reader, frames), tombstones=()).pack()
    begin = align_file(end)
    files.append(PackedFile(MANIFEST_NAME, begin, len(content)))
    directory = pack_directory(tuple(files), begin + len(content))
    file.write(bytes(begin - end) + content + directory)
    return begin + len(content) + len(directory)


def _manifest(reader: ArchiveReader, frames: Iterable[FrameInfo]) -> Manifest:
    """Return the manifest of a copy."""
    catalog = reader.catalog
    return replace(catalog.manifest, frames=tuple(frames), next_generation=catalog.next_generation)


def _counter(reader: ArchiveReader, progress: OnProgress | None, stage: str) -> Counter:
    return Counter(progress, stage, sum(frame.nbytes for frame in reader.frames))


def _copy(
    reader: ArchiveReader,
    frame: FrameInfo,
    part: FramePart,
    file: Creation,
    counter: Counter,
) -> bytes:
    """Copy a file of a frame and return its digest, which is compared if the manifest lists the frame."""
    digest, nbytes = hashlib.sha256(), 0
    for chunk in frame_chunks(reader.storage, part):
        file.write(chunk)
        digest.update(chunk)
        nbytes += len(chunk)
        counter.add(len(chunk), frame.step)
    where = f"{reader.path}, {part.path}"
    if nbytes != part.nbytes:
        raise DamagedError(f"the frame of step {frame.step} ends early", where=where)
    if part.digest not in (b"", digest.digest()):
        raise DamagedError(
            f"the frame of step {frame.step} is damaged: its SHA-256 is not the one in the manifest",
            where=where,
            remedy="`inshrink verify` says what is wrong; restore the frame from a backup",
        )
    return digest.digest()


def unpack_archive(
    reader: ArchiveReader, target: str | os.PathLike[str], *, progress: OnProgress | None = None
) -> None:
    """Write an archive as a folder, to which frames can be appended.

    Parameters
    ----------
    reader
        The archive, packed or a folder.
    target
        The folder to make; it must not exist.
    progress
        Called after each piece copied.

    Raises
    ------
    ExistsError
        The target exists.
    MissingFrameError, DamagedError
        A frame is gone, or not the one that was packed.
    StorageError
        The system refused; nothing is left behind.
    """
    with storage_errors("the archive cannot be unpacked", os.fspath(target)):
        if found_at(target) is not None:
            raise ExistsError("it exists already", where=os.fspath(target), remedy="choose another name")
        reader.require_whole()
        with storage_at(target).building() as storage:
            made: list[str] = []
            try:
                _write_folder(reader, storage, made, _counter(reader, progress, "unpack"))
            except BaseException:
                discard(storage, made)
                raise


def _write_folder(reader: ArchiveReader, storage: Storage, made: list[str], counter: Counter) -> None:
    """Write the frames, then the manifest; append the paths of files to `made`."""
    frames: list[FrameInfo] = []
    groups = batches(reader.frames) if len(reader.frames) > MAX_SMALL_FILES else zip(reader.frames)
    for batch in groups:
        places = placed(batch, batch[-1].generation)
        rows = [
            (at.path, frame, part)
            for frame, place in zip(batch, places, strict=True)
            for part, at in zip(frame.files, place.files, strict=True)
        ]
        digests: list[bytes] = []
        for path, members in itertools.groupby(rows, key=operator.itemgetter(0)):
            with storage.create(path) as file:
                digests += [_copy(reader, frame, part, file, counter) for _, frame, part in members]
                file.commit()
            made.append(path)
        each = iter(digests)
        frames += [with_digests(place, [*itertools.islice(each, len(place.files))]) for place in places]
    if made:
        storage.sync(layout.FRAME_FOLDER)
    storage.replace(MANIFEST_NAME, _manifest(reader, frames).pack(), None)
