"""The ranks of a training: which one archives, and where all of them meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from inshrink_core.archive.storage.registry import place_of
from inshrink_core.training.closing import Forgiving
from inshrink_core.training.folder_saver import FolderSaver
from inshrink_core.training.spool import SetAside, Spool, spool_folder


class FirstRankSaver(Forgiving):
    """Archives on the first rank, and holds nothing on the others; the base of the adapters."""

    def _archive_to(self, archive: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        """Open an archive, with options of `FolderSaver`; misuse is refused now."""
        self.path, self._options = place_of(archive), options
        self._failures: Mapping[int, str] = {}
        self._saver: FolderSaver | None = None
        self._reopen()

    def _reopen(self) -> FolderSaver | None:
        """Return the saver, opened again after `close`; None on all ranks but the first."""
        if self._saver is None and is_first_rank():
            self._saver = FolderSaver(self.path, **self._options)
        return self._saver

    def __enter__(self) -> Self:
        if self._saver is not None:
            self._saver.__enter__()
        return self

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The saves that could not be archived: where their files are, and why; empty on the other ranks."""
        return Spool(spool_folder(self.path)).set_aside_saves if is_first_rank() else ()

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step; empty on all ranks but the first."""
        return self._failures if self._saver is None else self._saver.failures

    def _release(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
            self._failures = saver.failures


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
