"""The ranks of a training: which one archives, and where all of them meet."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any, Self

from inshrink_core.archive.storage.registry import place_of
from inshrink_core.errors import InshrinkError
from inshrink_core.training.closing import Forgiving
from inshrink_core.training.folder_saver import FolderSaver
from inshrink_core.training.spool import SetAside, Spool, spool_folder

_logger = logging.getLogger(__name__)


class FirstRankSaver(Forgiving):
    """Archives on the first rank, and holds nothing on the others; the base of the adapters."""

    def _archive_to(self, archive: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        """Take an archive, with options of `FolderSaver`; misuse is refused now.

        The archive is opened with the first save, or load: in whichever process that is.
        """
        self.path, self._options = place_of(archive), options
        self._failures: Mapping[int, str] = {}
        self._noted: dict[int, str] = {}
        self._saver: FolderSaver | None = None
        if is_first_rank():
            _Trial(self.path, **options)
            self._archive_left()

    def _reopen(self) -> FolderSaver | None:
        """Return the saver, opened now, or again after `close`; None on all ranks but the first."""
        if self._saver is not None and not self._saver.is_usable_here:
            self._saver = None
        if self._saver is None and is_first_rank():
            self._saver = FolderSaver(self.path, **self._options)
        return self._saver

    def _archive_left(self) -> None:
        """Archive what a process that has ended left in the spool, unless another one does."""
        if self._saver is None and is_first_rank() and spool_folder(self.path).is_dir():
            with contextlib.suppress(InshrinkError):
                self._reopen()
                self.close()

    def _saver_for(self, step: int) -> FolderSaver | None:
        """Return the saver; None on all ranks but the first, and where the archive cannot be opened."""
        try:
            return self._reopen()
        except Exception as error:  # training goes on, whatever it is
            self._note(step, error)
        return None

    def _note(self, step: int, error: Exception) -> None:
        """Count a save as failed, and log it."""
        if self._saver is not None:
            self._saver.note(step, error)
            return
        _logger.warning("the archive cannot be written, and training goes on: %s", error)
        self._noted[step] = str(error)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in this process or another, opens the archive itself.
        return {**self.__dict__, "_saver": None, "_failures": dict(self.failures)}

    def __enter__(self) -> Self:
        saver = self._reopen()
        if saver is not None:
            saver.__enter__()
        return self

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The saves that could not be archived: where their files are, and why; empty on the other ranks."""
        return Spool(spool_folder(self.path)).set_aside_saves if is_first_rank() else ()

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step; empty on all ranks but the first."""
        return {**self._noted, **(self._failures if self._saver is None else self._saver.failures)}

    def _release(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
            self._failures = saver.failures


class _Trial(FolderSaver):
    """Opens the archive and lets go of it, to refuse misuse."""

    def _begin(self, *_: Any, **__: Any) -> None:
        self._open_writer().close()


def is_first_rank() -> bool:
    """Tell whether this process is the one that archives, also before the processes are joined."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == os.environ.get("NODE_RANK", "0") == "0"


def barrier() -> None:
    """Wait until all ranks have come here; with one rank, go on."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
