"""The bytes of a frame as they lie in storage, and whether they are those that were committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from inshrink_core.archive.layout import joined
from inshrink_core.archive.storage import Storage
from inshrink_core.errors import StorageError
from inshrink_core.frame import FrameInfo, FramePart

_CHUNK_NBYTES: Final = 4 << 20
"""Read at a time: one request of a remote archive, and little memory."""


def frame_chunks(storage: Storage, part: FramePart) -> Iterator[bytes]:
    """Yield the bytes of a frame, or of a part of one, piece by piece."""
    begin = part.offset or 0
    for offset in range(begin, begin + part.nbytes, _CHUNK_NBYTES):
        yield storage.read(part.path, offset, min(_CHUNK_NBYTES, begin + part.nbytes - offset))


def frame_digest(storage: Storage, part: FramePart) -> bytes:
    """Return the SHA-256 of a frame, or of a part; of one that is a file of its own, that of the file."""
    nbytes = storage.size(part.path) if part.offset is None else part.nbytes
    digest = hashlib.sha256()
    for chunk in frame_chunks(storage, part._replace(nbytes=nbytes)):
        digest.update(chunk)
    return digest.digest()


def is_sound(storage: Storage, frame: FrameInfo) -> bool:
    """Whether a frame lies where the manifest says, as it was committed."""
    try:
        return all(frame_digest(storage, part) == part.digest for part in frame.files)
    except (OSError, StorageError):
        return False


def digested(storage: Storage, frame: FrameInfo) -> FrameInfo:
    """Return a frame with the digests of what is there."""
    if frame.n_parts == 1:
        return replace(frame, digest=frame_digest(storage, frame.files[0]))
    parts = tuple(part._replace(digest=frame_digest(storage, part)) for part in frame.parts)
    return joined([replace(frame, parts=parts)])
