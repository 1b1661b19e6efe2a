"""What services hand to pages about archives: plain values, no objects of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "ArchiveChoice",
    "Chain",
    "ChainFrame",
    "Finding",
    "Restored",
    "RestoredFile",
    "TensorErrorRow",
    "Verdict",
]


class ArchiveChoice(NamedTuple):
    """An archive that a page may be about.

    `settings` says in a few words what its weights were written with.
    """

    path: Path
    name: str
    steps: tuple[int, ...]
    nbytes: int
    ratio_total: float | None
    codec: str
    settings: str


class ChainFrame(NamedTuple):
    """One frame of an archive, with its place in the chain.

    `parent_step` and `restored_step` are None where there is none; `on_line` says whether the head's history
    holds it; `damage` is empty where its index could be read.
    """

    step: int
    kind: str
    branch: int
    parent_id: str
    frame_id: str
    parent_step: int | None
    restored_step: int | None
    on_line: bool
    nbytes: int
    ratio_total: float | None
    ratio_weights: float | None
    codec: str
    digest: str
    damage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """All frames of an archive.

    Parameters
    ----------
    path
        Where it lies.
    is_packed
        Whether it is one file, which is read and copied but not changed.
    frames
        In commit order, older branches included.
    missing
        Steps whose frames were committed and whose files are gone.
    nbytes, raw_bytes
        Bytes of the archive, and of the tensors on the head's line.
    ratio_total, ratio_weights
        Over the head's line.
    optimizer
        How optimizer state is stored.
    originals
        What vouched for the original files, in one line.
    settings
        What the newest frame was written with, ``name=value`` each.
    """

    path: Path
    is_packed: bool
    frames: tuple[ChainFrame, ...]
    missing: tuple[int, ...]
    nbytes: int
    raw_bytes: int
    ratio_total: float | None
    ratio_weights: float | None
    codec: str
    optimizer: str
    settings: tuple[str, ...]
    originals: str = ""

    @property
    def n_branches(self) -> int:
        """How many lines of training there are."""
        return len({frame.branch for frame in self.frames})

    @property
    def n_keyframes(self) -> int:
        """How many frames stand alone."""
        return sum(frame.kind == "keyframe" for frame in self.frames)


class Finding(NamedTuple):
    """Something that a verification found."""

    where: str
    what: str
    remedy: str


class TensorErrorRow(NamedTuple):
    """The error of one tensor of one step; `relative_rms` is None where the original is all zero."""

    step: int
    tensor: str
    codec: str
    max_abs: float
    relative_rms: float | None
    bit_exact: bool


class Verdict(NamedTuple):
    """What a verification said."""

    ok: bool
    deep: bool
    n_frames: int
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    missing_steps: tuple[int, ...]
    errors: tuple[TensorErrorRow, ...]


class RestoredFile(NamedTuple):
    """A file that was written, and its SHA-256 as hexadecimal digits."""

    name: str
    nbytes: int
    sha256: str


class Restored(NamedTuple):
    """What restoring a step has written."""

    step: int
    target: str
    layout: str
    files: tuple[RestoredFile, ...]
