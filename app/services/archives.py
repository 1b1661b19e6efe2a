"""Archives: which there are of a run, and how their frames hang together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st
from inshrink_app.pages.search.config import config_words
from inshrink_app.server.recent import load_recent
from inshrink_app.server.roots import settings
from inshrink_app.services.failures import reported
from inshrink_app.services.inside import require_inside
from inshrink_app.services.opening import load_subject, resolve, samples
from inshrink_app.widgets.tables import ServiceError, Subject

if TYPE_CHECKING:
    from inshrink_core import Archive
    from inshrink_core.chain import FrameSize
    from inshrink_core.frame import FrameInfo

__all__ = ["Chain", "ChainFrame", "archives_of", "chain_of", "original_of"]

_SUFFIX = ".inshrink"
_MAX_CANDIDATES = 64
"""Archives that are opened while looking for those of a run: each costs the reading of a manifest."""

_MAX_SCANNED = 5_000
_SETTING_NAMES = ("coarseness", "bins", "bits", "prune", "exact")
"""Settings of codecs that tell archives of one run apart; the page lists all of them elsewhere."""


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
    codec, optimizer
        How weights and optimizer state are stored.
    config, overrides
        What the newest frame was written with: settings, and those of some tensors instead.
    originals
        What vouched for the original files, in one line.
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
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Mapping[str, Any], ...] = ()
    originals: str = ""
    base: str = ""

    @property
    def name(self) -> str:
        """What to call it. Untrusted text."""
        return self.path.name

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps on the newest line of training."""
        return tuple(sorted({frame.step for frame in self.frames if frame.on_line}))

    @property
    def n_branches(self) -> int:
        """How many lines of training there are."""
        return len({frame.branch for frame in self.frames})

    @property
    def n_keyframes(self) -> int:
        """How many frames stand alone."""
        return sum(frame.kind == "keyframe" for frame in self.frames)

    @property
    def state(self) -> list[str]:
        """What changes with every commit: an answer is about one state of an archive."""
        return [str(self.path), str(len(self.frames)), self.frames[-1].digest if self.frames else ""]

    @property
    def told_apart_by(self) -> str:
        """The settings, in a few words, that tell archives of one run apart."""
        shown = {name: self.config[name] for name in _SETTING_NAMES if self.config.get(name, False)}
        return config_words({"settings": shown, "override": self.overrides})


def archives_of(subject: Subject) -> tuple[Chain, ...]:
    """Return the archives of what is on screen: itself, or those of a run that lie beside it or in a root.

    One that is damaged, or holds steps that the run never had, is none of this run's.
    """
    if subject.kind == "archive":
        found = _choice(subject.path)
        return (found,) if found is not None else ()
    steps = set(subject.steps)
    choices = (_choice(path) for path in _candidates(subject))
    return tuple(one for one in choices if one is not None and one.steps and set(one.steps) <= steps)


def _candidates(subject: Subject) -> list[Path]:
    """Return paths that may be archives of a run, those named after it first."""
    current = settings()
    found: dict[Path, None] = {}
    for folder in (subject.path.parent, *current.roots):
        for path in _archives_in(folder):
            real = Path(os.path.realpath(path))
            if current.allows(real):
                found.setdefault(real)
    own = subject.path.name
    ordered = sorted(
        found, key=lambda path: (path.name != own + _SUFFIX, not path.name.startswith(own), path.name)
    )
    return ordered[:_MAX_CANDIDATES]


def _archives_in(folder: Path) -> Iterator[Path]:
    """Yield what is named like an archive; a folder that cannot be read has none."""
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_SCANNED):
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    yield Path(entry.path)
    except OSError:
        return


def _choice(path: Path) -> Chain | None:
    """Open an archive for the list; None where it cannot be."""
    try:
        return chain_of(str(path))
    except ServiceError:
        return None


def original_of(subject: Subject) -> Subject | None:
    """Look for the run that an archive was made from: by its name, and among the recent ones.

    A run counts that has every step of the archive's line.
    """
    if subject.kind == "run":
        return subject
    stem = subject.path.name.removesuffix(_SUFFIX)
    folders = (subject.path.parent, *settings().roots)
    paths = [str(folder / stem) for folder in folders]
    paths += [row.path for row in load_recent() if row.kind == "run"]
    with contextlib.suppress(ServiceError):
        paths += [str(sample.path) for sample in samples()]
    for path in dict.fromkeys(paths):
        try:
            found = load_subject(path) if resolve(path).exists() else None
        except ServiceError:
            continue
        if found is not None and found.kind == "run" and set(subject.steps) <= set(found.steps):
            return found
    return None


def chain_of(text: str) -> Chain:
    """Return all frames of an archive; reads its manifest and the indexes of its frames.

    Raises
    ------
    ServiceError
        It is no archive, or cannot be read.
    """
    path = resolve(text)
    return _chain_at(str(path), _stamp(path))


def _stamp(path: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes with every commit: times and sizes of manifest and folders, or of the file."""
    stamps = []
    for file in (path / "inshrink-manifest", path / "frames", path):
        try:
            status = file.stat()
        except OSError:
            continue
        stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


@st.cache_resource(show_spinner=False, max_entries=128)
def _chain_at(path: str, stamp: tuple[tuple[int, int], ...]) -> Chain:
    """Read the chain; one that cannot be read is not cached."""
    from inshrink_core.chain import Archive

    require_inside(Path(path))
    with reported():
        return _read_chain(Archive.open(path))


def _read_chain(archive: Archive) -> Chain:
    """Copy an archive's frames into plain values; a damaged frame is listed as such."""
    infos = archive.reader.frames
    line = {frame.frame_id for frame in archive.frames}
    steps = {frame.frame_id: frame.step for frame in infos}
    frames: list[ChainFrame] = []
    sizes: list[FrameSize] = []
    newest: Mapping[str, Any] = {}
    for info in infos:
        size, meta, damage = _frame(archive, info)
        if size is not None and info.frame_id in line:
            sizes.append(size)
        restored = meta.get("restored")
        frames.append(
            ChainFrame(
                step=info.step,
                kind=info.kind.value,
                branch=info.branch,
                parent_id=(info.parent_id or b"").hex(),
                frame_id=info.frame_id.hex(),
                parent_step=steps.get(info.parent_id or b""),
                restored_step=steps.get(restored) if isinstance(restored, bytes) else None,
                on_line=info.frame_id in line,
                nbytes=info.nbytes,
                ratio_weights=size.ratio_weights if size else None,
                ratio_total=size.ratio_total if size else None,
                codec=str(meta.get("codec", "")),
                digest=info.digest.hex(),
                damage=damage,
            )
        )
        newest = meta or newest
    return _summary(archive, tuple(frames), sizes, newest)


def _summary(
    archive: Archive, frames: tuple[ChainFrame, ...], sizes: list[FrameSize], meta: Mapping[str, Any]
) -> Chain:
    """Put the frames together with what concerns them all."""
    from inshrink_core.chain import ArchiveSize, optimizer_of

    total = ArchiveSize(frames=tuple(sizes), manifest_nbytes=archive.reader.manifest_nbytes)
    path = Path(os.path.realpath(archive.path))
    config, overrides = meta.get("config"), meta.get("overrides")
    return Chain(
        path=path,
        is_packed=path.is_file(),
        frames=frames,
        missing=tuple(frame.step for frame in archive.reader.missing),
        nbytes=archive.reader.nbytes,
        raw_bytes=total.raw_total,
        ratio_weights=total.ratio_weights,
        ratio_total=total.ratio_total,
        codec=str(meta.get("codec", "")),
        originals=_originals(archive),
        base="" if total.base is None else total.base.name,
        optimizer=optimizer_of(meta) if "optimizer" in meta else "",
        config=config if isinstance(config, dict) else {},
        overrides=tuple(overrides) if isinstance(overrides, list) else (),
    )


def _originals(archive: Archive) -> str:
    """Say what vouched for the original files; nothing where a frame cannot be read."""
    from inshrink_core.chain import original_checks
    from inshrink_core.errors import InshrinkError

    try:
        return original_checks(archive).text
    except InshrinkError:
        return ""


def _frame(archive: Archive, info: FrameInfo) -> tuple[FrameSize | None, Mapping[str, Any], str]:
    """Read the index of a frame: its sizes, what it says of itself, and what is wrong with it."""
    from inshrink_core.chain import frame_size
    from inshrink_core.errors import InshrinkError

    try:
        return frame_size(archive, info), archive.frame(info).meta, ""
    except InshrinkError as error:
        return None, {}, error.what
