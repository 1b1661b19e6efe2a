"""Rare work on a whole archive: removing frames for good, and rebuilding a manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable

from inshrink_core.archive.writer import ArchiveWriter
from inshrink_core.errors import InputError, NotFoundError
from inshrink_core.frame import FrameKind

__all__ = ["rebuild_manifest", "remove_frames"]


def rebuild_manifest(path: str | os.PathLike[str]) -> None:
    """Write the manifest anew from the frames, as if there were none.

    Rows of frames whose files are gone are dropped; tombstones and the count of generations are kept
    where the old manifest can be read. Digests are taken from the files as they are now.

    Raises
    ------
    NotFoundError, LockedError, StorageError
        As `ArchiveWriter`.
    DamagedError
        A frame the manifest lists is not whole: remove or restore its file first.
    """
    with ArchiveWriter(path) as writer:
        writer.relist()


def remove_frames(writer: ArchiveWriter, ids: Iterable[bytes]) -> None:
    """Remove frames for good: tombstones first, then the files.

    Raises
    ------
    NotFoundError
        No frame has such an id.
    InputError
        A delta frame that stays needs one of them as its reference; nothing is removed.
    """
    wanted = set(ids)
    known = {frame.frame_id: frame for frame in (*writer.reader.missing, *writer.reader.frames)}
    for frame_id in sorted(wanted - known.keys()):
        raise NotFoundError(f"there is no frame {frame_id.hex()}", where=writer.reader.path)
    for frame in known.values():
        if frame.kind is FrameKind.DELTA and frame.parent_id in wanted and frame.frame_id not in wanted:
            raise InputError(
                f"the frame of step {known[frame.parent_id].step} is the reference of step {frame.step}, "
                "which stays",
                where=writer.reader.path,
                remedy="remove both, or re-key the one that stays",
            )
    writer.bury(known[frame_id] for frame_id in sorted(wanted))
