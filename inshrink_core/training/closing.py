"""How what archives a training ends: with its ``with`` statement, with an error, or with its successor."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self
from weakref import WeakValueDictionary

from inshrink_core.archive import ArchiveWriter
from inshrink_core.errors import LockedError, StorageError

__all__ = ["Closing", "Forgiving", "Holding"]


class Closing(ABC):
    """What is closed at the end of a ``with`` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held; harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Holding(Closing):
    """What holds an archive's lock until it is closed, or until its successor in this process takes over.

    Attributes
    ----------
    path
        The archive.

    Notes
    -----
    A cell of a notebook that is run again after an interruption makes its saver again, while the first one
    is still there, for a variable or a traceback refers to it. The first one is *in use* within its ``with``
    statement, and while the thread that used it last is another one and alive. Where it is not in use, it
    lets go: what it has spooled is archived, the lock is released, and whoever uses it afterwards is told so.
    A forked child takes nothing over: the lock is its parent's.
    """

    path: Path
    _entered = False
    _taken_over = False

    def _open_writer(self) -> ArchiveWriter:
        """Open the archive for writing; one that is no longer in use lets go of it.

        Raises
        ------
        LockedError
            It is in use, in this process or another one.
        """
        self._used_in, self._process = threading.current_thread(), os.getpid()
        try:
            writer = ArchiveWriter(self.path, create=True)
        except LockedError:
            before = _HOLDING.get(_identity(self.path))
            if before is None or before._process != self._process:
                raise
            before._give_way()
            writer = ArchiveWriter(self.path, create=True)
        _HOLDING[_identity(self.path)] = self
        return writer

    def _give_way(self) -> None:
        """Let go of the archive for another one of this process, unless this one is in use."""
        other = self._used_in is not threading.current_thread() and self._used_in.is_alive()
        if self._entered or other:
            place = f"thread '{self._used_in.name}'" if other else "its `with` statement"
            raise LockedError(
                f"a saver of this process is writing this archive, in {place}",
                where=str(self.path),
                remedy="close that one first, or give each training an archive of its own",
            )
        self._taken_over = True
        self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Archive what is spooled and release the archive, without an error."""

    def _use(self) -> None:
        """Note who uses it.

        Raises
        ------
        LockedError
            Its successor has taken over, or it belongs to the process that this one was forked from.
        """
        if self._process != os.getpid():
            raise LockedError(
                f"this saver belongs to process {self._process}, from which this one was forked",
                where=str(self.path),
                remedy="save in that process, or make a saver of another archive here",
            )
        if self._taken_over:
            raise LockedError(
                "another saver, made later in this process, has taken over this archive",
                where=str(self.path),
                remedy="go on with that one; what this one saved is archived",
            )
        self._used_in = threading.current_thread()

    def __enter__(self) -> Self:
        self._use()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        super().__exit__(*error)


_HOLDING: Final[WeakValueDictionary[tuple[int, int], Holding]] = WeakValueDictionary()
"""Who opened an archive last in this process, by what the archive's folder is, however it is spelled."""


def _identity(archive: Path) -> tuple[int, int]:
    found = archive.stat()
    return found.st_dev, found.st_ino


class Forgiving(Closing):
    """What never stops a training: saves that are not in the archive are counted, and told at the end.

    Attributes
    ----------
    path
        The archive.
    """

    path: Path

    @property
    @abstractmethod
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step."""

    @abstractmethod
    def _release(self) -> None:
        """Archive what is pending and release the archive."""

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
        self._release()
        if strict:
            self._require_none()

    def _require_none(self) -> None:
        """Raise where there are failures."""
        if self.failures:
            step, why = next(iter(self.failures.items()))
            raise StorageError(
                f"{len(self.failures)} saves are not in the archive; step {step}: {why}",
                where=str(self.path),
                remedy="see `failures` for each",
            )
