"""The bytes of frames in storage: digests, and segments, which hold several small frames in one file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from inshrink_core.archive import layout
from inshrink_core.archive.manifest import Manifest
from inshrink_core.archive.storage.contract import Storage
from inshrink_core.errors import InshrinkError, StorageError
from inshrink_core.frame import FrameInfo, FramePart

_CHUNK_NBYTES: Final = 4 << 20
"""Bytes read at a time: one request of a remote archive, and little memory."""

MAX_SMALL_FILES: Final = 64
"""Number of small files above which an archive merges them."""

GROUP_FRAMES: Final = 64
"""Most frames of a group."""


def batches(frames: Iterable[FrameInfo]) -> Iterator[tuple[FrameInfo, ...]]:
    """Yield frames that may share a file, in order; large frames and frames in parts come alone."""
    batch: list[FrameInfo] = []
    nbytes = 0
    for frame in frames:
        small = frame.nbytes <= layout.SMALL_FRAME_NBYTES and frame.n_parts == 1
        if batch and not (small and nbytes + frame.nbytes <= layout.MAX_SEGMENT_NBYTES):
            yield tuple(batch)
            batch, nbytes = [], 0
        batch.append(frame)
        nbytes += frame.nbytes if small else layout.MAX_SEGMENT_NBYTES
    if batch:
        yield tuple(batch)


def separate(frame: FrameInfo) -> FrameInfo:
    """Return a frame with its place outside of segments."""
    return frame if frame.n_parts > 1 else frame.at(layout.frame_path(frame.generation, frame.step))


def placed(batch: Sequence[FrameInfo], number: int) -> tuple[FrameInfo, ...]:
    """Return frames with their places in one segment; a single frame stays separate."""
    if len(batch) == 1:
        return (separate(batch[0]),)
    offsets = itertools.accumulate((frame.nbytes for frame in batch), initial=0)
    path = layout.segment_path(number)
    return tuple(frame.at(path, offset) for frame, offset in zip(batch, offsets, strict=False))


def write_file(storage: Storage, path: str, contents: Iterable[bytes]) -> None:
    """Write a new file of one or several frames.

    The file name is not durable yet (`Storage.sync`). After an error the file does not exist.

    Raises
    ------
    FileExistsError
        Another writer has written the file.
    """
    try:
        with storage.create(path) as file:
            for content in contents:
                file.write(content)
            file.commit()
    except BaseException as error:
        if not isinstance(error, FileExistsError):
            discard(storage, [path])
        raise


def discard(storage: Storage, paths: Iterable[str]) -> None:
    """Delete unlisted files; the next writer deletes those that cannot be deleted now."""
    with contextlib.suppress(OSError, InshrinkError):
        for path in paths:
            storage.delete(path)
        storage.sync(layout.FRAME_FOLDER)


def small_files(manifest: Manifest) -> list[list[FrameInfo]]:
    """Return the frames of each small file; frames in parts are excluded."""
    files: dict[str, list[FrameInfo]] = {}
    for frame in manifest.frames:
        if frame.n_parts == 1:
            files.setdefault(frame.path, []).append(frame)
    return [frames for frames in files.values() if sum(f.nbytes for f in frames) <= layout.SMALL_FRAME_NBYTES]


def gathered(storage: Storage, manifest: Manifest, files: Iterable[Sequence[FrameInfo]]) -> Manifest:
    """Copy the frames of some files into as few new ones as possible; return the manifest that lists them.

    A file with a missing or damaged frame stays as it is. The function neither writes the manifest nor
    deletes files; after an error no new file remains.
    """
    intact = [frame for file in files if all(is_intact(storage, f) for f in file) for frame in file]
    made: list[str] = []
    try:
        for batch in batches(sorted(intact, key=lambda frame: frame.generation)):
            if len(batch) == 1 and batch[0].offset is None:
                continue
            members = placed(batch, manifest.next_generation)
            chunks = (chunk for frame in batch for chunk in frame_chunks(storage, frame.files[0]))
            write_file(storage, members[0].path, chunks)
            made.append(members[0].path)
            manifest = manifest.with_places(members)
        if made:
            storage.sync(layout.FRAME_FOLDER)
    except BaseException:
        discard(storage, made)
        raise
    return manifest


def frame_chunks(storage: Storage, part: FramePart) -> Iterator[bytes]:
    """Yield the bytes of a frame or part in chunks."""
    begin = part.offset or 0
    for offset in range(begin, begin + part.nbytes, _CHUNK_NBYTES):
        yield storage.read(part.path, offset, min(_CHUNK_NBYTES, begin + part.nbytes - offset))


def frame_digest(storage: Storage, part: FramePart) -> bytes:
    """Return the SHA-256 of a frame or part; a separate file is hashed as a whole."""
    nbytes = storage.size(part.path) if part.offset is None else part.nbytes
    digest = hashlib.sha256()
    for chunk in frame_chunks(storage, replace(part, nbytes=nbytes)):
        digest.update(chunk)
    return digest.digest()


def is_intact(storage: Storage, frame: FrameInfo) -> bool:
    """Return whether every file of the frame has the digest in the manifest."""
    try:
        return all(frame_digest(storage, part) == part.digest for part in frame.files)
    except (OSError, StorageError):
        return False


def with_digests(storage: Storage, frame: FrameInfo) -> FrameInfo:
    """Return a frame with the digest of each of its files; unknown ones are computed."""
    known = (part.digest or frame_digest(storage, part) for part in frame.files)
    files = (replace(part, digest=digest) for part, digest in zip(frame.files, known, strict=True))
    return replace(frame, files=tuple(files))
