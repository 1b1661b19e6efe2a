"""Writing an archive: one writer; frames, or groups of them, are durable before they are listed."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from inshrink_core.archive.catalog import Catalog, is_archive_storage, load_catalog, scan_frame
from inshrink_core.archive.durable import (
    WriterLock,
    remove_remains,
    remove_temporaries,
    require_own,
    require_place,
    write_durably,
)
from inshrink_core.archive.frame_reader import FrameFile
from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.layout import (
    FRAME_FOLDER,
    ID_NBYTES,
    MAX_BRANCH,
    MAX_GENERATION,
    MAX_SEGMENT_NBYTES,
    MAX_STEP,
    SMALL_FRAME_NBYTES,
    FrameHeader,
    derive_frame_id,
)
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.packed import is_packed
from inshrink_core.archive.reader import ArchiveReader, is_archive
from inshrink_core.archive.segment import MAX_SMALL_FILES, gathered, placed, small_files, write_together
from inshrink_core.archive.storage import (
    LocalStorage,
    OverlaidStorage,
    Storage,
    frame_digest,
    storage_errors,
    was_url,
)
from inshrink_core.errors import InputError, InshrinkError, StepConflictError
from inshrink_core.execution import make_folders, read_regular, remove_empty, sync_path
from inshrink_core.frame import FrameInfo, FrameKind

__all__ = ["ArchiveWriter"]

_GROUP_FRAMES: Final = 64
_GROUP_S: Final = 10.0
"""A crash takes less than such a group, and of slow steps no more than the one in work."""


class ArchiveWriter:
    """The one writer of an archive; a context manager that holds its lock.

    Opening repairs what a crash left: temporary files go, whole frames that the manifest lacks are
    listed, frames that were being removed are removed.

    Parameters
    ----------
    path
        The archive's folder.
    create
        Make the archive if there is none; its parents too.
    archive_id
        16 bytes for a new archive; random by default.
    grouped
        Commit small frames in groups, each as one file: faster, and of what was not flushed a crash leaves
        nothing. A group ends after 64 frames, at 4 MiB, with the first frame that comes ten seconds after the
        last group, and when the writer is closed.
    rebuild
        Rebuild a manifest that cannot be used from the frames that are there, and take them for all.

    Raises
    ------
    NotFoundError
        There is no archive, and `create` is False.
    DamagedError
        The manifest cannot be used, and `rebuild` is False.
    ExistsError
        Something else is there.
    LockedError
        Another process is writing it.
    StorageError
        Read-only, full, or refused otherwise.

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
    ) -> None:
        self._root = Path(path)
        self._frame: FrameWriter | None = None
        self._grouped = grouped
        self._group: list[FrameInfo] = []
        self._flushed_at = time.monotonic()
        self._held: dict[str, bytes] = {}
        with storage_errors("the archive cannot be opened for writing", self._root):
            if was_url(self._root) and not self._root.exists():
                raise InputError(
                    "archives are written on local or mounted file systems",
                    where=os.fspath(path),
                    remedy="write it here, then copy it: inshrink export ARCHIVE --pack FILE",
                )
            if is_packed(self._root):
                raise InputError(
                    "a packed archive is read only",
                    where=str(self._root),
                    remedy="make a folder of it: inshrink export PACKED --unpack FOLDER",
                )
            made: list[Path] = []
            if not is_archive(self._root):
                require_place(self._root, create)
                made = make_folders(self._root)
            try:
                self._lock = WriterLock(self._root)
                try:
                    self._prepare(archive_id, rebuild)
                except BaseException:
                    self._lock.release()
                    raise
            except BaseException:
                if self._root.absolute() in made:
                    remove_remains(self._root)
                    remove_empty(made)
                raise

    def _prepare(self, archive_id: bytes | None, rebuild: bool) -> None:
        require_own(self._root)
        for folder in (self._root, self._root / FRAME_FOLDER):
            remove_temporaries(folder)
        (self._root / FRAME_FOLDER).mkdir(exist_ok=True)
        if not is_archive_storage(LocalStorage(self._root)):
            new_id = os.urandom(ID_NBYTES) if archive_id is None else archive_id
            if len(new_id) != ID_NBYTES or not any(new_id):
                raise InputError(f"an archive id is {ID_NBYTES} bytes, not all zero")
            self._write_manifest(Manifest(archive_id=new_id))
        # A writer that died may have renamed manifest or frames and not synced that. Frames are listed and
        # deleted by what is read here: it must be what a power loss leaves.
        for folder in (self._root / FRAME_FOLDER, self._root):
            sync_path(folder)
        catalog = load_catalog(LocalStorage(self._root))
        if not rebuild:
            catalog.require_complete(str(self._root))
        if archive_id not in (None, catalog.manifest.archive_id):
            raise InputError("the archive has another id than the one asked for", where=str(self._root))
        self._manifest = self._repaired(catalog)
        if catalog.manifest_problem or catalog.unlisted or catalog.moved:
            self._write_manifest(self._manifest)
        for path in catalog.buried:
            (self._root / path).unlink(missing_ok=True)
        storage = OverlaidStorage(LocalStorage(self._root), self._held)
        self.reader: ArchiveReader = _GroupReader(storage, self._group)

    def _repaired(self, catalog: Catalog) -> Manifest:
        """List what is whole and not listed, with the digest of what is there."""
        manifest = catalog.manifest.with_places(catalog.moved)
        for frame in catalog.unlisted:
            manifest = manifest.with_frame(self._digested(frame))
        return replace(manifest, next_generation=catalog.next_generation)

    def _digested(self, frame: FrameInfo) -> FrameInfo:
        return replace(frame, digest=frame_digest(LocalStorage(self._root), frame))

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
            The frame it continues from, which a delta takes as its reference; None for a first frame.
        branch
            0 for the first line of training; a continuation from an earlier frame opens the next.
        external
            Whether decoding a keyframe needs what the archive does not hold.

        Raises
        ------
        InputError
            An argument out of range, or another frame is being written.
        NotFoundError, MissingFrameError
            There is no such parent.
        StepConflictError
            The step continues that parent on that branch already.
        """
        step, branch, kind = _checked_place(step, branch, kind, self._root)
        if self._frame is not None:
            raise InputError("a frame is being written already: commit or abort it", where=str(self._root))
        if self._lock.released:
            raise InputError("the archive is closed", where=str(self._root))
        if kind is FrameKind.DELTA and parent_id is None:
            raise InputError("a delta frame needs a parent", where=str(self._root))
        if kind is FrameKind.DELTA and external:
            raise InputError("only a keyframe needs what is outside of the archive", where=str(self._root))
        generation = self.manifest.next_generation
        if generation > MAX_GENERATION:
            raise InputError("the archive has used up its generations", where=str(self._root))
        if parent_id is not None:
            self.reader.info(parent_id)
        self._refuse_taken(parent_id, step, branch)
        parent = None
        if kind is FrameKind.DELTA and parent_id is not None:
            parent = self.reader.resolved_index(parent_id)
        archive_id = self._manifest.archive_id
        frame_id = derive_frame_id(archive_id, parent_id, step, branch, generation)
        header = FrameHeader(archive_id, frame_id, parent_id, step, kind, branch, generation, external)
        self._frame = FrameWriter(
            self._root, header, parent, self._publish, self._release_frame, synced=not self._grouped
        )
        return self._frame

    def _refuse_taken(self, parent_id: bytes | None, step: int, branch: int) -> None:
        for frame in (*self._manifest.frames, *self._group):
            if (frame.parent_id, frame.step, frame.branch) == (parent_id, step, branch):
                raise StepConflictError(
                    f"step {step} continues the same frame on branch {branch} already",
                    where=str(self._root),
                )

    def _release_frame(self) -> None:
        self._frame = None

    def _publish(self, temporary: Path, info: FrameInfo) -> None:
        """Rename, then list; undo the rename if listing fails, so that an error means no frame."""
        if self._grouped and info.nbytes <= SMALL_FRAME_NBYTES:
            self._add_to_group(temporary, info)
            return
        self.flush()
        if self._grouped:
            sync_path(temporary)
        manifest, path = self._manifest.with_frame(info), self._root / info.path
        try:
            temporary.replace(path)
            sync_path(path.parent)
            self._write_manifest(manifest)
        except BaseException:
            self._undo(manifest, path)
            raise
        self.reader.refresh()
        self.gather()

    def _undo(self, manifest: Manifest, path: Path) -> None:
        """After an error, delete the file that a manifest lists, unless the manifest is there."""
        with contextlib.suppress(OSError, InshrinkError):
            if self._manifest is not manifest:
                path.unlink(missing_ok=True)
                sync_path(path.parent)
            self.reader.refresh()

    def _add_to_group(self, temporary: Path, info: FrameInfo) -> None:
        """Hold a frame in memory, where this writer's reader finds it, until its group is written."""
        content = temporary.read_bytes()
        temporary.unlink()
        if sum(frame.nbytes for frame in self._group) + info.nbytes > MAX_SEGMENT_NBYTES:
            self.flush()
        self._group.append(info)
        self._held[info.path] = content
        self.reader.see(info)
        if len(self._group) >= _GROUP_FRAMES or time.monotonic() - self._flushed_at > _GROUP_S:
            self.flush()

    def flush(self) -> None:
        """Make the frames of a group durable, and list them.

        Raises
        ------
        StorageError
            The system refused; none of them is in the archive.
        """
        if not self._group:
            return
        group, number = tuple(self._group), self._group[-1].generation
        contents = [self._held[frame.path] for frame in group]
        moved = placed(group, number)
        manifest, path = self.manifest.with_places(moved), self._root / moved[0].path
        try:
            with storage_errors("the frames cannot be committed", self._root):
                write_together(self._root, group, contents, number)
                self._write_manifest(manifest)
        except BaseException as error:
            # After an interruption, closing tries again.
            if isinstance(error, Exception) or self._manifest is manifest:
                self._leave_group()
            self._undo(manifest, path)
            raise
        self._leave_group()
        self.reader.refresh()
        self.gather()

    def _leave_group(self) -> None:
        self._group.clear()
        self._flushed_at = time.monotonic()
        self._held.clear()

    def gather(self) -> None:
        """Write many small files as few; where the system refuses that, they stay as they are."""
        small = small_files(self._manifest)
        if len(small) > MAX_SMALL_FILES:
            with contextlib.suppress(OSError, InshrinkError):
                self._replace_files(gathered(self._root, self._manifest, small))
            self.reader.refresh()

    def _replace_files(self, manifest: Manifest) -> None:
        """Write a manifest, and delete the files that it names no more; after an error, those it would."""
        before = self._manifest
        try:
            self._write_manifest(manifest)
        except BaseException:
            if self._manifest is before:
                with contextlib.suppress(OSError):
                    self._delete_unlisted(manifest.frames)
            raise
        self._delete_unlisted(before.frames)

    def _delete_unlisted(self, frames: Iterable[FrameInfo]) -> None:
        """Delete the files of some frames, where the manifest lists no frame in them."""
        listed = {frame.path for frame in self._manifest.frames}
        for path in {frame.path for frame in frames} - listed:
            (self._root / path).unlink(missing_ok=True)
        sync_path(self._root / FRAME_FOLDER)

    def _stands(self, manifest: Manifest) -> bool:
        """After an interruption only the disk knows whether the manifest was replaced."""
        try:
            return read_regular(self._root / MANIFEST_NAME) == manifest.pack()
        except OSError:
            return True  # a frame too many does no harm, a listed frame without its file would

    def _write_manifest(self, manifest: Manifest) -> None:
        try:
            write_durably(self._root / MANIFEST_NAME, manifest.pack())
        except BaseException:
            if self._stands(manifest):
                self._manifest = manifest
            raise
        self._manifest = manifest

    @property
    def manifest(self) -> Manifest:
        """The manifest as it stands on the disk, with the frames of a group that are not there yet."""
        if not self._group:
            return self._manifest
        return replace(
            self._manifest,
            frames=(*self._manifest.frames, *self._group),
            next_generation=self._group[-1].generation + 1,
        )

    def write_manifest(self, manifest: Manifest, what: str) -> None:
        """Replace the manifest: the one step that makes frames live or removes them.

        Parameters
        ----------
        manifest
            The new one. `Rewrite` answers for it.
        what
            What cannot be done where the system refuses, for the message.

        Raises
        ------
        StorageError
            The system refused. `manifest` then tells whether it did so before or after the switch.
        """
        with storage_errors(what, self._root):
            self._write_manifest(manifest)

    def bury(self, frames: Iterable[FrameInfo]) -> None:
        """Remove frames; `remove_frames` checks that none is needed.

        Tombstones come first: whatever happens after them, the frames stay removed.
        """
        gone = tuple(frames)
        with storage_errors("the frames cannot be removed", self._root):
            self.flush()
            manifest = self._manifest.without_frames(frozenset(frame.generation for frame in gone))
            try:
                self._replace_files(self.without_remains(manifest, gone))
            finally:
                self.reader.refresh()

    def without_remains(self, manifest: Manifest, gone: Iterable[FrameInfo]) -> Manifest:
        """Write the frames that stay of segments from which some go into new files.

        Parameters
        ----------
        manifest
            Lists what stays.
        gone
            What the manifest lists no more.

        Returns
        -------
        Manifest
            The same with the new places, which is not written yet.
        """
        left = {frame.path for frame in gone if frame.offset is not None}
        files = [[frame for frame in manifest.frames if frame.path == path] for path in sorted(left)]
        return gathered(self._root, manifest, files)

    def relist(self) -> None:
        """Write the manifest anew from what the frame files say."""
        with storage_errors("the manifest cannot be rebuilt", self._root):
            self.flush()
            catalog = load_catalog(LocalStorage(self._root))
            manifest = replace(catalog.manifest, frames=(), next_generation=catalog.next_generation)
            for frame in sorted(catalog.by_id.values(), key=lambda frame: frame.generation):
                info, _ = scan_frame(FrameFile.of(LocalStorage(self._root), frame))
                manifest = manifest.with_frame(self._digested(info))
            self._write_manifest(manifest)
        self.reader.refresh()

    def close(self) -> None:
        """Abort an unfinished frame, flush, and release the lock; harmless when repeated.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _GroupReader(ArchiveReader):
    """A reader that sees the frames of a group, too."""

    def __init__(self, storage: Storage, group: list[FrameInfo]) -> None:
        self._group = group
        super().__init__(storage)

    def refresh(self) -> None:
        """See what was committed or removed since."""
        super().refresh()
        for info in self._group:
            self.see(info)


def _checked_place(step: Any, branch: Any, kind: Any, root: Path) -> tuple[int, int, FrameKind]:
    """Accept numpy's integers too, which msgpack would not."""
    try:
        step, branch, kind = operator.index(step), operator.index(branch), FrameKind(kind)
    except (TypeError, ValueError) as error:
        raise InputError(f"a frame cannot be described so: {error}", where=str(root)) from error
    if not (0 <= step <= MAX_STEP and 0 <= branch <= MAX_BRANCH):
        raise InputError(f"step {step} or branch {branch} is out of range", where=str(root))
    return step, branch, kind
