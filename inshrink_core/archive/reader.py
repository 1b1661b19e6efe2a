"""Read an archive: its frames, their ancestry, and the blocks of each frame."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Final

from inshrink_core.archive.catalog import Catalog, is_archive_storage, load_catalog, parts_in_words
from inshrink_core.archive.document import decompress_document
from inshrink_core.archive.frame_reader import FrameFile, FrameReader, read_envelope
from inshrink_core.archive.index import INDEX_DICTIONARY, FrameIndex, parse_index
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.archive.packed import PackedStorage, is_packed
from inshrink_core.archive.storage.blocks import MAX_PREFETCH_NBYTES, Span, fetch
from inshrink_core.archive.storage.contract import Storage, storage_errors
from inshrink_core.archive.storage.registry import find_at, storage_at
from inshrink_core.errors import DamagedError, InshrinkError, MissingFrameError, NotFoundError
from inshrink_core.execution.files import NotRegularError
from inshrink_core.frame import FrameInfo, FrameKind, FramePart
from inshrink_core.text import is_url

_CACHED_BLOCKS: Final = 1 << 19
"""Limit on the blocks of all open frames: about 200 MB. A frame with more is kept alone."""

_FRAME_BLOCKS: Final = 256
"""Blocks that take the memory of what an open frame has read ahead."""

_FETCH: Final = "fetch the file from where the archive came from"


class ArchiveReader:
    """An open archive. It takes no lock and writes nothing; any number of readers may run beside a writer.

    Parameters
    ----------
    storage
        The archive's storage; `open` finds it for a path or URL.
    unlisted
        Function that returns readable frames which no manifest lists yet, given the catalog.

    Attributes
    ----------
    storage
        The storage.
    catalog
        The full content of the archive, sound or not.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from inshrink_core.archive import ArchiveReader, ArchiveWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "run.inshrink"
    >>> with ArchiveWriter(path, create=True) as writer:
    ...     with writer.begin(step=100, kind="keyframe", parent_id=None) as frame:
    ...         frame.add("conv1.weight", "raw/1", b"sixteen numbers")
    ...         info = frame.commit({"format": "torch"})
    >>> reader = ArchiveReader.open(path)
    >>> frame = reader.frame(reader.head.frame_id)
    >>> frame.read(frame.entry("conv1.weight"))
    b'sixteen numbers'
    >>> folder.cleanup()
    """

    def __init__(
        self, storage: Storage, unlisted: Callable[[Catalog], Iterable[FrameInfo]] = lambda catalog: ()
    ) -> None:
        self.storage, self._unlisted = storage, unlisted
        self._opened: OrderedDict[tuple[bytes, int], FrameReader] = OrderedDict()
        self._opening = threading.RLock()
        self.refresh()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ArchiveReader:
        """Open an archive, a folder or packed, local or at a URL; only the manifest is read.

        Raises
        ------
        NotFoundError
            The path does not exist or is not an archive.
        IncompatibleError
            A newer version wrote the archive.
        DamagedError
            Neither the manifest nor any frame is readable, or the directory of a packed archive is damaged.
        MissingExtraError
            The client of the URL's store is not installed.
        StorageError
            The storage refused.
        """
        far = storage_at(path)
        if far.n_at_once > 1:
            with contextlib.suppress(NotFoundError):  # it may be packed
                return cls(far)
        try:
            return cls(open_storage(path))
        except NotFoundError as error:
            if error.remedy or not far.absent:
                raise
            raise NotFoundError(error.what, where=error.where, remedy=far.absent) from error

    @property
    def path(self) -> str:
        """The path or URL of the archive."""
        return self.storage.name

    @property
    def archive_id(self) -> bytes:
        """The 16-byte id of the archive, unchanged in copies."""
        return self.catalog.manifest.archive_id

    @property
    def frames(self) -> tuple[FrameInfo, ...]:
        """Live frames in commit order."""
        return self.catalog.frames

    @property
    def missing(self) -> tuple[FrameInfo, ...]:
        """Committed frames with missing files."""
        return self.catalog.missing

    @property
    def listed(self) -> tuple[FrameInfo, ...]:
        """Every committed frame that was not removed, including frames with missing files."""
        return (*self.catalog.frames, *self.catalog.missing)

    @property
    def listed_head(self) -> FrameInfo | None:
        """The last frame of the newest branch, even if its file is missing; None without frames.

        Raises
        ------
        DamagedError
            The manifest is unusable, so the last frame may be missing unnoticed.
        """
        self.catalog.require_complete(self.path)
        frames = (frame for frame in self.listed if not frame.is_named)
        return max(frames, key=lambda frame: (frame.branch, frame.generation), default=None)

    @property
    def head(self) -> FrameInfo | None:
        """The last frame of the newest branch; None in an archive without frames.

        Raises
        ------
        MissingFrameError
            The frame's file is missing. No other frame may silently replace it: training would resume from an
            outdated state.
        DamagedError
            As `listed_head`.
        """
        head = self.listed_head
        if head is not None and any(lost.frame_id == head.frame_id for lost in self.missing):
            raise self._lost(
                head,
                f"it is the last one; {_FETCH}, or name the step that is wanted instead, "
                "or give the missing frames up with `inshrink prune --forget-missing`",
            )
        return head

    @property
    def next_branch(self) -> int:
        """The branch that a continuation from an earlier frame opens."""
        return 1 + max((frame.branch for frame in self.listed if not frame.is_named), default=-1)

    @property
    def named(self) -> tuple[FrameInfo, ...]:
        """The last frame of each branch that has a name."""
        ordered = sorted(self.frames, key=lambda frame: frame.generation)
        return tuple({frame.branch: frame for frame in ordered if frame.is_named}.values())

    def require_complete(self, remedy: str = _FETCH) -> None:
        """Raise an error if a frame is missing, or may be missing."""
        self.catalog.require_complete(self.path)
        for lost in self.missing:
            raise self._lost(lost, remedy)

    def _lost(self, frame: FrameInfo, remedy: str = _FETCH) -> MissingFrameError:
        lost = self.catalog.lost_files(frame)
        numbers = [file.number for file in lost]
        which = "" if frame.n_parts == 1 else f"{parts_in_words(numbers, frame.n_parts)} of "
        verb = "are" if which and len(lost) > 1 else "is"
        return MissingFrameError(
            f"{which}the frame of step {frame.step} {verb} missing (id {frame.frame_id.hex()})",
            where=f"{self.path}, {lost[0].path if lost else frame.path}",
            remedy=remedy,
        )

    @property
    def manifest_nbytes(self) -> int:
        """Size of the manifest, plus the overhead of a packed archive, in bytes."""
        packed = self.storage.overhead_nbytes if isinstance(self.storage, PackedStorage) else 0
        return self.catalog.manifest_nbytes + packed

    @property
    def nbytes(self) -> int:
        """Size of the manifest and of all live frames."""
        return self.manifest_nbytes + sum(frame.nbytes for frame in self.frames)

    def refresh(self) -> None:
        """Reload the archive."""
        self.catalog: Catalog = load_catalog(self.storage)
        for info in tuple(self._unlisted(self.catalog)):
            self.see(info)

    def see(self, info: FrameInfo) -> None:
        """Add a readable frame that no manifest lists yet."""
        self.catalog = self.catalog.with_frame(info)

    def info(self, frame_id: bytes) -> FrameInfo:
        """Return a frame by id.

        Raises
        ------
        MissingFrameError
            The frame was committed, but its file is missing.
        NotFoundError
            No frame has that id.
        """
        known = self.catalog.by_id.get(frame_id)
        if known is not None:
            return known
        for lost in self.missing:
            if lost.frame_id == frame_id:
                raise self._lost(lost)
        raise NotFoundError(f"there is no frame {frame_id.hex()}", where=self.path)

    def history(self, frame_id: bytes | None = None) -> tuple[FrameInfo, ...]:
        """Return the ancestry of a frame (by default the head), from the first frame to itself.

        Frames with missing files, even the head, are left out; the walk continues past them if the manifest
        records their parent. `listed_history` includes them.
        """
        frames = self.catalog.by_id
        start = None if frame_id is None else self.info(frame_id)
        return tuple(frame for frame in self.listed_history(start) if frame.frame_id in frames)

    def listed_history(self, frame: FrameInfo | None = None) -> tuple[FrameInfo, ...]:
        """Return the ancestry of a frame (by default the head), including frames with missing files."""
        frames, lost = self.catalog.by_id, {frame.frame_id: frame for frame in self.missing}
        frame = self.listed_head if frame is None else frame
        line: dict[bytes, FrameInfo] = {}
        while frame is not None and frame.frame_id not in line:
            line[frame.frame_id] = frame
            parent_id = frame.parent_id or b""
            frame = frames.get(parent_id) or lost.get(parent_id)
        return tuple(reversed(line.values()))

    def chain(self, frame_id: bytes) -> tuple[FrameInfo, ...]:
        """Return the frames to decode for one frame: from its nearest keyframe to itself.

        Raises
        ------
        MissingFrameError
            One of the frames is missing; the message names it.
        NotFoundError
            No frame has that id.
        """
        frame = self.info(frame_id)
        line = {frame_id: frame}
        while frame.kind is FrameKind.DELTA:
            parent_id = frame.parent_id or b""
            if parent_id in line:
                raise DamagedError(f"the frame of step {frame.step} is its own ancestor", where=self.path)
            try:
                frame = line[parent_id] = self.info(parent_id)
            except NotFoundError as error:
                raise MissingFrameError(
                    f"the frame {parent_id.hex()} is missing, which the frame of step {frame.step} "
                    "needs as its reference",
                    where=f"{self.path}, {frame.path}",
                    remedy="fetch its file from where the archive came from",
                ) from error
        return tuple(reversed(line.values()))

    def find(self, step: int, branch: int | None = None) -> FrameInfo:
        """Return the frame of a step: from the head's history, else from the newest branch that has the step.

        Parameters
        ----------
        step
            Training step.
        branch
            Search only the history of this branch's last frame.

        Raises
        ------
        NotFoundError
            No frame has that step; the message names the nearest steps.
        MissingFrameError
            The frame was committed, but its file is missing.
        DamagedError
            `branch` is None, and the manifest, which determines the newest branch, is unusable.
        """
        if branch is None:
            self.catalog.require_complete(self.path)
            lines = (frame for frame in self.listed if not frame.is_named)
            newest_last = sorted(lines, key=lambda frame: (frame.branch, frame.generation))
            candidates = (*newest_last, *self.listed_history())
        else:
            tips = (frame for frame in self.listed if frame.branch == branch)
            tip = max(tips, key=lambda frame: frame.generation, default=None)
            candidates = self.listed_history(tip) if tip else ()
        for frame in reversed(candidates):
            if frame.step == step:
                if frame in self.missing:
                    others = sorted({f.branch for f in self.frames if f.step == step})
                    also = f"; branch {others[-1]} has another step {step}" if others else ""
                    raise self._lost(frame, _FETCH + also)
                return frame
        raise self._no_step(step, branch, sorted({frame.step for frame in candidates}))

    def _no_step(self, step: int, branch: int | None, steps: list[int]) -> InshrinkError:
        on_branch = "" if branch is None else f" on branch {branch}"
        below = [known for known in steps if known < step][-1:]
        nearest = below + [known for known in steps if known > step][:1]
        verb = "steps are" if len(nearest) > 1 else "step is"
        return NotFoundError(
            f"there is no frame of step {step}{on_branch}",
            where=self.path,
            remedy=f"the nearest {verb} {' and '.join(map(str, nearest))}" if nearest else "",
        )

    @property
    def is_far(self) -> bool:
        """Whether the storage is remote, so that prefetching pays."""
        return self.storage.n_at_once > 1

    def fetch(self, frames: Iterable[FrameInfo], *, blocks: bool = False) -> None:
        """Prefetch the data that opening frames reads, from remote storage in one round trip.

        Parameters
        ----------
        frames
            The frames; what is in the block cache is not fetched again.
        blocks
            Also fetch the blocks, if they take at most 64 MB in total.
        """
        if not self.is_far:
            return
        files = [FrameFile.of(self.storage, part) for frame in frames for part in frame.files]
        if blocks and sum(file.nbytes for file in files) <= MAX_PREFETCH_NBYTES:
            fetch(self.storage, [file.span(0, file.nbytes) for file in files])
        # An index longer than the end of its frame is read on its own.
        fetch(self.storage, [span for file in files for span in file.ends])

    def fetch_blocks(self, spans: Iterable[Span]) -> None:
        """Prefetch blocks from remote storage in one round trip; does nothing for local storage."""
        if self.is_far:
            wanted = list(spans)
            if sum(span.nbytes for span in wanted) <= MAX_PREFETCH_NBYTES:
                fetch(self.storage, wanted)

    def frame(self, frame_id: bytes) -> FrameReader:
        """Open a frame: read its header and index, and those of the frames it inherits from; cached.

        O(chain) reads.

        Raises
        ------
        MissingFrameError
            The frame, or a frame its index refers to, is missing.
        DamagedError, IncompatibleError
            Its header or index is invalid.
        NotFoundError
            No frame has that id.
        """
        with self._opening:
            info, pending = self.info(frame_id), list[FrameInfo]()
            if self._known(info) is None:
                chain = reversed(self.chain(frame_id))
                pending += takewhile(lambda frame: self._known(frame) is None, chain)
                self.fetch(pending)
            for frame in reversed(pending):
                before = self.inherited(frame.kind, frame.parent_id, frame.n_parts)
                indices = {
                    part.number: self._read_index(frame, part, before.get(part.number))
                    for part in frame.files
                }
                self._opened[frame.frame_id, frame.generation] = FrameReader(self.storage, frame, indices)
                while self._n_blocks() > _CACHED_BLOCKS and len(self._opened) > 1:
                    self._opened.popitem(last=False)
            return self._opened[info.frame_id, info.generation]

    def _n_blocks(self) -> int:
        return sum(_FRAME_BLOCKS + len(opened.entries) for opened in self._opened.values())

    def _known(self, frame: FrameInfo) -> FrameReader | None:
        """Return a frame that is open already; its file may be another by now."""
        key = frame.frame_id, frame.generation
        opened = self._opened.get(key)
        if opened is not None:
            if opened.info.paths != frame.paths:
                opened = self._opened[key] = FrameReader(self.storage, frame, opened.indices)
            self._opened.move_to_end(key)
        return opened

    def inherited(self, kind: FrameKind, parent_id: bytes | None, n_parts: int) -> Mapping[int, FrameIndex]:
        """Return the indexes that a delta's parts inherit: its parent's, if that has as many parts."""
        if kind is FrameKind.KEYFRAME or parent_id is None or self.info(parent_id).n_parts != n_parts:
            return {}
        return self.frame(parent_id).indices

    def _read_index(self, frame: FrameInfo, part: FramePart, parent: FrameIndex | None) -> FrameIndex:
        file = FrameFile.of(self.storage, part)
        header, trailer, document, small = read_envelope(file)
        found = header.listed(trailer.file_nbytes)
        listed = replace(frame, files=(replace(part, digest=b""),))
        if header.archive_id != self.archive_id or found != listed:
            raise DamagedError(
                "the frame's file is not the one the manifest lists",
                where=f"{file.where} (step {frame.step})",
                expected=f"id {frame.frame_id.hex()} of {part.nbytes} bytes",
                found=f"id {found.frame_id.hex()} of {found.nbytes} bytes",
                remedy="restore the frame from a backup",
            )
        raw = decompress_document(document, trailer.raw_nbytes, file.where, INDEX_DICTIONARY)
        number = part.number if frame.n_parts > 1 else None
        return parse_index(raw, parent, trailer.offset, small, file.where, number)


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an archive, a folder or packed. Does not raise for any content of the path."""
    try:
        if is_url(path):
            with contextlib.suppress(FileNotFoundError, NotRegularError):
                return storage_at(path).size(MANIFEST_NAME) > 0
        found = find_at(path)
        if isinstance(found, Storage):
            return is_archive_storage(found)
        return found is not None and is_packed(found)
    except (OSError, InshrinkError):
        return is_url(path)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of a path or URL.

    Raises
    ------
    NotFoundError
        The path does not exist, or is a file that is not a packed archive.
    DamagedError, IncompatibleError
        The packed archive cannot be read.
    MissingExtraError
        The client of the URL's store is not installed.
    StorageError
        The storage refused.
    """
    where = os.fspath(path)
    with storage_errors("the archive cannot be read", where):
        found = find_at(path)
        if found is None:
            raise NotFoundError("there is no such archive", where=where)
        if isinstance(found, Storage):
            return found
        if not (is_url(path) or is_packed(found)):
            raise NotFoundError("this file is not an archive", where=where)
        return PackedStorage(found)
