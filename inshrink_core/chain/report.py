"""Reports on the frames of an archive: lineage, sizes, damage, and the checks of the original files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.config import optimizer_of
from inshrink_core.chain.meta import ORIGINALS
from inshrink_core.chain.sizes import ArchiveSize, FrameSize, frame_size
from inshrink_core.errors import InshrinkError, clipped
from inshrink_core.execution.results import key_digest
from inshrink_core.frame import FrameInfo
from inshrink_core.report import Report

_MAX_SHOWN: Final = 3


class ChainFrame(NamedTuple):
    """One frame of an archive and its position in the chain.

    `parent_step` and `restored_step` are None without a parent or a restore. `on_line` is whether the frame
    is in the head's history. `damage` is empty if the frame's index is readable.
    """

    step: int
    kind: str
    branch: int
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
        Path of the archive.
    is_packed
        Whether the archive is a single file, which is read-only.
    frames
        All frames in commit order, including older branches.
    missing
        Steps of committed frames whose files are missing.
    nbytes, raw_bytes
        Size of the archive, and of the tensors of the head's history.
    ratio_total, ratio_weights
        Compression ratios over the head's history.
    codec, optimizer
        How weights and optimizer state are stored.
    bits_per_weight
        Archive bits for one weight of one step, over the head's history.
    config, overrides
        Settings of the newest frame, and its overrides for some tensors.
    is_uniform
        Whether all frames of the head's history have these settings.
    originals
        How the original files were verified, in one line; empty if a frame is not readable.
    base
        Name of the base model that decoding needs and the ratios exclude; empty without one. Untrusted text.
    archive_id
        Identifier that does not change when frames are appended or removed; empty if unknown.
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
    archive_id: str = ""

    @property
    def name(self) -> str:
        """File name of the archive. Untrusted text."""
        return self.path.name

    @property
    def content(self) -> str:
        """Digest of the content, equal for an archive as a folder and packed (`content_digest`)."""
        return content_digest(self.archive_id, ((frame.frame_id, frame.digest) for frame in self.frames))

    @cached_property
    def line(self) -> tuple[ChainFrame, ...]:
        """Frames of the newest branch's history."""
        return tuple(frame for frame in self.frames if frame.on_line)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps of the newest branch's history, ascending."""
        return tuple(sorted({frame.step for frame in self.line}))

    @property
    def state(self) -> tuple[str, ...]:
        """Key that changes with every commit, for caches of results about one state of an archive."""
        return str(self.path), str(len(self.frames)), self.frames[-1].digest if self.frames else ""

    @property
    def n_branches(self) -> int:
        """Number of branches."""
        return len({frame.branch for frame in self.frames})

    @property
    def n_keyframes(self) -> int:
        """Number of keyframes."""
        return sum(frame.kind == "keyframe" for frame in self.frames)


def content_digest(archive_id: str, frames: Iterable[tuple[str, str]]) -> str:
    """Return a digest of an archive's content: its identifier, and the ids and digests of its live frames."""
    return key_digest({"archive": archive_id, "frames": [list(row) for row in frames]})


def chain_report(archive: Archive) -> ChainReport:
    """Return a report on all frames of an archive; reads the index of each.

    An unreadable frame is listed as damaged.
    """
    infos = archive.reader.frames
    archive.reader.fetch(infos)
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
    total = ArchiveSize.of(sizes, archive.reader.manifest_nbytes)
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
        is_uniform=len(sizes) == len(line) and all(settings == used[0] for settings in used),
        originals="" if any(frame.damage for frame in frames) else original_checks(archive).text,
        base="" if total.base is None else total.base.name,
        archive_id=archive.reader.archive_id.hex(),
    )


class DamagedOriginal(NamedTuple):
    """Bytes of a step that failed their checksum when they were archived with the user's consent.

    Parameters
    ----------
    step
        Training step.
    file
        File of the checkpoint.
    entry
        Zip entry; empty for the whole file.
    offset
        Offset of the bytes that the checksum covers.
    nbytes
        Number of these bytes.
    """

    step: int
    file: str
    entry: str
    offset: int
    nbytes: int

    def __str__(self) -> str:
        place = f" entry '{clipped(self.entry)}'" if self.entry else ""
        return f"step {self.step}: '{clipped(self.file)}'{place}, {self.nbytes} bytes at offset {self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalChecks(Report):
    """How the original files of some steps were verified.

    Parameters
    ----------
    checked
        Steps whose tensor files all had matching checksums.
    unchecked
        Steps with a file without checksums.
    unknown
        Steps without a record, which were not archived from files.
    kinds
        Kinds of the files without checksums: ``safetensors``, ``torch``.
    damaged
        Bytes that failed their checksum and were stored anyway (``--allow-damaged``).
    """

    checked: tuple[int, ...] = ()
    unchecked: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    damaged: tuple[DamagedOriginal, ...] = ()

    KEYS: ClassVar = "text checked unchecked unknown damaged"

    @property
    def text(self) -> str:
        """Summary in one line: ``checked``, ``unchecked (…)``, ``DAMAGED at step …``, ``not recorded``."""
        parts = []
        if self.damaged:
            shown = "; ".join(str(damage) for damage in self.damaged[:_MAX_SHOWN])
            more = len(self.damaged) - _MAX_SHOWN
            parts.append(f"DAMAGED at {shown}" + (f" and {more:,} more" if more > 0 else ""))
        if self.unchecked:
            why = {"safetensors": "safetensors has none", "torch": "torch.save was told to leave them out"}
            reasons = ", ".join(why.get(kind, clipped(kind)) for kind in self.kinds)
            of = "" if not (self.checked or self.unknown) else f" at {len(self.unchecked)} steps"
            parts.append(f"unchecked{of} ({reasons})")
        if self.unknown:
            of = "" if not (self.checked or self.unchecked) else f" at {len(self.unknown)} steps"
            parts.append(f"not recorded{of}")
        return "; ".join(parts) or "checked"


def original_checks(archive: Archive, frames: Iterable[FrameInfo] | None = None) -> OriginalChecks:
    """Return the records of the original files of some frames, by default of all frames.

    Notes
    -----
    Reads the index of every frame.
    """
    infos = archive.reader.frames if frames is None else frames
    records = [(info.step, archive.frame(info).meta.get(ORIGINALS)) for info in infos]
    known = [(step, record) for step, record in records if record is not None]
    without = [(step, kinds) for step, record in known if (kinds := record.get("unchecked"))]
    damaged = [DamagedOriginal(step, *row) for step, record in known for row in record.get("damaged", ())]
    return OriginalChecks(
        checked=tuple(s for s, record in known if not (record.get("unchecked") or record.get("damaged"))),
        unchecked=tuple(step for step, _ in without),
        unknown=tuple(step for step, record in records if record is None),
        kinds=tuple(sorted({kind for _, kinds in without for kind in kinds})),
        damaged=tuple(damaged),
    )
