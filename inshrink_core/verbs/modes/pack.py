"""A whole archive as one file, and such a file as a folder again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import Report

if TYPE_CHECKING:
    from inshrink_core.chain import Archive

__all__ = ["PackReport", "pack", "unpack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport(Report):
    """What `pack` or `unpack` wrote.

    Parameters
    ----------
    archive, output
        What was copied, and what was made.
    steps
        Steps of its newest branch.
    n_frames
        Frames of all branches.
    nbytes
        Bytes of what was made: of the file, or of the frames and the manifest.
    seconds
        Wall time.
    """

    archive: str
    output: Path
    steps: tuple[int, ...]
    n_frames: int
    nbytes: int
    seconds: float

    SAYS: ClassVar = "archive output steps frames=n_frames bytes=nbytes seconds"


def pack(
    archive: Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: OnProgress | None = None,
) -> PackReport:
    """Copy an archive into one file, which everything that reads archives reads as it is.

    Parameters
    ----------
    archive
        The archive, or its path or URL.
    output
        The file to make.
    force
        Replace the file if it exists.
    progress
        Called after each piece copied; raising cancels and leaves nothing behind.

    Raises
    ------
    ExistsError
        The file exists and `force` is not set.
    DamagedError, MissingFrameError
        A frame is not the one that was committed, or is gone.
    StorageError
        The system refused.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, folder / "digits.inshrink", steps=[200, 400])
    >>> report = inshrink_core.verbs.pack(folder / "digits.inshrink", folder / "packed.inshrink")
    >>> inshrink_core.open(folder / "packed.inshrink").steps
    (200, 400)
    """
    from inshrink_core.archive import pack_archive

    return _copied(archive, output, partial(pack_archive, force=force), "pack", progress)


def unpack(
    archive: Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    progress: OnProgress | None = None,
) -> PackReport:
    """Copy an archive into a folder, to which `compress` appends.

    Parameters
    ----------
    archive
        The archive, or its path or URL.
    output
        The folder to make; it must not exist.
    progress
        Called after each piece copied; raising cancels and leaves nothing behind.

    Raises
    ------
    ExistsError
        Something is there already.
    DamagedError
        A frame is not the one that was packed.
    StorageError
        The system refused.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, folder / "digits.inshrink", steps=[200])
    >>> report = inshrink_core.verbs.pack(folder / "digits.inshrink", folder / "packed.inshrink")
    >>> report = inshrink_core.verbs.unpack(folder / "packed.inshrink", folder / "again.inshrink")
    >>> inshrink_core.compress(run, folder / "again.inshrink", steps=[200, 400]).appended
    (400,)
    """
    from inshrink_core.archive import unpack_archive

    return _copied(archive, output, unpack_archive, "unpack", progress)


def _copied(
    archive: Archive | str | os.PathLike[str],
    output: str | os.PathLike[str],
    copy: Callable[..., object],
    stage: str,
    progress: OnProgress | None,
) -> PackReport:
    """Have an archive copied, and say what became of it."""
    from inshrink_core.chain import Archive

    begun = time.perf_counter()
    source = archive if isinstance(archive, Archive) else Archive.open(archive)

    def advance(done: int, total: int, step: int) -> None:
        if progress is not None:
            progress(Progress(stage, done, total, step))

    copy(source.reader, output, done=advance)
    made = Archive.open(output)
    return PackReport(
        archive=source.reader.path,
        output=Path(output),
        steps=made.steps,
        n_frames=len(made.reader.frames),
        nbytes=made.reader.nbytes,
        seconds=time.perf_counter() - begun,
    )
