"""Giving up frames whose files are lost, so that an archive can be written, pruned and packed again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from inshrink_core.archive import ArchiveReader, ArchiveWriter, remove_frames
from inshrink_core.errors import MissingFrameError
from inshrink_core.frame import FrameInfo

__all__ = ["ForgetReport", "forget_missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """What `forget_missing` gave up, or would.

    Parameters
    ----------
    archive
        The archive.
    applied
        True where it was done; False for a plan.
    missing
        Frames whose files are gone.
    useless
        Frames that are there and cannot be decoded without one of those.
    head
        The frame that is the last one then; None where none is left.
    """

    archive: str
    applied: bool
    missing: tuple[FrameInfo, ...]
    useless: tuple[FrameInfo, ...]
    head: FrameInfo | None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink prune --forget-missing --json``."""
        head = self.head
        return {
            "archive": self.archive,
            "applied": self.applied,
            "missing": [_row(frame) for frame in self.missing],
            "useless": [_row(frame) for frame in self.useless],
            "last": None if head is None else _row(head),
        }


def _row(frame: FrameInfo) -> dict[str, Any]:
    return {"step": frame.step, "branch": frame.branch, "path": frame.path}


def forget_missing(archive: str | os.PathLike[str], *, apply: bool = False) -> ForgetReport:
    """Give up the frames whose files are lost, and those that cannot be decoded without them.

    Parameters
    ----------
    archive
        The archive's path: a folder.
    apply
        Do it. Otherwise nothing is changed, and the report says what would be done.

    Returns
    -------
    ForgetReport
        What goes, and which frame is the last one then.

    Raises
    ------
    NotFoundError, LockedError, StorageError
        As for any writer; nothing is changed.

    Notes
    -----
    This cannot be undone: a file that is found later is no part of the archive any more. The steps go on
    from what is the last frame then, perhaps that of a branch which training had left.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> from inshrink_core.session.forget import forget_missing
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:2])
    >>> (target / inshrink_core.open(target).last.path).unlink()
    >>> [frame.step for frame in forget_missing(target, apply=True).missing] == [run.steps[1]]
    True
    >>> inshrink_core.open(target).last.step == run.steps[0]
    True
    """
    if not apply:
        reader = ArchiveReader.open(archive)
        missing, useless = _lost(reader)
        gone = {frame.frame_id for frame in (*missing, *useless)}
        left = [frame for frame in reader.frames if frame.frame_id not in gone]
        head = max(left, key=lambda frame: (frame.branch, frame.generation), default=None)
        return ForgetReport(
            archive=os.fspath(archive), applied=False, missing=missing, useless=useless, head=head
        )
    with ArchiveWriter(archive) as writer:
        missing, useless = _lost(writer.reader)
        if missing:
            remove_frames(writer, [frame.frame_id for frame in (*missing, *useless)])
        return ForgetReport(
            archive=os.fspath(archive),
            applied=True,
            missing=missing,
            useless=useless,
            head=writer.reader.head,
        )


def _lost(reader: ArchiveReader) -> tuple[tuple[FrameInfo, ...], tuple[FrameInfo, ...]]:
    """Return the missing frames, and those whose chains lead through one."""
    useless = []
    for frame in reader.frames:
        try:
            reader.chain(frame.frame_id)
        except MissingFrameError:
            useless.append(frame)
    return reader.missing, tuple(useless)
