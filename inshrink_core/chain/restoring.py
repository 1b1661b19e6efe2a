"""Restoring a step: what it takes, tensors decoded ahead of their use, and a folder written as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.sizes import sequential_within, step_needs
from inshrink_core.errors import ExistsError, StorageError, TooLargeError
from inshrink_core.execution import default_threads, make_folders, read_regular, sync_path, working_folder
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.disk import MAX_JSON_BYTES
from inshrink_core.formats.write import restorable_layout, written_nbytes

if TYPE_CHECKING:
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.frame import FrameInfo

LINEAGE_NAME: Final = "inshrink-lineage.json"
"""File in a restored folder that says which frame it is."""


class Lineage(NamedTuple):
    """Which frame of which archive a folder was restored from."""

    archive_id: bytes
    frame_id: bytes
    step: int


def read_lineage(folder: Path) -> Lineage | None:
    """Return which frame a folder was restored from; None where it does not say."""
    try:
        record = json.loads(read_regular(folder / LINEAGE_NAME, MAX_JSON_BYTES))
        lineage = Lineage(bytes.fromhex(record["archive"]), bytes.fromhex(record["frame"]), record["step"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return lineage if type(lineage.step) is int else None


def restore_folder(
    archive: str | os.PathLike[str] | Archive,
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    device: str = "auto",
) -> FrameInfo:
    """Write an archived step as the folder it was, whole or not at all.

    Parameters
    ----------
    archive
        The archive, or its path.
    folder
        Where to write it. One that holds this very step already, by the names and sizes of its files, stays
        as it is.
    step
        The step; by default the last one.
    device
        Where tensors are decoded; does not change the files.

    Returns
    -------
    FrameInfo
        The frame.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    ExistsError
        Something else lies at `folder`.
    StorageError
        The disk is full.

    Notes
    -----
    ``inshrink-lineage.json`` in the folder names the frame, for `Saver.resume`: ``archive`` and
    ``frame``, their ids in hexadecimal, and ``step``.
    """
    opened = archive if isinstance(archive, Archive) else Archive.open(archive)
    info = opened.last if step is None else opened.reader.find(step)
    target = Path(folder)
    checkpoint = opened.checkpoint(info)
    if _holds(target, checkpoint):
        return info
    if target.exists():
        raise ExistsError(
            f"something else than step {info.step} of the archive lies there",
            where=str(target),
            remedy="move it away, or restore elsewhere",
        )
    record = {"archive": opened.reader.archive_id.hex(), "frame": info.frame_id.hex(), "step": info.step}
    try:
        make_folders(target.parent)
        with working_folder(target.parent) as work:
            complete = work / "whole"
            view, threads = fitting(opened.on(device), [info], complete, "same", None, default_threads())
            shown = view.checkpoint(info)
            with shown.prefetch(shown.specs, threads) as ahead:
                write_checkpoint(ahead, complete, layout=restorable_layout(shown), limits=view.limits)
            (complete / LINEAGE_NAME).write_text(json.dumps(record), encoding="ascii")
            sync_path(complete / LINEAGE_NAME)
            sync_path(complete)
            try:
                complete.rename(target)
            except OSError:
                if not _holds(target, checkpoint):  # else another rank was faster
                    raise
            sync_path(target.parent)
    except OSError as error:
        raise StorageError(
            f"the step cannot be restored: {error.strerror}", where=str(target), remedy="free some space"
        ) from error
    return info


def _holds(folder: Path, checkpoint: Checkpoint) -> bool:
    """Tell whether a folder has the files of a checkpoint, by names and sizes."""
    try:
        return folder.is_dir() and all(
            (folder / file.path).stat().st_size == file.nbytes for file in checkpoint.files
        )
    except OSError:
        return False


def fitting(
    archive: Archive,
    infos: Sequence[FrameInfo],
    directory: Path,
    layout: str,
    keys: Callable[[str], bool] | None,
    threads: int,
) -> tuple[Archive, int]:
    """Return a view and a number of threads that fit the memory; refuse what does not fit the disk."""
    disk, needs = 0, []
    for info in infos:
        checkpoint = archive.checkpoint(info)
        as_written = restorable_layout(checkpoint) if layout == "same" and keys is None else layout
        needs.append(step_needs(archive, info, checkpoint, as_written))
        disk += written_nbytes(checkpoint, as_written, keys)
    what = f"restoring {len(infos)} steps" if len(infos) > 1 else f"restoring step {infos[0].step}"
    archive.limits.require_disk(disk, directory, what, archive.reader.path)
    if keys is not None:  # some of them only: each is checked as it is decoded
        return (archive.sequential() if len(infos) > 1 else archive), threads
    view = sequential_within(archive, needs) if len(infos) > 1 else archive
    state_nbytes = max((row.state for row in needs), default=0) if view.keeps_state else 0
    while True:
        try:
            most = max(row.memory(threads) for row in needs)
            archive.limits.require_memory(most + state_nbytes, what, archive.reader.path)
        except TooLargeError:
            if threads == 1:
                raise
            threads -= 1
        else:
            return view, threads
