"""The base class of adapters: the first rank of a training archives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import distributed

from inshrink_core.archive import is_archive
from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain import Archive
from inshrink_core.errors import StorageError
from inshrink_core.execution.files import Closing
from inshrink_core.frame import FrameInfo
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import QuarantinedSave, Spool, spool_folder

_Value = TypeVar("_Value")

_logger = logging.getLogger(__name__)


class FirstRankSaver(Closing):
    """Archives on the first rank, and does nothing on the others.

    Never stops a training: errors of the saver are logged and listed in `failures`.

    Attributes
    ----------
    path
        The archive.
    """

    path: Path | str

    def _archive_to(self, archive: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        """Set the archive and the options of `Saver`, which are checked now.

        Saves that an earlier process left in the spool are archived. The process of the first save or load
        opens the archive again.
        """
        self.path, self._options = place_of(archive), options
        self._failures: dict[int, str] = {}
        self._saver: Saver | None = None
        self._reopen()
        self.close()

    def _reopen(self) -> Saver | None:
        """Return the saver, opened if needed; None on all ranks but the first."""
        if self._saver is not None and not self._saver.is_usable_here:
            self._saver = None
        if self._saver is None and is_first_rank():
            self._saver = Saver(self.path, **self._options)
        return self._saver

    def _attempt(self, step: int, save: Callable[[Saver], _Value]) -> _Value | None:
        """Save on the first rank; return what `save` does, or None if it fails."""
        try:
            saver = self._reopen()
            return None if saver is None else save(saver)
        except Exception as error:  # no error stops the training
            _logger.warning("step %s is not archived, and training continues: %s", step, error)
            self._failures[step] = str(error)
            return None

    def _settle(self) -> None:
        """Archive pending saves, as far as possible, and wait for uploads."""
        if self._saver is not None and self._saver.is_usable_here:
            with contextlib.suppress(Exception):  # listed in `failures`
                self._saver.flush()
            self._saver.upload()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in this process or another, opens the archive again.
        return {**self.__dict__, "_saver": None, "_failures": dict(self.failures)}

    def __enter__(self) -> Self:
        saver = self._reopen()
        if saver is not None:
            saver.__enter__()  # no other saver takes over
        return self

    @property
    def quarantined(self) -> tuple[QuarantinedSave, ...]:
        """Saves that could not be archived, with folders and reasons; empty on all ranks but the first."""
        return Spool(spool_folder(self.path)).quarantined_saves if is_first_rank() else ()

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step; empty on all ranks but the first."""
        return self._failures if self._saver is None else {**self._failures, **self._saver.failures}

    def close(self, *, strict: bool = False) -> None:
        """Archive pending saves and release the archive; may be repeated.

        Parameters
        ----------
        strict
            Raise if a save is not in the archive.

        Raises
        ------
        StorageError
            With `strict`: saves are not in the archive. The next process that opens the archive for saving
            archives those that the disk refused.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            try:
                saver.__exit__()
            except Exception as error:  # listed in `failures`
                _logger.warning("not all saves are in the archive: %s", error)
            self._failures |= saver.failures
        if strict and self.failures:
            step, why = next(iter(self.failures.items()))
            raise StorageError(
                f"{len(self.failures)} saves are not in the archive; step {step}: {why}",
                where=str(self.path),
                remedy="see `failures` for each",
            )


def step_to_restore(archive: str | os.PathLike[str], step: int | None) -> tuple[Archive, FrameInfo] | None:
    """Return an archive, and the frame of a step or the last one; None without a step if there is none.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    """
    if step is None and not is_archive(archive):
        return None
    opened = Archive.open(archive)
    if step is None and not opened.listed_steps:
        return None
    return opened, opened.last if step is None else opened.reader.find(step)


def is_first_rank() -> bool:
    """Tell whether this process archives; works before the process group exists."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == os.environ.get("NODE_RANK", "0") == "0"


def barrier() -> None:
    """Wait for all ranks; return at once without a process group."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
