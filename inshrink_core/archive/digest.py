"""The bytes of a frame as they lie in storage, and whether they are those that were committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from inshrink_core.archive.storage import Storage
from inshrink_core.errors import StorageError
from inshrink_core.frame import FrameInfo

_CHUNK_NBYTES: Final = 4 << 20
"""Read at a time: one request of a remote archive, and little memory."""


def frame_chunks(storage: Storage, frame: FrameInfo, nbytes: int) -> Iterator[bytes]:
    """Yield so many bytes piece by piece from where a frame begins."""
    begin = frame.offset or 0
    for offset in range(begin, begin + nbytes, _CHUNK_NBYTES):
        yield storage.read(frame.path, offset, min(_CHUNK_NBYTES, begin + nbytes - offset))


def frame_digest(storage: Storage, frame: FrameInfo) -> bytes:
    """Return the SHA-256 of a frame; of one that is a file of its own, that of the file."""
    nbytes = storage.size(frame.path) if frame.offset is None else frame.nbytes
    digest = hashlib.sha256()
    for chunk in frame_chunks(storage, frame, nbytes):
        digest.update(chunk)
    return digest.digest()


def is_sound(storage: Storage, frame: FrameInfo) -> bool:
    """Whether a frame lies where the manifest says, as it was committed."""
    try:
        return frame_digest(storage, frame) == frame.digest
    except (OSError, StorageError):
        return False
