"""Check an archive: every structure and checksum of every file, and their agreement."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from inshrink_core.archive.catalog import DELETE_REMEDY, Catalog, missing_parts, parts_in_words
from inshrink_core.archive.layout import FRAME_FOLDER, REBUILD_REMEDY, RESTORE_REMEDY, file_number
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.archive.packed import PackedStorage
from inshrink_core.archive.reader import ArchiveReader, open_storage
from inshrink_core.archive.segment import frame_digest
from inshrink_core.archive.storage.blocks import CACHE
from inshrink_core.archive.storage.contract import Storage
from inshrink_core.archive.storage.local import LOCK_NAME
from inshrink_core.archive.writer import contradictory
from inshrink_core.errors import DamagedError, InshrinkError
from inshrink_core.frame import FrameInfo

_APPEND: Final = "the next append repairs it"
_PENDING: Final = "run the missing parts, or discard the others: `inshrink commit ARCHIVE --discard`"


class Problem(NamedTuple):
    """One problem: the file or block, the fault, and the remedy.

    `leftover` is True for the remains of an interrupted writer, which do not affect committed frames.
    """

    where: str
    what: str
    remedy: str
    leftover: bool = False

    def to_json(self) -> dict[str, str]:
        """Return the problem as the report of ``inshrink verify`` shows it.

        Returns
        -------
        where : str
            File, frame, block or tensor.
        what : str
            The fault.
        remedy : str
            Suggested action; may be empty.
        """
        return {"where": self.where, "what": self.what, "remedy": self.remedy}


def check_archive(
    path: str | os.PathLike[str],
    among: Callable[[Sequence[FrameInfo]], Sequence[FrameInfo]] = lambda frames: frames,
) -> tuple[Problem, ...]:
    """Read every byte of an archive and return its problems; an empty tuple if it is sound.

    An archive without frames is sound. Memory use is bounded by the largest block.

    Parameters
    ----------
    path
        The archive.
    among
        Selects the frames to read, if other processes read the rest; by default all.

    Raises
    ------
    NotFoundError
        The archive does not exist.
    IncompatibleError
        A newer version wrote the archive.
    StorageError
        The storage refused.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from inshrink_core.archive import ArchiveWriter, check_archive
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "run.inshrink"
    ...     ArchiveWriter(path, create=True).close()
    ...     check_archive(path)
    ()
    """
    CACHE.clear()
    try:
        storage = open_storage(path)
        reader = ArchiveReader(storage)
    except DamagedError as error:
        return (_from_error(error),)
    problems = [*_check_catalog(reader.catalog, storage.name)]
    for frame in among(sorted(reader.catalog.by_id.values(), key=lambda frame: frame.generation)):
        problems += _check_frame(reader, storage, frame)
    if isinstance(storage, PackedStorage):
        problems += [
            Problem(storage.name, f"the padding before {path} is not zero", RESTORE_REMEDY)
            for path in storage.stray_padding()
        ]
    else:
        problems += _check_segments(reader.catalog, storage)
        problems += _check_strays(storage)
    return tuple(dict.fromkeys(problems))


def _from_error(error: InshrinkError) -> Problem:
    what = f"{error.what} (expected {error.expected}, found {error.found})" if error.found else error.what
    return Problem(error.where, what, error.remedy or RESTORE_REMEDY)


def _check_catalog(catalog: Catalog, name: str) -> Iterator[Problem]:
    def at(path: str, what: str, remedy: str = _APPEND, leftover: bool = True) -> Problem:
        return Problem(f"{name}, {path}", what, remedy, leftover)

    if catalog.manifest_problem is not None:
        yield at("manifest", catalog.manifest_problem.what, REBUILD_REMEDY, False)
    for frame in catalog.missing:
        for file in catalog.lost_files(frame):
            which = f"{parts_in_words([file.number], frame.n_parts)} of " if frame.n_parts > 1 else ""
            what = f"{which}the frame of step {frame.step} is missing"
            yield at(file.path, what, "fetch the file from where the archive came from", False)
    for frame in catalog.pending:
        yield at(frame.path, f"the frame of step {frame.step} waits for {missing_parts(frame)}", _PENDING)
    for frame in catalog.unlisted if catalog.manifest_problem is None else ():
        yield at(frame.path, "the manifest does not list this frame")
    for path in catalog.obsolete:
        yield at(path, "this file was removed or replaced, and is still there")
    for frame in catalog.moved:
        yield at(frame.path, f"the frame of step {frame.step} is here, not where the manifest lists it")
    yield from map(_from_error, catalog.faults)
    for frame in catalog.superseded:
        what = f"a later frame has taken the place of this one (step {frame.step})"
        yield at(frame.path, what, DELETE_REMEDY, False)


def _check_frame(reader: ArchiveReader, storage: Storage, frame: FrameInfo) -> Iterator[Problem]:
    def at(path: str) -> str:
        return f"{storage.name}, frame {path} (step {frame.step})"

    try:
        for part in frame.files:
            if part.digest and frame_digest(storage, part) != part.digest:
                what = "the SHA-256 of the frame is not the one in the manifest"
                yield Problem(at(part.path), what, RESTORE_REMEDY)
        opened = reader.frame(frame.frame_id)
        _ = opened.meta
        yield from map(_from_error, contradictory(reader, [frame]).values())
        for entry in opened.entries:
            try:
                opened.read(entry)
            except InshrinkError as error:
                yield _from_error(error)
    except InshrinkError as error:
        yield _from_error(error)
    except OSError as error:
        yield Problem(at(frame.path), f"it cannot be read: {error.strerror}", RESTORE_REMEDY)


def _check_segments(catalog: Catalog, storage: Storage) -> Iterator[Problem]:
    """Report bytes of segments that belong to no listed frame."""
    sizes: Counter[str] = Counter()
    for frame in (*catalog.frames, *catalog.superseded):
        if frame.offset is not None:
            sizes[frame.path] += frame.nbytes
    for path, nbytes in sizes.items():
        with contextlib.suppress(OSError):  # reported with the frames
            if storage.size(path) > nbytes:
                what = "the segment has bytes that belong to no frame"
                yield Problem(
                    f"{storage.name}, {path}", what, "`inshrink prune` of one of its frames drops them"
                )


def _check_strays(storage: Storage) -> Iterator[Problem]:
    """Report unknown files, and unfinished files unless a writer is active."""
    known = {MANIFEST_NAME, LOCK_NAME, FRAME_FOLDER}
    names = [name for name in storage.list("") if name not in known]
    names += [f"{FRAME_FOLDER}/{name}" for name in storage.list(FRAME_FOLDER) if not file_number(name)]
    for name in names:
        yield Problem(f"{storage.name}, {name}", "this file is no part of an archive", DELETE_REMEDY)
    left = [*storage.remains(""), *(f"{FRAME_FOLDER}/{name}" for name in storage.remains(FRAME_FOLDER))]
    if left and not storage.is_locked():
        for name in left:
            yield Problem(f"{storage.name}, {name}", "a writer was cut off and left this file", _APPEND, True)
