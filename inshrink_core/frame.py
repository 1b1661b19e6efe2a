"""Encoded checkpoints as plain data, shared by codecs and archives.

This module imports neither numpy nor torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple


class FrameKind(StrEnum):
    """Kind of a frame: a `keyframe` is self-contained, a `delta` needs its reference."""

    KEYFRAME = "keyframe"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor's bytes inside a frame.

    Parameters
    ----------
    codec
        Bitstream that decodes it, ``name/version``. Equal names are mutually decodable, and only these.
    payload
        All data for the decoder except the spec and the reference.
    """

    codec: str
    payload: bytes | memoryview


class BlockEntry(NamedTuple):
    """Entry of a block in the index of its frame.

    Parameters
    ----------
    key
        Unique among the tensors of the frame, or among its attachments.
    codec
        Bitstream of the payload, ``name/version``.
    attributes
        Small msgpack values from the writer, such as role, dtype and shape; not interpreted here.
    attachment
        False for a tensor, True for opaque bytes (skeletons, other files).
    offset, nbytes
        Position in the frame, and payload length.
    crc
        CRC-32C of the payload; None for a small block, whose frame was checked as a whole with its index.
    back
        Distance to the earlier block with the same bytes, which are stored once; 0 if this block stores them.
    part
        Number of the part of the frame that holds the block.
    """

    key: str
    codec: str
    attributes: tuple[Any, ...]
    attachment: bool
    offset: int
    nbytes: int
    crc: int | None
    back: int = 0
    part: int = 0

    @property
    def stored_nbytes(self) -> int:
        """Bytes stored for this block only; 0 if they are shared."""
        return 0 if self.back else self.nbytes


@dataclass(frozen=True, slots=True)
class FramePart:
    """One part of a frame; most frames have a single one. Equality ignores the place.

    Parameters
    ----------
    number
        Number of the part, from 0.
    path, offset
        The file, relative to the archive, and the offset within a segment; None for a separate file.
    nbytes, digest
        Size and SHA-256.
    """

    number: int
    path: str = field(compare=False)
    nbytes: int
    digest: bytes
    offset: int | None = field(default=None, compare=False)


NAMED_BRANCH: Final = 1 << 31
"""Branches from this number on are named checkpoints, such as ``best``, outside of the training's history."""


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """Entry of a frame in the archive's list, without its blocks.

    Parameters
    ----------
    frame_id
        16 bytes, unique in the archive.
    parent_id
        The frame that it continues (its reference, if it is a delta); None for the first.
    step
        Training step.
    kind
        ``keyframe`` (decodes alone) or ``delta`` (needs the previous frame).
    branch
        Number of the branch, from 0; from `NAMED_BRANCH` on, a named checkpoint.
    generation
        Order of commits: of two frames for the same place, the higher generation is valid.
    n_parts
        Number of parts.
    files
        The existing parts.
    """

    frame_id: bytes
    parent_id: bytes | None
    step: int
    kind: FrameKind
    branch: int
    generation: int
    n_parts: int
    files: tuple[FramePart, ...]

    @property
    def nbytes(self) -> int:
        """Size of the frame."""
        return sum(file.nbytes for file in self.files)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the frame; for several parts, of their concatenated digests; empty if unknown."""
        digests = [file.digest for file in self.files]
        if len(digests) == 1 or not all(digests):
            return digests[0] if len(digests) == 1 else b""
        return hashlib.sha256(b"".join(digests)).digest()

    @property
    def path(self) -> str:
        """The file of the frame, relative to the archive; for several parts, that of the first."""
        return self.files[0].path

    @property
    def offset(self) -> int | None:
        """The offset within a segment; None for a separate file."""
        return self.files[0].offset

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files."""
        return tuple(file.path for file in self.files)

    def at(self, path: str, offset: int | None = None) -> FrameInfo:
        """Return the frame, which has a single part, at another place."""
        return replace(self, files=(replace(self.files[0], path=path, offset=offset),))

    @property
    def is_named(self) -> bool:
        """Whether the frame is a named checkpoint, not a step."""
        return self.branch >= NAMED_BRANCH

    @property
    def place(self) -> dict[str, Any]:
        """Identification of the frame in documents.

        Returns
        -------
        step : int
            Training step.
        branch : int
            Number of the branch, from 0.
        path : str
            File within the archive.
        """
        return {"step": self.step, "branch": self.branch, "path": self.path}
