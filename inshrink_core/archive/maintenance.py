"""Remove and rewrite frames of an archive, pack and unpack it."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from inshrink_core.archive import layout, segment
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.index import FrameIndex
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import PackedFile, align_file, pack_directory, pack_header
from inshrink_core.archive.reader import ArchiveReader
from inshrink_core.archive.storage.contract import Creation, Storage, storage_errors
from inshrink_core.archive.storage.registry import find_at, object_at, storage_at
from inshrink_core.archive.writer import ArchiveWriter
from inshrink_core.errors import DamagedError, ExistsError, InputError, NotFoundError
from inshrink_core.execution.progress import Counter, OnProgress
from inshrink_core.frame import BlockEntry, FrameInfo, FrameKind, FramePart


def remove_frames(writer: ArchiveWriter, ids: Iterable[bytes]) -> None:
    """Remove frames permanently: first write tombstones, then delete files.

    Raises
    ------
    NotFoundError
        No frame has such an id.
    InputError
        A remaining delta frame needs one of the frames as its reference; nothing is removed.
    """
    wanted = set(ids)
    known = {frame.frame_id: frame for frame in (*writer.reader.missing, *writer.reader.frames)}
    for frame_id in sorted(wanted - known.keys()):
        raise NotFoundError(f"there is no frame {frame_id.hex()}", where=writer.reader.path)
    with Rewrite(writer, ()) as rewrite:
        rewrite.switch(known[frame_id] for frame_id in sorted(wanted))


_FAILED: Final = "the archive cannot be rewritten"

_NEVER: Final = "\0"
"""A value that no key, codec or attribute equals; columns of it are never inherited."""


class Rewrite(AbstractContextManager["Rewrite", None]):
    """Rewrites some frames of an archive and removes others; use it as a context manager.

    New frames get generations that are listed as tombstones, so they are not live before the switch. `switch`
    writes a single manifest that replaces the old frames with the new ones, then deletes the old files.
    Without `switch` nothing changes.

    Parameters
    ----------
    writer
        The archive, open for writing.
    frames
        The frames to rewrite. They receive ascending generations in their present order.

    Raises
    ------
    StorageError
        The storage refused.

    Notes
    -----
    A rewritten frame keeps its id, step and branch, so references to it stay valid. Write children before
    their parents: since they inherit no columns, they are readable beside either version.
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
            with storage_errors(_FAILED, self._where):
                writer.write_manifest(manifest)

    def begin(
        self, frame_id: bytes, *, kind: FrameKind, parent_id: bytes | None, external: bool = False
    ) -> FrameWriter:
        """Start the new version of a frame.

        Parameters
        ----------
        frame_id
            Id of one of the frames to rewrite.
        kind
            Keyframe or delta.
        parent_id
            The frame it continues from: its parent, or a nearer ancestor that stays.
        external
            Whether decoding a keyframe needs data from outside the archive.

        Raises
        ------
        InputError
            The frame is not among the frames to rewrite, or was rewritten already.
        StorageError
            The storage refused.
        """
        if frame_id not in self._old or frame_id in self._new:
            raise InputError(f"frame {frame_id.hex()} is not to be rewritten", where=self._where)
        old, archive_id = self._old[frame_id], self._writer.manifest.archive_id
        generation = self._generations[frame_id]
        info = replace(old, parent_id=parent_id, kind=kind, generation=generation, files=())
        headers = [layout.FrameHeader(archive_id, info, part, external) for part in range(old.n_parts)]
        inherited = self._writer.reader.inherited(kind, parent_id, old.n_parts)
        parents = {number: _inheriting_nothing(index.meta) for number, index in inherited.items()}
        parts, apart = self._parts_of(old) if old.n_parts > 1 else ({}, [])
        self._frame = FrameWriter(
            *(self._storage, headers, parents, self._publish),
            route=lambda key: parts.get(key, 0),
            apart=apart,
        )
        return self._frame

    def _parts_of(self, old: FrameInfo) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return the part number of each tensor of a frame, and the additional metadata of each part."""
        before = self._writer.reader.frame(old.frame_id)
        return {entry.key: entry.part for entry in before.tensors}, [
            {key: value for key, value in before.meta_of(number).items() if key in before.apart}
            for number in range(old.n_parts)
        ]

    def _publish(self, files: Sequence[Creation], info: FrameInfo) -> None:
        """Commit the files of a frame, which is not live because its generation is a tombstone."""
        for file in files:
            file.commit()
        self._new[info.frame_id] = info

    def switch(self, gone: Iterable[FrameInfo] = ()) -> None:
        """Replace the old frames with the new ones and remove others, atomically.

        Parameters
        ----------
        gone
            Frames to remove permanently. No remaining delta frame may have one of them as its parent.

        Raises
        ------
        InputError
            A frame was not rewritten, or a remaining frame needs one of `gone`; nothing changes.
        StorageError
            The storage refused.
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
                # Remaining frames of segments that lose a frame are copied to new segments.
                left = {frame.path for frame in removed.values() if frame.offset is not None}
                rows = [[frame for frame in frames if frame.path == path] for path in sorted(left)]
                manifest = segment.gathered(self._storage, manifest, rows)
                self._made = manifest.frames
                self._writer.write_manifest(manifest)
        finally:
            self._switched = self._writer.manifest == manifest
        self._writer.delete_unlisted((*removed.values(), *frames))
        self._writer.gather()

    def __exit__(self, *error: object) -> None:
        if self._frame is not None:
            self._frame.abort()
        if not self._switched:
            self._writer.delete_unlisted((*self._new.values(), *self._made))


def _inheriting_nothing(meta: Mapping[str, bytes]) -> FrameIndex:
    """Return an index from which a frame inherits metadata but no columns."""
    entries = (BlockEntry(_NEVER, _NEVER, (_NEVER,), sort, 0, 0, None) for sort in (False, True))
    return FrameIndex(tuple(entries), meta, places=(-1,))


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
    """Write the live frames and their manifest into one file.

    Parameters
    ----------
    reader
        The archive, a folder or itself packed.
    target
        The file to create.
    force
        Replace the file if it exists.
    progress
        Called after each copied chunk.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    ExistsError
        The target is a folder, or exists and `force` is False.
    MissingFrameError, DamagedError
        A frame is missing or differs from the committed one: nothing is written.
    StorageError
        The storage refused; no file remains.

    Notes
    -----
    Memory use is bounded by 4 MiB. The SHA-256 of every frame is verified during the copy. Frames that a
    writer commits meanwhile are not included.
    """
    storage, name = object_at(target)
    where = os.fspath(target)
    with storage_errors("the archive cannot be packed", where):
        _require_free(target, force)
        reader.require_complete()
        with storage.create(name, over=force) as file:
            nbytes = _write(reader, file, _counter(reader, progress, "pack"))
            file.commit()
        storage.sync("")
    return nbytes


def _require_free(target: str | os.PathLike[str], force: bool) -> None:
    """Refuse to overwrite an existing file or folder."""
    found, where = find_at(target), os.fspath(target)
    if isinstance(found, Storage):
        raise ExistsError("a folder is there already", where=where, remedy="choose another name")
    if found is not None and not force:
        raise ExistsError(
            "the file already exists", where=where, remedy="write elsewhere, or use --force to replace it"
        )


def _write(reader: ArchiveReader, file: Creation, counter: Counter) -> int:
    """Write header, frames, manifest, directory and trailer, and return their total size in bytes."""
    files: list[PackedFile] = []
    frames: list[FrameInfo] = []
    header = pack_header()
    file.write(header)
    end = len(header)
    for frame in _live(reader):
        frames.append(segment.separate(frame))
        for part, at in zip(frame.files, frames[-1].files, strict=True):
            files.append(PackedFile(at.path, align_file(end), part.nbytes))
            file.write(bytes(files[-1].offset - end))
            for chunk in _verified(reader, frame, part, counter):
                file.write(chunk)
            end = files[-1].offset + part.nbytes
    content = replace(_manifest(reader, frames), tombstones=()).pack()
    begin = align_file(end)
    files.append(PackedFile(MANIFEST_NAME, begin, len(content)))
    directory = pack_directory(tuple(files), begin + len(content))
    file.write(bytes(begin - end) + content + directory)
    return begin + len(content) + len(directory)


def _manifest(reader: ArchiveReader, frames: Iterable[FrameInfo]) -> Manifest:
    catalog = reader.catalog
    return replace(catalog.manifest, frames=tuple(frames), next_generation=catalog.next_generation)


def _counter(reader: ArchiveReader, progress: OnProgress | None, stage: str) -> Counter:
    return Counter(progress, stage, sum(frame.nbytes for frame in reader.frames))


def _live(reader: ArchiveReader) -> list[FrameInfo]:
    """Return the live frames, with the digests of those that the manifest does not list."""
    return [segment.with_digests(reader.storage, frame) for frame in reader.frames]


def _verified(reader: ArchiveReader, frame: FrameInfo, part: FramePart, counter: Counter) -> Iterator[bytes]:
    """Yield the bytes of a file of a frame, and verify their SHA-256 at the end."""
    digest, nbytes = hashlib.sha256(), 0
    for chunk in segment.frame_chunks(reader.storage, part):
        yield chunk
        digest.update(chunk)
        nbytes += len(chunk)
        counter.add(len(chunk), frame.step)
    where = f"{reader.path}, {part.path}"
    if nbytes != part.nbytes:
        raise DamagedError(f"the frame of step {frame.step} ends early", where=where)
    if part.digest != digest.digest():
        raise DamagedError(
            f"the frame of step {frame.step} is damaged: its SHA-256 is not the one in the manifest",
            where=where,
            remedy="`inshrink verify` says what is wrong; restore the frame from a backup",
        )


def unpack_archive(
    reader: ArchiveReader, target: str | os.PathLike[str], *, progress: OnProgress | None = None
) -> None:
    """Write an archive as a folder, to which frames can be appended.

    Parameters
    ----------
    reader
        The archive, packed or a folder.
    target
        The folder to create; it must not exist.
    progress
        Called after each copied chunk.

    Raises
    ------
    ExistsError
        The target exists.
    MissingFrameError, DamagedError
        A frame is missing or differs from the packed one.
    StorageError
        The storage refused; no file remains.
    """
    with storage_errors("the archive cannot be unpacked", os.fspath(target)):
        if find_at(target) is not None:
            raise ExistsError("it already exists", where=os.fspath(target), remedy="choose another name")
        reader.require_complete()
        with storage_at(target).building() as storage:
            made: list[str] = []
            try:
                _write_folder(reader, storage, made, _counter(reader, progress, "unpack"))
            except BaseException:
                segment.discard(storage, made)
                raise


def _write_folder(reader: ArchiveReader, storage: Storage, made: list[str], counter: Counter) -> None:
    """Write the frames, then the manifest; append the paths of written files to `made`."""
    frames: list[FrameInfo] = []
    live = _live(reader)
    for batch in segment.batches(live) if len(live) > segment.MAX_SMALL_FILES else zip(live):
        places = segment.placed(batch, batch[-1].generation)
        contents: dict[str, list[Iterator[bytes]]] = {}
        for frame, place in zip(batch, places, strict=True):
            for part, at in zip(frame.files, place.files, strict=True):
                contents.setdefault(at.path, []).append(_verified(reader, frame, part, counter))
        for path, chunks in contents.items():
            segment.write_file(storage, path, itertools.chain.from_iterable(chunks))
            made.append(path)
        frames += places
    if made:
        storage.sync(layout.FRAME_FOLDER)
    storage.replace(MANIFEST_NAME, _manifest(reader, frames).pack(), None)
