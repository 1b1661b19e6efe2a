"""Frames that take the place of others, and frames that go, in one switch that a crash cannot halve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from inshrink_core.archive.frame_writer import FrameWriter
from inshrink_core.archive.index import BlockColumns, FrameIndex
from inshrink_core.archive.layout import FRAME_FOLDER, FrameHeader
from inshrink_core.archive.storage import storage_error
from inshrink_core.archive.writer import ArchiveWriter
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.execution import sync_path
from inshrink_core.frame import FrameInfo, FrameKind

__all__ = ["Rewrite"]

_FAILED: Final = "the archive cannot be rewritten"

_NEVER: Final = "\0"
"""No key, codec or attribute of a block: inheriting nothing is differing from this everywhere."""


class Rewrite:
    """Rewrites some frames of an archive and removes others; use it as a context manager.

    New frames get generations that stand among the tombstones, so that they are not live whatever
    happens. `switch` writes the one manifest that lists them in the place of the old ones; then the
    old files are deleted. Without `switch` everything stays as it was.

    Parameters
    ----------
    writer
        The archive, open for writing.
    frames
        The frames to be rewritten. Their order stays: generations are given out in it.

    Raises
    ------
    StorageError
        The system refused.

    Notes
    -----
    A rewritten frame keeps its id, step and branch, so that whatever refers to it still does. Write
    children before their parents: as they inherit nothing, they are readable beside either version.
    """

    def __init__(self, writer: ArchiveWriter, frames: Iterable[FrameInfo]) -> None:
        self._writer = writer
        self._root = Path(writer.reader.path)
        self._old = {frame.frame_id: frame for frame in sorted(frames, key=lambda frame: frame.generation)}
        self._new: dict[bytes, FrameInfo] = {}
        self._open: FrameWriter | None = None
        self._switched = False
        first = writer.manifest.next_generation
        self._generations = {frame_id: first + i for i, frame_id in enumerate(self._old)}
        reserved = self._generations.values()
        manifest = replace(
            writer.manifest,
            tombstones=tuple(sorted({*writer.manifest.tombstones, *reserved})),
            next_generation=first + len(self._old),
        )
        if self._old:
            writer.write_manifest(manifest, _FAILED)

    def begin(self, frame_id: bytes, *, kind: FrameKind, parent_id: bytes | None) -> FrameWriter:
        """Start the new version of a frame.

        Parameters
        ----------
        frame_id
            One of the frames given.
        kind
            Keyframe or delta.
        parent_id
            The frame it continues from: its parent, or a nearer ancestor that stays.

        Raises
        ------
        InputError
            It is not one of them, or is written already.
        StorageError
            The system refused.
        """
        if frame_id not in self._old or frame_id in self._new:
            raise InputError(f"frame {frame_id.hex()} is not to be rewritten", where=str(self._root))
        old, archive_id = self._old[frame_id], self._writer.manifest.archive_id
        generation = self._generations[frame_id]
        header = FrameHeader(archive_id, frame_id, parent_id, old.step, kind, old.branch, generation)
        parent = None
        if kind is FrameKind.DELTA and parent_id is not None:
            parent = _inheriting_nothing(self._writer.reader.resolved_index(parent_id).meta)
        self._open = FrameWriter(self._root, header, parent, self._publish, self._release)
        return self._open

    def _release(self) -> None:
        self._open = None

    def _publish(self, temporary: Path, info: FrameInfo) -> None:
        """Give a frame its name: it is not live, as its generation is buried."""
        temporary.replace(self._root / info.path)
        self._new[info.frame_id] = info

    def switch(self, gone: Iterable[FrameInfo] = ()) -> None:
        """Put the new frames in the place of the old, and remove others, all at once.

        Parameters
        ----------
        gone
            Frames to remove for good. No delta frame that stays may have one as its parent.

        Raises
        ------
        InputError
            A frame was not rewritten, or a frame that stays needs one that goes; nothing is changed.
        StorageError
            The system refused.
        """
        if self._new.keys() != self._old.keys():
            raise InputError("not every frame was rewritten", where=str(self._root))
        removed = {frame.generation: frame for frame in (*gone, *self._old.values())}
        stay = [f for f in self._writer.manifest.frames if f.generation not in removed]
        frames = tuple(sorted((*stay, *self._new.values()), key=lambda frame: frame.generation))
        _require_references(frames, str(self._root))
        fresh = set(self._generations.values())
        manifest = replace(
            self._writer.manifest,
            frames=frames,
            tombstones=tuple(sorted({*self._writer.manifest.tombstones, *removed} - fresh)),
        )
        try:
            self._sync()
            self._writer.write_manifest(manifest, _FAILED)
        finally:
            self._switched = self._writer.manifest == manifest
        self._delete(removed.values())

    def _sync(self) -> None:
        """Make the names of the new frames durable, before a manifest may list them."""
        try:
            sync_path(self._root / FRAME_FOLDER)
        except OSError as error:
            raise storage_error(error, _FAILED, str(self._root)) from error

    def _delete(self, frames: Iterable[FrameInfo]) -> None:
        """Delete files that the manifest on the disk does not list; after an interruption only it knows.

        What cannot be deleted now, the next writer deletes.
        """
        with contextlib.suppress(OSError, InshrinkError):
            self._writer.reader.refresh()
            catalog = self._writer.reader.catalog
            if catalog.manifest_problem is not None:
                return
            listed = {frame.generation for frame in catalog.manifest.frames}
            # Children first: a file that is left by a crash still has its reference.
            for frame in sorted(frames, key=lambda frame: -frame.generation):
                if frame.generation not in listed:
                    (self._root / frame.path).unlink(missing_ok=True)
            sync_path(self._root / FRAME_FOLDER)
            self._writer.reader.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abort()
        if not self._switched:
            self._delete(self._new.values())


def _inheriting_nothing(meta: Mapping[str, bytes]) -> FrameIndex:
    """Return an index that no frame shares a column with; the parent's meta is told by difference."""
    columns = BlockColumns((_NEVER,), (_NEVER,), ((_NEVER,),))
    return FrameIndex(columns, columns, (), (), (), meta)


def _require_references(frames: Iterable[FrameInfo], where: str) -> None:
    """Refuse to leave a delta frame without its parent."""
    rows = tuple(frames)
    known = {frame.frame_id for frame in rows}
    for frame in rows:
        if frame.kind is FrameKind.DELTA and frame.parent_id not in known:
            raise InputError(
                f"the frame of step {frame.step} would lose its reference",
                where=where,
                remedy="rewrite it as a keyframe, or keep its parent",
            )
