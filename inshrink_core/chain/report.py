"""An archive as a chain: every frame with its place, its size and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.config import optimizer_of
from inshrink_core.chain.meta import original_checks
from inshrink_core.chain.sizes import ArchiveSize, FrameSize, frame_size
from inshrink_core.errors import InshrinkError

__all__ = ["ChainFrame", "ChainReport", "chain_report"]


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


@dataclass(frozen=True, kw_only=True)
class ChainReport:
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
    codec, optimizer
        How weights and optimizer state are stored.
    bits_per_weight
        Bits of the archive that hold one weight of one step, over the head's line.
    config, overrides
        What the newest frame was written with: settings, and those of some tensors instead.
    is_uniform
        Whether all frames of the head's line were written with these.
    originals
        What vouched for the original files, in one line; empty where a frame cannot be read.
    base
        Name of the base model without which the ratios do not hold; empty without one. Untrusted text.
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
    bits_per_weight: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Mapping[str, Any], ...] = ()
    is_uniform: bool = False
    originals: str = ""
    base: str = ""

    @property
    def name(self) -> str:
        """What to call it. Untrusted text."""
        return self.path.name

    @cached_property
    def line(self) -> tuple[ChainFrame, ...]:
        """Frames of the newest line of training."""
        return tuple(frame for frame in self.frames if frame.on_line)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps of the newest line of training, ascending."""
        return tuple(sorted({frame.step for frame in self.line}))

    @property
    def state(self) -> tuple[str, ...]:
        """What changes with every commit: what was found is about one state of an archive."""
        return str(self.path), str(len(self.frames)), self.frames[-1].digest if self.frames else ""

    @property
    def n_branches(self) -> int:
        """How many lines of training there are."""
        return len({frame.branch for frame in self.frames})

    @property
    def n_keyframes(self) -> int:
        """How many frames stand alone."""
        return sum(frame.kind == "keyframe" for frame in self.frames)


def chain_report(archive: Archive) -> ChainReport:
    """Tell how the frames of an archive hang together; reads the index of each.

    A frame that cannot be read is listed as damaged.
    """
    infos = archive.reader.frames
    line = {frame.frame_id for frame in archive.frames}
    steps = {frame.frame_id: frame.step for frame in infos}
    frames: list[ChainFrame] = []
    sizes: list[FrameSize] = []
    newest: Mapping[str, Any] = {}
    used: list[list[Any]] = []
    for info in infos:
        size: FrameSize | None = None
        meta: Mapping[str, Any] = {}
        damage = ""
        try:
            size, meta = frame_size(archive, info), archive.frame(info).meta
        except InshrinkError as error:
            damage = error.what
        if size is not None and info.frame_id in line:
            sizes.append(size)
            used.append([meta.get(name) for name in ("codec", "config", "overrides")])
        newest = meta or newest
        frames.append(
            ChainFrame(
                step=info.step,
                kind=info.kind.value,
                branch=info.branch,
                parent_id=(info.parent_id or b"").hex(),
                frame_id=info.frame_id.hex(),
                parent_step=steps.get(info.parent_id or b""),
                restored_step=steps.get(meta.get("restored", b"")),
                on_line=info.frame_id in line,
                nbytes=info.nbytes,
                ratio_total=size.ratio_total if size else None,
                ratio_weights=size.ratio_weights if size else None,
                codec=meta.get("codec", ""),
                digest=info.digest.hex(),
                damage=damage,
            )
        )
    total = ArchiveSize(frames=tuple(sizes), manifest_nbytes=archive.reader.manifest_nbytes)
    return ChainReport(
        path=archive.path,
        is_packed=archive.path.is_file(),
        frames=tuple(frames),
        missing=tuple(frame.step for frame in archive.reader.missing),
        nbytes=archive.reader.nbytes,
        raw_bytes=total.raw_total,
        ratio_total=total.ratio_total,
        ratio_weights=total.ratio_weights,
        codec=newest.get("codec", ""),
        optimizer=optimizer_of(newest) if "optimizer" in newest else "",
        bits_per_weight=total.bits_per_weight,
        config=newest.get("config", {}),
        overrides=tuple(newest.get("overrides", ())),
        is_uniform=len(sizes) == len(line) and all(one == used[0] for one in used),
        originals="" if any(frame.damage for frame in frames) else original_checks(archive).text,
        base="" if total.base is None else total.base.name,
    )
