"""Encoded checkpoints as plain data, shared by codecs and archives.

This module imports neither numpy nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """Entry of a block in the index of its frame.

    Parameters
    ----------
    key
        Unique among the tensors of the frame, or among its attachments.
    attachment
        False for a tensor, True for opaque bytes (skeletons, other files).
    codec
        Bitstream of the payload, ``name/version``.
    attributes
        Small msgpack values from the writer, such as role, dtype and shape; not interpreted here.
    offset, nbytes
        Position in the frame, and payload length.
    crc
        CRC-32C of the payload; None for a small block, whose frame was checked as a whole with its index.
    shared
        Whether the bytes are stored only once, with an earlier block of the same content.
    part
        Number of the part of the frame that holds the block.
    """

    key: str
    attachment: bool
    codec: str
    attributes: tuple[Any, ...]
    offset: int
    nbytes: int
    crc: int | None
    shared: bool = False
    part: int = 0

    @property
    def stored_nbytes(self) -> int:
        """Bytes stored for this block only; 0 if they are shared."""
        return 0 if self.shared else self.nbytes


class FramePart(NamedTuple):
    """One file of a frame; a frame of one part is one file.

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
    path: str
    nbytes: int
    digest: bytes
    offset: int | None = None


NAMED_BRANCH: Final = 1 << 31
"""Branches from this number on are named checkpoints, such as ``best``, outside of the training's history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """Entry of a frame in the archive's list, without its blocks.

    Parameters
    ----------
    frame_id
        16 bytes, unique in the archive.
    parent_id
        The frame that it continues (its reference, if it is a delta); None for the first.
    step
        Training step of the checkpoint.
    kind
        Keyframe or delta.
    branch
        0 for the first branch of training; a continuation from an earlier frame opens the next number; from
        `NAMED_BRANCH` on, a named checkpoint.
    generation
        Order of commits: of two frames for the same place, the higher generation is valid.
    nbytes
        Size of the frame in all its parts, including header, index and trailer.
    digest
        SHA-256 of the frame; for several parts, SHA-256 of their concatenated digests.
    path
        Its file, relative to the archive; for several parts, the file of the first.
    offset
        Offset within a segment; None for a separate file.
    n_parts
        Number of parts.
    parts
        The existing parts, if there are several.
    """

    frame_id: bytes
    parent_id: bytes | None
    step: int
    kind: FrameKind
    branch: int
    generation: int
    nbytes: int
    digest: bytes
    path: str = field(default="", compare=False)
    offset: int | None = field(default=None, compare=False)
    n_parts: int = 1
    parts: tuple[FramePart, ...] = field(default=(), compare=False)

    @property
    def files(self) -> tuple[FramePart, ...]:
        """The files of the frame, one per part."""
        return self.parts or (FramePart(0, self.path, self.nbytes, self.digest, self.offset),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files."""
        return tuple(part.path for part in self.parts) or (self.path,)

    @property
    def is_named(self) -> bool:
        """Whether the frame is a named checkpoint, not a step."""
        return self.branch >= NAMED_BRANCH

    @property
    def place(self) -> dict[str, Any]:
        """Identification of the frame in documents."""
        return {"step": self.step, "branch": self.branch, "path": self.path}
