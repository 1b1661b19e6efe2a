"""Write an archive: a single writer makes frames, or groups of them, durable before it lists them."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from inshrink_core.archive import layout, segment
from inshrink_core.archive.catalog import Catalog, is_archive_storage, load_catalog, parts_in_words
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import is_packed
from inshrink_core.archive.reader import ArchiveReader
from inshrink_core.archive.storage.contract import Creation, OverlaidStorage, Storage, Tag, storage_errors
from inshrink_core.archive.storage.local import LOCK_NAME
from inshrink_core.archive.storage.registry import find_at, storage_at
from inshrink_core.errors import (
    ConflictError,
    DamagedError,
    ExistsError,
    InputError,
    InshrinkError,
    MissingFrameError,
    NotFoundError,
    StepConflictError,
)
from inshrink_core.execution.files import Closing, NotRegularError
from inshrink_core.frame import FrameInfo, FrameKind

_GROUP_S: Final = 10.0
"""Time limit of a group: a crash loses at most one group, and only the current frame if steps are slow."""


class ArchiveWriter(Closing):
    """The single writer of an archive; a context manager that holds its lock.

    Opening repairs the traces of a crash: it deletes temporary files, lists whole frames that the manifest
    lacks, and finishes interrupted removals.

    Parameters
    ----------
    path
        The archive's folder, or a writable URL.
    create
        Create the archive and its parent folders if it does not exist.
    archive_id
        16 bytes for a new archive; random by default.
    grouped
        Commit small frames in groups, each as one file. This is faster, but a crash loses unflushed frames.
        A group ends after 64 frames, at 4 MiB, with the first frame later than ten seconds after the last
        group, and when the writer is closed.
    rebuild
        Rebuild an unusable manifest from the existing frames, and assume that no frame is missing.
    pending
        Handling of frames that wait for parts: ``refuse`` to open the archive, ``keep`` the frames, in which
        case no frame may be begun, or ``discard`` them.

    Raises
    ------
    NotFoundError
        The archive does not exist, and `create` is False.
    DamagedError
        The manifest is unusable, and `rebuild` is False.
    ExistsError
        The path exists and is not an archive.
    LockedError
        Another process is writing the archive.
    ConflictError
        A frame waits for parts, or parts contradict each other.
    InputError
        The archive is packed, or the URL is read-only.
    StorageError
        The storage is read-only, full, or refused otherwise.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from inshrink_core.archive import ArchiveWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "run.inshrink"
    ...     with ArchiveWriter(path, create=True) as writer:
    ...         with writer.begin(step=0, kind="keyframe", parent_id=None) as frame:
    ...             frame.add("bias", "raw/1", bytes(8), attributes=("weight", "float32", [2], False))
    ...             info = frame.commit({"format": "torch"})
    ...         writer.reader.head == info
    True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        archive_id: bytes | None = None,
        grouped: bool = False,
        rebuild: bool = False,
        pending: str = "refuse",
    ) -> None:
        self._frame: FrameWriter | None = None
        self._grouped = grouped
        self._group: list[FrameInfo] = []
        self._flushed_at = time.monotonic()
        self._contents: dict[str, bytes] = {}
        self.discarded: tuple[FrameInfo, ...] = ()
        where = os.fspath(path)
        with storage_errors("the archive cannot be opened for writing", where):
            found, new = _writable(path, create=create)
            self.storage = found.written()
            with self.storage.made() if new else contextlib.nullcontext():
                self._lock = self.storage.lock()
                try:
                    self._prepare(archive_id, rebuild, pending)
                except BaseException:
                    self._lock.release()
                    raise

    def _prepare(self, archive_id: bytes | None, rebuild: bool, pending: str) -> None:
        storage, where = self.storage, self.storage.name
        storage.recover(("", layout.FRAME_FOLDER))
        self._tag: Tag | None = _tag_of_manifest(storage)
        self._doubted = False
        if not is_archive_storage(storage):
            new_id = os.urandom(layout.ID_NBYTES) if archive_id is None else archive_id
            if len(new_id) != layout.ID_NBYTES or not any(new_id):
                raise InputError(f"an archive id is {layout.ID_NBYTES} bytes, not all zero")
            self.write_manifest(Manifest(archive_id=new_id))
        catalog = load_catalog(storage)
        if not rebuild:
            catalog.require_complete(where)
            catalog = self._settled(catalog, pending)
        if archive_id not in (None, catalog.manifest.archive_id):
            raise InputError("the archive has another id than the one asked for", where=where)
        self._manifest = self._repaired(catalog)
        # Without an exclusive lock, a deleted file may belong to an active writer. Advancing the generation
        # refuses that writer.
        fenced = bool(catalog.obsolete) and not storage.exclusive
        if fenced:
            self._manifest = replace(self._manifest, next_generation=self._manifest.next_generation + 1)
        if catalog.manifest_problem or catalog.unlisted or catalog.moved or fenced:
            self.write_manifest(self._manifest)
        for path in catalog.obsolete:
            storage.delete(path)
        files = [file for frame in self._manifest.frames for file in frame.files if file.offset is None]
        storage.trust({file.path: file.digest for file in files})
        readable = OverlaidStorage(storage, self._contents) if self._grouped else storage
        self.reader: ArchiveReader = ArchiveReader(readable, lambda catalog: self._group)

    def _repaired(self, catalog: Catalog) -> Manifest:
        """Return the manifest with the unlisted whole frames added, digests computed from their files."""
        manifest = catalog.manifest.with_places(catalog.moved)
        for frame in catalog.unlisted:
            manifest = manifest.with_frame(segment.with_digests(self.storage, frame))
        return replace(manifest, next_generation=catalog.next_generation)

    def _settled(self, catalog: Catalog, pending: str) -> Catalog:
        """Refuse or discard frames with contradictory or missing parts, as `pending` demands."""
        torn = contradictory(ArchiveReader(self.storage), catalog.unlisted)
        if pending == "discard":
            first = min(
                (frame.generation for frame in (*torn, *catalog.pending)), default=layout.MAX_GENERATION
            )
            given_up = [frame for frame in (*catalog.unlisted, *catalog.pending) if frame.generation >= first]
            for frame in sorted(given_up, key=lambda frame: -frame.generation):
                segment.discard(self.storage, frame.paths)
            self.discarded = tuple(sorted(given_up, key=lambda frame: frame.generation))
            return load_catalog(self.storage)
        for error in torn.values():
            raise error
        if pending == "refuse":
            catalog.require_complete_frames(self.storage.name)
        return catalog

    def begin(
        self,
        *,
        step: int,
        kind: FrameKind | str,
        parent_id: bytes | None,
        branch: int = 0,
        external: bool = False,
    ) -> FrameWriter:
        """Start a frame.

        Parameters
        ----------
        step
            Training step, from 0.
        kind
            ``keyframe`` or ``delta``.
        parent_id
            The frame that this one continues, the reference of a delta; None for a first frame.
        branch
            0 for the first line of training; a continuation from an earlier frame opens the next branch.
        external
            Whether decoding a keyframe needs data from outside the archive.

        Raises
        ------
        InputError
            An argument is out of range, or another frame is being written.
        NotFoundError, MissingFrameError
            The parent does not exist, or its file is missing.
        StepConflictError
            The step already continues that parent on that branch.
        """
        where = self.storage.name
        step, branch, kind = _checked_place(step, branch, kind, where)
        if self._frame is not None and self._frame.is_open:
            raise InputError("a frame is being written already: commit or abort it", where=where)
        if self._lock.released:
            raise InputError("the archive is closed", where=where)
        if kind is FrameKind.DELTA and parent_id is None:
            raise InputError("a delta frame needs a parent", where=where)
        if kind is FrameKind.DELTA and external:
            raise InputError("only a keyframe needs what is outside of the archive", where=where)
        generation = self.manifest.next_generation
        if generation > layout.MAX_GENERATION:
            raise InputError("the archive has used up its generations", where=where)
        if parent_id is not None:
            self.reader.info(parent_id)
        for frame in (*self._manifest.frames, *self._group):
            if (frame.parent_id, frame.step, frame.branch) == (parent_id, step, branch):
                what = f"step {step} continues the same frame on branch {branch} already"
                raise StepConflictError(what, where=where)
        archive_id = self._manifest.archive_id
        frame_id = layout.derive_frame_id(archive_id, parent_id, step, branch, generation)
        info = FrameInfo(frame_id, parent_id, step, kind, branch, generation, 1, ())
        header = layout.FrameHeader(archive_id, info, external=external)
        parents = self.reader.inherited(kind, parent_id, 1)
        create = partial(_GroupedFile, self.storage) if self._grouped else None
        self._frame = FrameWriter(self.storage, (header,), parents, self._publish, create=create)
        return self._frame

    def _publish(self, files: Sequence[Creation], info: FrameInfo) -> None:
        """Add the frame to the group, or commit and list it."""
        first = files[0]
        if isinstance(first, _GroupedFile) and first.content is not None:
            self._add_to_group(bytes(first.content), info)
            return
        self._flush_group()
        self._list(self._manifest.with_frame(info), info.paths, lambda: [file.commit() for file in files])

    def _list(self, manifest: Manifest, paths: Sequence[str], commit: Callable[[], object]) -> None:
        """Commit files, then list them; undo the commit if listing fails, so that an error means no frame."""
        try:
            commit()
            self.storage.sync(layout.FRAME_FOLDER)
            self.write_manifest(manifest)
        except BaseException as error:
            taken = isinstance(error, FileExistsError)
            if self._manifest is not manifest and not taken:
                segment.discard(self.storage, reversed(paths))
            # After an interruption, `close` tries to write the group again.
            if isinstance(error, Exception) or self._manifest is manifest:
                self._leave_group()
            with contextlib.suppress(OSError, InshrinkError):
                self.reader.refresh()
            if not taken:
                raise
            raise ConflictError(
                "another writer has written this frame",
                where=f"{self.storage.name}, {paths[0]}",
                remedy="what it wrote stays; open the archive again",
            ) from error
        self._leave_group()
        self.reader.refresh()
        self.gather()

    def _add_to_group(self, content: bytes, info: FrameInfo) -> None:
        """Buffer a frame in memory, visible to this writer's reader, until its group is written."""
        if sum(frame.nbytes for frame in self._group) + info.nbytes > layout.MAX_SEGMENT_NBYTES:
            self._flush_group()
        self._group.append(info)
        self._contents[info.path] = content
        self.reader.see(info)
        if len(self._group) >= segment.GROUP_FRAMES or time.monotonic() - self._flushed_at > _GROUP_S:
            self._flush_group()

    def flush(self, *, remote: bool = True) -> None:
        """Make the frames of a group durable, and list them.

        Parameters
        ----------
        remote
            Also wait until uploads to a bucket have finished.

        Raises
        ------
        StorageError
            The storage refused: none of the group is in the archive. Or the bucket refused: remaining files
            stay in the upload queue on this machine, and the next writer uploads them.
        ConflictError
            Another writer has changed the archive in the bucket.
        """
        self._flush_group()
        if remote:
            self.storage.flush()

    def _flush_group(self) -> None:
        if not self._group:
            return
        contents = [self._contents[frame.path] for frame in self._group]
        frames = segment.placed(self._group, self._group[-1].generation)
        manifest, path = self.manifest.with_places(frames), frames[0].path
        commit = partial(segment.write_file, self.storage, path, contents)
        with storage_errors("the frames cannot be committed", self.storage.name):
            self._list(manifest, [path], commit)

    def _leave_group(self) -> None:
        if self._group:
            self._group.clear()
            self._flushed_at = time.monotonic()
            self._contents.clear()

    def gather(self) -> None:
        """Merge many small files into few; if the storage refuses, they stay as they are."""
        before = self._manifest
        small = segment.small_files(before)
        if len(small) <= segment.MAX_SMALL_FILES:
            return
        with contextlib.suppress(OSError, InshrinkError):
            manifest = segment.gathered(self.storage, before, small)
            try:
                self.write_manifest(manifest)
            finally:
                self.delete_unlisted((*before.frames, *manifest.frames))
        self.reader.refresh()

    def delete_unlisted(self, frames: Iterable[FrameInfo]) -> None:
        """Delete the files of frames that the stored manifest does not list; it is read anew.

        The next writer deletes files that cannot be deleted now.
        """
        with contextlib.suppress(OSError, InshrinkError):
            self.reader.refresh()
            catalog = self.reader.catalog
            if catalog.manifest_problem is not None:
                return
            listed = {path for frame in catalog.manifest.frames for path in frame.paths}
            # Children first: after a crash, a remaining file still has its reference.
            newest_first = sorted(frames, key=lambda frame: -frame.generation)
            paths = dict.fromkeys(path for frame in newest_first for path in frame.paths)
            segment.discard(self.storage, [path for path in paths if path not in listed])
            self.reader.refresh()

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest: the one operation that makes frames live or removes them.

        Parameters
        ----------
        manifest
            The new manifest; the caller guarantees its consistency.

        Raises
        ------
        OSError, StorageError
            The storage refused; `manifest` is the old or the new one.
        """
        content = manifest.pack()
        try:
            if self._doubted:
                self._tag, self._doubted = _tag_of_manifest(self.storage), False
            self._tag = self.storage.replace(MANIFEST_NAME, content, self._tag)
        except ConflictError:
            raise
        except BaseException:
            if self._is_written(content):
                self._manifest = manifest
            raise
        self._manifest = manifest

    def _is_written(self, content: bytes) -> bool:
        """Return whether the storage has this manifest, which is unknown after an interruption."""
        try:
            found, tag = self.storage.load(MANIFEST_NAME)
        except FileNotFoundError:
            return False
        except (OSError, InshrinkError):
            self._doubted = True
            return True  # a superfluous file is harmless, a listed frame without its file is not
        if found == content:
            self._tag = tag
        return found == content

    @property
    def manifest(self) -> Manifest:
        """The stored manifest, with the frames of the current group added."""
        if not self._group:
            return self._manifest
        return replace(
            self._manifest,
            frames=(*self._manifest.frames, *self._group),
            next_generation=self._group[-1].generation + 1,
        )

    def close(self) -> None:
        """Abort an unfinished frame, flush, and release the lock; may be called repeatedly.

        Raises
        ------
        StorageError
            As `flush`; the lock is released.
        """
        try:
            if self._frame is not None:
                self._frame.abort()
            self.flush()
        finally:
            self._lock.release()


def contradictory(reader: ArchiveReader, frames: Iterable[FrameInfo]) -> dict[FrameInfo, InshrinkError]:
    """Return the frames whose parts cannot be read as one frame, with the reason."""
    found: dict[FrameInfo, InshrinkError] = {}
    for frame in frames:
        if frame.n_parts == 1:
            continue
        try:
            opened = reader.frame(frame.frame_id)
        except (DamagedError, MissingFrameError) as error:
            found[frame] = error
            continue
        for part in frame.files:
            apart = sorted(opened.contradictions(part.number))
            if apart:
                found[frame] = ConflictError(
                    f"{parts_in_words([part.number], frame.n_parts)} of the frame of step {frame.step} was "
                    f"written otherwise than the first: they disagree on {', '.join(apart)}",
                    where=f"{reader.path}, {part.path}",
                    remedy="give them up and write all parts with the same settings: "
                    f"inshrink commit {reader.path} --discard",
                )
                break
    return found


class _GroupedFile(Creation):
    """A frame file held in memory while it is small enough for a group."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        self._file: Creation | None = None
        self.content: bytearray | None = bytearray()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes; a file that grows too large for a group moves to the storage."""
        if self.content is not None and len(self.content) + len(content) > layout.SMALL_FRAME_NBYTES:
            self._file, before = self._storage.create(self._path), self.content
            self.content = None
            self._file.write(before)
        if self._file is not None:
            self._file.write(content)
        elif self.content is not None:
            self.content += content

    def commit(self) -> None:
        """Commit a file that is too large for a group."""
        if self._file is not None:
            self._file.commit()

    def abort(self) -> None:
        """Discard the file."""
        if self._file is not None:
            self._file.abort()


def _checked_place(step: Any, branch: Any, kind: Any, where: str) -> tuple[int, int, FrameKind]:
    """Check step, branch and kind; convert NumPy integers, which msgpack does not accept."""
    try:
        step, branch, kind = operator.index(step), operator.index(branch), FrameKind(kind)
    except (TypeError, ValueError) as error:
        raise InputError(f"a frame cannot be described so: {error}", where=where) from error
    if not (0 <= step <= layout.MAX_STEP and 0 <= branch <= layout.MAX_BRANCH):
        raise InputError(f"step {step} or branch {branch} is out of range", where=where)
    return step, branch, kind


def _writable(path: str | os.PathLike[str], *, create: bool) -> tuple[Storage, bool]:
    """Return the storage of an archive to write, and whether the archive must be created."""
    where, storage, found = os.fspath(path), storage_at(path), None
    if not storage.writable:
        storage.refuse()
    found = find_at(path)
    if found is not None and not isinstance(found, Storage):
        if is_packed(found):
            raise InputError(
                "a packed archive is read only",
                where=where,
                remedy="unpack it to a folder: inshrink export PACKED --unpack FOLDER",
            )
    elif found is not None and is_archive_storage(found):
        return found, False
    if not create:
        what = "there is no such archive" if found is None else "this is not an Inshrink archive"
        raise NotFoundError(what, where=where, remedy="`inshrink compress RUN -o ARCHIVE` makes one of a run")
    if isinstance(found, Storage):
        found = None if set(found.list("")) <= {LOCK_NAME, layout.FRAME_FOLDER} else found
    if found is not None:
        raise ExistsError(
            "it exists and is not an Inshrink archive", where=where, remedy="choose another name"
        )
    return storage, True


def _tag_of_manifest(storage: Storage) -> Tag | None:
    """Return the tag of the manifest; None if it does not exist."""
    try:
        return storage.load(MANIFEST_NAME)[1]
    except (FileNotFoundError, NotRegularError):
        return None
