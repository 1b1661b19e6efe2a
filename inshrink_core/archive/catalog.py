"""Which frames an archive has: the manifest and the folder's listing, reconciled.

The manifest says what was committed, the files say what is there. A frame file that the manifest
does not list is live if it is whole, belongs to this archive and was not removed: it was renamed into
place just before a crash. Where two frames claim the same place, the higher generation wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from inshrink_core.archive.frame_reader import read_envelope
from inshrink_core.archive.layout import FRAME_FOLDER, FRAME_MAGIC, parse_frame_name
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.storage import Storage, storage_error
from inshrink_core.errors import DamagedError, InshrinkError, NotFoundError, StorageError
from inshrink_core.frame import FrameInfo

__all__ = ["Catalog", "is_archive_storage", "load_catalog", "scan_frame"]

_N_ATTEMPTS: Final = 5
"""Reloads while a writer removes frames between our reading of the manifest and of the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What is in an archive.

    Parameters
    ----------
    manifest
        As read, or as rebuilt from the frames where it is lost; unlisted frames not included.
    manifest_nbytes
        Size of the file.
    manifest_problem
        Why it could not be used; None if it was.
    frames
        Live frames by ascending generation.
    by_id
        Every whole frame by id, superseded ones included.
    unlisted
        Whole frames that the manifest does not list; their digest is not known and empty.
    superseded
        Frames whose place a higher generation has taken.
    missing
        Frames the manifest lists whose file is not there.
    buried
        Paths of removed frames whose file is still there.
    foreign, unreadable
        Paths of frames of another archive, and of files that are not whole frames, with the reason.
    """

    manifest: Manifest
    manifest_nbytes: int
    manifest_problem: DamagedError | None = None
    frames: tuple[FrameInfo, ...] = ()
    by_id: dict[bytes, FrameInfo] = field(default_factory=dict)
    unlisted: tuple[FrameInfo, ...] = ()
    superseded: tuple[FrameInfo, ...] = ()
    missing: tuple[FrameInfo, ...] = ()
    buried: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, InshrinkError], ...] = ()

    @property
    def unknown(self) -> dict[str, int]:
        """Frame files that cannot be read where no manifest says what they were, with their generations."""
        if self.manifest_problem is None:
            return {}
        names = {path: parse_frame_name(path.rpartition("/")[2]) for path, _ in self.unreadable}
        return {path: parsed[0] for path, parsed in names.items() if parsed}

    @property
    def next_generation(self) -> int:
        """Above every generation in the manifest, in a frame and in a frame file's name."""
        paths = (*self.buried, *self.foreign, *(path for path, _ in self.unreadable))
        named = [parsed[0] for path in paths if (parsed := parse_frame_name(path.rpartition("/")[2]))]
        used = [frame.generation for frame in (*self.frames, *self.superseded, *self.missing)]
        return max(self.manifest.next_generation, max((*named, *used), default=0) + 1)


def scan_frame(storage: Storage, path: str) -> tuple[FrameInfo, bytes]:
    """Return what a frame file says of itself, digest left empty, and the archive it belongs to.

    Raises
    ------
    DamagedError, IncompatibleError
        It is not a whole frame of a version known here, or bears another frame's name.
    """
    envelope = read_envelope(storage, path)
    header, trailer = envelope.header, envelope.trailer
    if parse_frame_name(path.rpartition("/")[2]) != (header.generation, header.step):
        raise DamagedError(
            "the frame's name contradicts its header",
            where=f"{storage.name}, frame {path}",
            expected=f"generation {header.generation}, step {header.step}",
            found=path,
        )
    return header.info(trailer.file_nbytes), header.archive_id


def is_archive_storage(storage: Storage) -> bool:
    """Tell whether a folder is an archive: it has a manifest, or a frame where frames lie."""
    if MANIFEST_NAME in storage.list(""):
        return True
    paths = (f"{FRAME_FOLDER}/{name}" for name in storage.list(FRAME_FOLDER) if parse_frame_name(name))
    return any(storage.read(path, 0, len(FRAME_MAGIC)) == FRAME_MAGIC for path in paths)


def load_catalog(storage: Storage) -> Catalog:
    """Read the manifest and list the folder; frame files are opened only if the manifest lacks them.

    Raises
    ------
    NotFoundError
        Not an archive.
    IncompatibleError
        Manifest or a frame of a newer version.
    DamagedError
        No manifest and no whole frame.
    StorageError
        The system refused.
    """
    try:
        if not is_archive_storage(storage):
            raise NotFoundError("this is not an Inshrink archive", where=storage.name)
        catalog = _load(storage)
        for _ in range(_N_ATTEMPTS):
            if not catalog.missing:
                break
            again = _load(storage)
            if again.manifest == catalog.manifest:
                break
            catalog = again
    except OSError as error:
        raise storage_error(error, "the archive cannot be read", storage.name) from error
    return catalog


def _load(storage: Storage) -> Catalog:
    manifest, problem, nbytes = None, None, 0
    try:
        content = storage.read(MANIFEST_NAME, 0, storage.size(MANIFEST_NAME))
        nbytes = len(content)
        manifest = Manifest.parse(content, f"{storage.name}, manifest")
    except FileNotFoundError:
        problem = DamagedError("the manifest is missing", where=storage.name)
    except DamagedError as error:
        problem = error
    return _reconcile(storage, manifest, problem, nbytes)


def _reconcile(
    storage: Storage, manifest: Manifest | None, problem: DamagedError | None, nbytes: int
) -> Catalog:
    names = [(name, parsed) for name in storage.list(FRAME_FOLDER) if (parsed := parse_frame_name(name))]
    paths = {f"{FRAME_FOLDER}/{name}": generation for name, (generation, _) in names}
    listed = {frame.path: frame for frame in manifest.frames} if manifest else {}
    removed = set(manifest.tombstones) if manifest else set()
    scanned: list[tuple[FrameInfo, bytes]] = []
    unreadable: list[tuple[str, InshrinkError]] = []
    for path, generation in paths.items():
        if path in listed or generation in removed:
            continue
        try:
            scanned.append(scan_frame(storage, path))
        except (DamagedError, StorageError) as error:
            unreadable.append((path, error))
    if manifest is None:
        manifest = Manifest(archive_id=_commonest_archive(storage, scanned, problem))
    own: list[FrameInfo] = []
    used = {frame.generation for frame in manifest.frames}
    for info, archive_id in scanned:
        if archive_id != manifest.archive_id:
            continue
        if info.generation in used:
            what = f"another frame has generation {info.generation} too"
            unreadable.append((info.path, DamagedError(what, where=f"{storage.name}, frame {info.path}")))
            continue
        used.add(info.generation)
        own.append(info)
    present = [frame for path, frame in listed.items() if path in paths]
    live, superseded = _settle_claims([*present, *own])
    return Catalog(
        manifest=manifest,
        manifest_nbytes=nbytes,
        manifest_problem=problem,
        frames=live,
        by_id={frame.frame_id: frame for frame in (*superseded, *live)},
        unlisted=tuple(own),
        superseded=superseded,
        missing=tuple(frame for path, frame in listed.items() if path not in paths),
        buried=tuple(path for path, generation in paths.items() if generation in removed),
        foreign=tuple(info.path for info, archive_id in scanned if archive_id != manifest.archive_id),
        unreadable=tuple(unreadable),
    )


def _commonest_archive(
    storage: Storage, scanned: list[tuple[FrameInfo, bytes]], problem: DamagedError | None
) -> bytes:
    """Without a manifest, the archive is the one most frames say they belong to."""
    if not scanned:
        raise DamagedError(
            f"no frame can be read and the manifest cannot be used: {problem}",
            where=storage.name,
            remedy="restore the archive from a backup",
        ) from problem
    return Counter(archive_id for _, archive_id in scanned).most_common(1)[0][0]


def _settle_claims(frames: Iterable[FrameInfo]) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Split into frames that hold their place and frames that a higher generation supersedes."""
    holders: dict[tuple[bytes | None, int, int], FrameInfo] = {}
    superseded = []
    for frame in sorted(frames, key=lambda frame: frame.generation):
        claim = (frame.parent_id, frame.step, frame.branch)
        if claim in holders:
            superseded.append(holders[claim])
        holders[claim] = frame
    return tuple(sorted(holders.values(), key=lambda frame: frame.generation)), tuple(superseded)
