"""The ranks of a training: which one archives, and where all of them meet."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from inshrink_core.archive.storage.registry import place_of
from inshrink_core.errors import InshrinkError, StorageError
from inshrink_core.training.saver import Saver
from inshrink_core.training.spool import SetAside, Spool, spool_folder

_logger = logging.getLogger(__name__)


class FirstRankSaver:
    """Archives on the first rank, and holds nothing on the others; the base of the adapters.

    Never stops a training: what a saver raises is logged and counted in `failures`.

    Attributes
    ----------
    path
        The archive.
    """

    path: Path | str

    def _archive_to(self, archive: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        """Take an archive, with options of `Saver`; misuse is refused now.

        The archive is opened with the first save, or load: in whichever process that is.
        """
        self.path, self._options = place_of(archive), options
        self._failures: dict[int, str] = {}
        self._saver: Saver | None = None
        if is_first_rank():
            _Trial(self.path, **options)
            self._archive_left()

    def _reopen(self) -> Saver | None:
        """Return the saver, opened now, or again after `close`; None on all ranks but the first."""
        if self._saver is not None and not self._saver.is_usable_here:
            self._saver = None
        if self._saver is None and is_first_rank():
            self._saver = Saver(self.path, **self._options)
        return self._saver

    def _archive_left(self) -> None:
        """Archive what a process that has ended left in the spool, unless another one does."""
        if self._saver is None and is_first_rank() and spool_folder(self.path).is_dir():
            with contextlib.suppress(InshrinkError):
                self._reopen()
                self.close()

    def _attempt(self, step: int, save: Callable[[Saver], Any]) -> bool:
        """Have the saver take a save, on the first rank; tell whether it did."""
        try:
            saver = self._reopen()
            if saver is not None:
                save(saver)
        except Exception as error:  # training goes on, whatever it is
            self._note(step, error)
            return False
        return saver is not None

    def _note(self, step: int, error: Exception) -> None:
        """Count a save as failed, and log it."""
        _logger.warning("step %s is not archived, and training goes on: %s", step, error)
        self._failures[step] = str(error)

    def _settle(self) -> None:
        """Have the archive, where others read it, hold what it can hold of the saves."""
        if self._saver is not None and self._saver.is_usable_here:
            with contextlib.suppress(Exception):  # each save is in its `failures`
                self._saver.flush()
            self._saver.upload()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in this process or another, opens the archive itself.
        return {**self.__dict__, "_saver": None, "_failures": dict(self.failures)}

    def __enter__(self) -> Self:
        saver = self._reopen()
        if saver is not None:
            saver.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The saves that could not be archived: where their files are, and why; empty on the other ranks."""
        return Spool(spool_folder(self.path)).set_aside_saves if is_first_rank() else ()

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step; empty on all ranks but the first."""
        return self._failures if self._saver is None else {**self._failures, **self._saver.failures}

    def close(self, *, strict: bool = False) -> None:
        """Archive what is pending and release the archive; harmless when repeated.

        Parameters
        ----------
        strict
            Whether to raise where a save is not in the archive.

        Raises
        ------
        StorageError
            Saves are not in the archive, with `strict`. Those that the disk refused are archived by the
            next process that opens the archive for saving.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            try:
                saver.__exit__()
            except Exception as error:  # each save is in its `failures`
                _logger.warning("not all saves are in the archive: %s", error)
            self._failures |= saver.failures
        if strict and self.failures:
            step, why = next(iter(self.failures.items()))
            raise StorageError(
                f"{len(self.failures)} saves are not in the archive; step {step}: {why}",
                where=str(self.path),
                remedy="see `failures` for each",
            )


class _Trial(Saver):
    """Opens the archive and lets go of it, to refuse misuse."""

    def _begin(self, *_: Any) -> None:
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
