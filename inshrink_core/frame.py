"""An encoded checkpoint as plain data: what codecs produce, archives store and readers list.

This module imports neither numpy nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple


class FrameKind(StrEnum):
    """Whether a frame stands alone (`keyframe`) or needs its reference (`delta`)."""

    KEYFRAME = "keyframe"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor's bytes inside a frame.

    Parameters
    ----------
    codec
        Bitstream that decodes it, ``name/version``: same text if and only if mutually decodable.
    payload
        Everything the decoder needs besides the spec and the reference.
    """

    codec: str
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """Where a block lies in its frame, and what it is.

    Parameters
    ----------
    key
        Unique among the tensors, or among the attachments, of the frame.
    attachment
        False for a tensor, True for opaque bytes of the rest (skeletons, side files).
    codec
        Bitstream of the payload, ``name/version``.
    attributes
        Small msgpack values the writer attached, such as role, dtype and shape; uninterpreted here.
    offset, nbytes
        Position in the frame, and payload length.
    crc
        CRC-32C of the payload; None for a small block, whose frame was checked as a whole with its index.
    shared
        Whether the bytes are stored with a block before it that has the same.
    part
        The part of the frame that it is in.
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
        """Bytes that the frame has for this block alone."""
        return 0 if self.shared else self.nbytes


class FramePart(NamedTuple):
    """One file of a frame: the frame itself where it has one part.

    Parameters
    ----------
    number
        Which part it is, from 0 on.
    path, offset
        The file, relative to the archive, and where it begins in a segment; None for a file of its own.
    nbytes, digest
        Size and SHA-256.
    """

    number: int
    path: str
    nbytes: int
    digest: bytes
    offset: int | None = None


NAMED_BRANCH: Final = 1 << 31
"""Branches from this number on have a name, such as ``best``, and are no line of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInfo:
    """One frame as the archive lists it, without its blocks.

    Parameters
    ----------
    frame_id
        16 bytes, unique in the archive.
    parent_id
        The frame it continues from (its reference, if it is a delta); None for the first.
    step
        Training step of the checkpoint.
    kind
        Keyframe or delta.
    branch
        0 for the first line of training; a continuation from an earlier frame opens the next number; from
        `NAMED_BRANCH` on, a checkpoint with a name of its own.
    generation
        Order of commits: of two frames that claim the same place, the higher wins.
    nbytes
        Size of the whole frame, header, index and trailer included; of all its parts.
    digest
        SHA-256 of the whole frame; where it has several parts, of their digests one after another.
    path
        The file it lies in, relative to the archive; of several parts, the first.
    offset
        Where it begins in a segment; None where it is a file of its own.
    n_parts
        How many parts it has.
    parts
        The parts that are there, where it has several.
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
        """The files it lies in: one, or one a part."""
        return self.parts or (FramePart(0, self.path, self.nbytes, self.digest, self.offset),)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of these files."""
        return tuple(part.path for part in self.parts) or (self.path,)

    @property
    def is_named(self) -> bool:
        """Whether it is a checkpoint with a name of its own, beside the steps."""
        return self.branch >= NAMED_BRANCH

    @property
    def place(self) -> dict[str, Any]:
        """Which frame it is, as documents say it."""
        return {"step": self.step, "branch": self.branch, "path": self.path}
