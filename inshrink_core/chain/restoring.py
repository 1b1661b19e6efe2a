"""Restore a step to a folder with its original files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.sizes import sequential_within, step_needs
from inshrink_core.errors import ExistsError, StorageError, TooLargeError
from inshrink_core.execution.files import make_folders, read_regular, sync_path, working_folder
from inshrink_core.execution.threads import default_threads
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.disk import MAX_JSON_BYTES
from inshrink_core.formats.write import restorable_layout, written_nbytes

if TYPE_CHECKING:
    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.frame import FrameInfo

LINEAGE_NAME: Final = "inshrink-lineage.json"
"""File in a restored folder that identifies its frame."""


class Lineage(NamedTuple):
    """The archive and frame that a folder was restored from."""

    archive_id: bytes
    frame_id: bytes
    step: int


def read_lineage(folder: Path) -> Lineage | None:
    """Return the frame that a folder was restored from; None if it has no valid lineage file."""
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
    """Write an archived step to a folder with its original files, atomically.

    Parameters
    ----------
    archive
        The archive, or its path.
    folder
        The target. A folder that already holds this step, judged by the names and sizes of its files, is left
        unchanged.
    step
        The step; by default the last one.
    device
        Device that decodes tensors; does not change the files.

    Returns
    -------
    FrameInfo
        The frame.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    ExistsError
        `folder` exists with other content.
    StorageError
        The disk is full.

    Notes
    -----
    ``inshrink-lineage.json`` in the folder identifies the frame for `Saver.resume`. Its keys are ``archive``
    and ``frame``, ids in hexadecimal, and ``step``.
    """
    opened = archive if isinstance(archive, Archive) else Archive.open(archive)
    info = opened.last if step is None else opened.reader.find(step)
    target = Path(folder)
    checkpoint = opened.checkpoint(info)
    if _holds(target, checkpoint):
        return info
    if target.exists():
        what = f"something other than step {info.step} of the archive is there"
        raise ExistsError(what, where=str(target), remedy="move it away, or restore elsewhere")
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
                if not _holds(target, checkpoint):  # unless another rank has written it
                    raise
            sync_path(target.parent)
    except OSError as error:
        what = f"the step cannot be restored: {error.strerror}"
        raise StorageError(what, where=str(target), remedy="free some space") from error
    return info


def _holds(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether a folder has the files of a checkpoint, by names and sizes."""
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
    """Return a view and a number of threads that fit the memory limit; refuse if the disk is too small."""
    disk, needs = 0, []
    for info in infos:
        checkpoint = archive.checkpoint(info)
        as_written = restorable_layout(checkpoint) if layout == "same" and keys is None else layout
        needs.append(step_needs(archive, info, checkpoint, as_written))
        disk += written_nbytes(checkpoint, as_written, keys)
    what = f"restoring {len(infos)} steps" if len(infos) > 1 else f"restoring step {infos[0].step}"
    archive.limits.require_disk(disk, directory, what, archive.reader.path)
    if keys is not None:  # a subset of the tensors: memory is checked for each tensor on decoding
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
