"""Find the frames of an archive: reconcile the manifest with the folder's listing.

The manifest records the committed frames; the listing shows the files that exist. A frame file that the
manifest does not list is live if it is whole, belongs to this archive and was not removed: its writer
crashed after the rename and before the update of the manifest. If two frames claim the same place, the one
of the higher generation wins.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from inshrink_core.archive import layout
from inshrink_core.archive.frame_reader import FrameFile, read_envelope
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import PackedStorage
from inshrink_core.archive.segment import is_intact
from inshrink_core.archive.storage.contract import OverlaidStorage, Storage, storage_errors
from inshrink_core.errors import ConflictError, DamagedError, InshrinkError, NotFoundError, StorageError
from inshrink_core.execution.files import NotRegularError
from inshrink_core.frame import FrameInfo, FramePart

DELETE_REMEDY: Final = "delete it if it is not yours"

_N_ATTEMPTS: Final = 5
"""Reloads if a writer removes frames between the read of the manifest and the listing of the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The content of an archive.

    Parameters
    ----------
    manifest
        As read, or as rebuilt from the frames if it is lost; unlisted frames not included.
    manifest_nbytes
        Size of the file in bytes.
    manifest_problem
        Why the manifest is unusable; None if it is sound.
    frames
        Live frames by ascending generation.
    by_id
        Every whole frame by id, superseded frames included.
    unlisted
        Whole frames that the manifest does not list; their digest is unknown and empty.
    pending
        Unlisted frames of which some parts are missing.
    superseded
        Frames whose place a frame of a higher generation has taken.
    missing
        Listed frames of which the file, or a part's file, is missing.
    present
        Paths of the existing files.
    moved
        Frames stored at another place than the manifest records.
    obsolete
        Paths of files that contain only removed frames and copies of other frames.
    faults
        Why files are no frames of this archive, or not whole ones.
    unknown
        Paths of unreadable files whose content no manifest records.
    is_complete
        Whether the set of committed frames is known: from the manifest, or from the directory of a packed
        archive whose frames are all readable. Otherwise frames, even the last one, may
        be missing without a trace.
    last_number
        Highest generation in the names of files that the manifest does not list.
    """

    manifest: Manifest
    manifest_nbytes: int
    manifest_problem: DamagedError | None = None
    frames: tuple[FrameInfo, ...] = ()
    by_id: dict[bytes, FrameInfo] = field(default_factory=dict)
    unlisted: tuple[FrameInfo, ...] = ()
    pending: tuple[FrameInfo, ...] = ()
    superseded: tuple[FrameInfo, ...] = ()
    missing: tuple[FrameInfo, ...] = ()
    present: frozenset[str] = frozenset()
    moved: tuple[FrameInfo, ...] = ()
    obsolete: tuple[str, ...] = ()
    faults: tuple[InshrinkError, ...] = ()
    unknown: tuple[str, ...] = ()
    is_complete: bool = True
    last_number: int = 0

    def with_frame(self, info: FrameInfo) -> Catalog:
        """Return the catalog after the commit of a frame that supersedes no other."""
        return replace(self, frames=(*self.frames, info), by_id=self.by_id | {info.frame_id: info})

    def lost_files(self, frame: FrameInfo) -> tuple[FramePart, ...]:
        """Return the missing files of a frame."""
        return tuple(file for file in frame.files if file.path not in self.present)

    def require_complete(self, where: str) -> None:
        """Raise DamagedError unless the set of committed frames is known."""
        if self.is_complete or self.manifest_problem is None:
            return
        raise DamagedError(
            f"{self.manifest_problem.what}, and only it records which frame is the last one: "
            "others may be gone without a trace",
            where=where,
            remedy=f"{layout.REBUILD_REMEDY}; a step whose branch is named too (--branch) is read all the "
            "same",
        ) from self.manifest_problem

    def require_complete_frames(self, where: str) -> None:
        """Raise ConflictError if frames wait for parts."""
        if not self.pending:
            return
        first = self.pending[0]
        raise ConflictError(
            f"the frame of step {first.step} waits for {missing_parts(first)}",
            where=where,
            remedy="run the parts that are missing (`inshrink compress … --part I/N`), or give up those that "
            f"are there: inshrink commit {where} --discard",
        )

    @property
    def next_generation(self) -> int:
        """A generation above those of the manifest, of every frame and of every file name."""
        return max(self.manifest.next_generation, self.last_number + 1)


def parts_in_words(numbers: Sequence[int], n_parts: int) -> str:
    """Name parts, counted from 1.

    Examples
    --------
    >>> parts_in_words([1], 3), parts_in_words([0, 2], 3)
    ('part 2/3', 'parts 1/3, 3/3')
    """
    names = ", ".join(f"{number + 1}/{n_parts}" for number in numbers)
    return f"parts {names}" if len(numbers) > 1 else f"part {names}"


def missing_parts(frame: FrameInfo) -> str:
    """Name the missing parts of a frame."""
    there = {file.number for file in frame.files}
    return parts_in_words([n for n in range(frame.n_parts) if n not in there], frame.n_parts)


class _Scan:
    """The frames in a file that the manifest does not list, a frame file or a segment.

    Attributes
    ----------
    frames
        Each frame, with an empty digest, and the id of its archive.
    problems
        Why parts of the file are unreadable.
    tail_lost
        Whether the bytes after the last readable frame are unreadable.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.frames: list[tuple[FrameInfo, bytes]] = []
        self.problems: list[InshrinkError] = []
        self.tail_lost = False
        try:
            if _frame_generation(path):
                self._read(FrameFile(storage, path))
            else:
                self._read_segment(storage, path)
        except (DamagedError, StorageError) as error:
            self.problems, self.tail_lost = [error], True

    def _read(self, file: FrameFile) -> int:
        """Read a frame and return its size in bytes."""
        header, trailer, *_ = read_envelope(file)
        info = header.listed(trailer.file_nbytes)
        if file.offset is None:
            expected, found = header.path, file.path
        else:
            first = self.frames[-1][0].generation + 1 if self.frames else 1
            last = layout.file_number(file.path)
            fits = first <= info.generation <= last and info.n_parts == 1
            expected = f"a frame of generation {first} to {last}"
            found = expected if fits else f"generation {info.generation}, part 1/{info.n_parts}"
            info = info.at(file.path, file.offset)
        if expected != found:
            what = "the frame's place contradicts its header"
            raise DamagedError(what, where=file.where, expected=expected, found=found)
        self.frames.append((info, header.archive_id))
        return info.nbytes

    def _read_segment(self, storage: Storage, path: str) -> None:
        """Find the frames of a segment; after damage, continue at the next frame magic."""
        where = f"{storage.name}, {path}"
        with storage_errors("the segment cannot be read", where):
            nbytes = storage.size(path)
            content = storage.read(path, 0, min(nbytes, layout.MAX_SEGMENT_NBYTES))
        if not 0 < nbytes <= layout.MAX_SEGMENT_NBYTES:
            most = f"at most {layout.MAX_SEGMENT_NBYTES} bytes"
            raise layout.damaged("no segment has this size", where, expected=most, found=f"{nbytes}")
        overlaid = OverlaidStorage(storage, {path: content})
        ends = layout.trailed_spans(layout.FRAME, content)
        begin = known_to = 0
        while 0 <= begin < len(content):
            file = FrameFile(overlaid, path, begin, ends.get(begin, begin) - begin)
            try:
                if not 0 < file.nbytes <= layout.SMALL_FRAME_NBYTES:
                    raise layout.damaged("no frame of a segment is here", file.where)
                begin = known_to = begin + self._read(file)
            except DamagedError as error:
                if begin == known_to:
                    self.problems.append(error)
                begin = content.find(layout.FRAME_MAGIC, begin + 1)
        self.tail_lost = known_to < len(content)


def is_archive_storage(storage: Storage) -> bool:
    """Return whether a folder is an archive: it has a manifest, or a frame in its folder of frames."""
    return MANIFEST_NAME in storage.list("") or _has_frames(storage, storage.list(layout.FRAME_FOLDER))


def _has_frames(storage: Storage, names: Iterable[str]) -> bool:
    """Return whether any file with a frame's name begins with the frame magic."""
    for name in filter(layout.file_number, names):
        with contextlib.suppress(NotRegularError):
            if storage.read(f"{layout.FRAME_FOLDER}/{name}", 0, 8) == layout.FRAME_MAGIC:
                return True
    return False


def load_catalog(storage: Storage) -> Catalog:
    """Read the manifest and list the folder; open only frame files that the manifest does not list.

    Raises
    ------
    NotFoundError
        The folder is not an archive.
    IncompatibleError
        The manifest or a frame has a newer version.
    DamagedError
        The archive has neither a manifest nor a whole frame.
    StorageError
        The storage refused.
    """
    with storage_errors("the archive cannot be read", storage.name):
        catalog = _load(storage)
        for _ in range(_N_ATTEMPTS):
            if not catalog.missing:
                break
            before, catalog = catalog, _load(storage)
            if catalog.manifest == before.manifest:
                break
    return catalog


def _load(storage: Storage) -> Catalog:
    manifest, problem, nbytes = None, None, 0
    loaded, names = storage.together(
        [partial(storage.load, MANIFEST_NAME), partial(storage.list, layout.FRAME_FOLDER)]
    )
    if isinstance(names, Exception):
        raise names
    try:
        if isinstance(loaded, Exception):
            raise loaded
        content, _ = loaded
        nbytes = len(content)
        manifest = Manifest.parse(content, f"{storage.name}, manifest")
    except FileNotFoundError:
        if not _has_frames(storage, names):
            raise NotFoundError("this is not an Inshrink archive", where=storage.name) from None
        problem = DamagedError("the manifest is missing", where=storage.name)
    except NotRegularError:
        problem = DamagedError("the manifest is not a regular file", where=storage.name)
    except DamagedError as error:
        problem = error
    return _reconcile(storage, names, manifest, problem, nbytes)


def _reconcile(
    storage: Storage,
    names: Iterable[str],
    manifest: Manifest | None,
    problem: DamagedError | None,
    nbytes: int,
) -> Catalog:
    listed = manifest.frames if manifest else ()
    named = {path for frame in listed for path in frame.paths}
    removed = set(manifest.tombstones) if manifest else set()
    files_present = {f"{layout.FRAME_FOLDER}/{name}" for name in names}
    others = {path: number for path in files_present - named if (number := layout.file_number(path))}
    present = (files_present & named).union(others)
    obsolete = {path for path in others if _frame_generation(path) in removed}
    ignored: set[str] = set()
    if manifest is not None and not storage.exclusive:
        # Only listed frames are committed: other files are in progress, or were given up.
        obsolete |= {path for path, number in others.items() if number < manifest.next_generation}
        ignored = others.keys() - obsolete
    scans = {path: _Scan(storage, path) for path in others.keys() - obsolete - ignored}
    scanned = [found for path in sorted(scans) for found in scans[path].frames]
    if manifest is None:
        if not scanned:
            raise DamagedError(
                f"no frame can be read and the manifest cannot be used: {problem}",
                where=storage.name,
                remedy="restore the archive from a backup",
            ) from problem
        ids = Counter(archive_id for _, archive_id in scanned)
        manifest = Manifest(archive_id=ids.most_common(1)[0][0])
    places = {frame.generation: frame for frame in listed}
    unlisted: dict[int, FrameInfo] = {}
    parts: dict[int, list[FrameInfo]] = {}
    faults: list[InshrinkError] = []
    for path, scan in sorted(scans.items()):
        faults += scan.problems
        n_used = len(scan.problems)
        for info, archive_id in scan.frames:
            known = unlisted.get(info.generation) or places.get(info.generation)
            if archive_id != manifest.archive_id:
                what, remedy = "this frame belongs to another archive", DELETE_REMEDY
                faults.append(DamagedError(what, where=f"{storage.name}, {path}", remedy=remedy))
            elif info.generation in removed:
                continue
            elif info.n_parts > 1 and known is None:
                parts.setdefault(info.generation, []).append(info)
            elif known is None:
                unlisted[info.generation] = info
            elif (known.frame_id, known.nbytes) != (info.frame_id, info.nbytes):
                what = f"another frame has generation {info.generation} too"
                faults.append(DamagedError(what, where=f"{storage.name}, frame {path}"))
            elif info.generation in unlisted or is_intact(storage, known):
                continue
            else:
                places[info.generation] = known.at(path, info.offset)
            n_used += 1
        if not n_used:
            obsolete.add(path)
    pending = _join_parts(parts, unlisted, storage.name, faults)
    unknown = tuple(path for path, scan in scans.items() if scan.tail_lost and problem)
    complete = [frame for frame in places.values() if present.issuperset(frame.paths)]
    live, superseded = _settle_claims([*complete, *unlisted.values()])
    return Catalog(
        manifest=manifest,
        manifest_nbytes=nbytes,
        manifest_problem=problem,
        frames=live,
        by_id={frame.frame_id: frame for frame in (*superseded, *live)},
        unlisted=tuple(unlisted.values()),
        pending=tuple(sorted(pending, key=lambda frame: frame.generation)),
        superseded=superseded,
        missing=tuple(frame for frame in places.values() if not present.issuperset(frame.paths)),
        present=frozenset(present),
        moved=tuple(now for frame in listed if (now := places[frame.generation]).path != frame.path),
        obsolete=tuple(sorted(obsolete)),
        faults=tuple(faults),
        unknown=unknown,
        is_complete=problem is None or (isinstance(storage, PackedStorage) and not unknown),
        last_number=max(others.values(), default=0),
    )


def _join_parts(
    parts: Mapping[int, list[FrameInfo]],
    unlisted: dict[int, FrameInfo],
    where: str,
    faults: list[InshrinkError],
) -> list[FrameInfo]:
    """Add frames with all their parts to `unlisted`, and contradictions to `faults`; return the others."""
    pending: list[FrameInfo] = []
    for generation, rows in parts.items():
        groups: dict[FrameInfo, list[FrameInfo]] = {}
        for row in rows:
            groups.setdefault(replace(row, files=()), []).append(row)
        found = list(map(layout.joined, groups.values()))
        alone = len(found) == 1 and generation not in unlisted
        if alone and len(found[0].files) == found[0].n_parts:
            unlisted[generation] = found[0]
        else:
            pending += found
        if not alone:
            what = f"another part of generation {generation} is of another frame"
            remedy = "keep the parts of one job, and delete those of the other"
            faults += [DamagedError(what, where=f"{where}, frame {row.path}", remedy=remedy) for row in rows]
    return pending


def _frame_generation(path: str) -> int:
    """Return the generation of a frame file; 0 for a segment."""
    return 0 if path.endswith(".segment") else layout.file_number(path)


def _settle_claims(frames: Iterable[FrameInfo]) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Split frames into live ones and those that a higher generation supersedes."""
    rows = sorted(frames, key=lambda frame: frame.generation)
    last = {(frame.parent_id, frame.step, frame.branch): frame.generation for frame in rows}
    live = set(last.values())
    superseded = tuple(frame for frame in rows if frame.generation not in live)
    return tuple(frame for frame in rows if frame.generation in live), superseded
