"""How what archives a training begins and ends: with its ``with`` statement, an error, or its successor."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakValueDictionary

from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import BaseModel, ChainConfig, open_base
from inshrink_core.chain.base import require_base_codec
from inshrink_core.errors import InputError, LockedError, StepConflictError, StorageError
from inshrink_core.training.archiver import Archiver
from inshrink_core.training.spool import SetAside, Spool, SpooledSave, spool_folder

if TYPE_CHECKING:
    from inshrink_core.chain import BaseLike
    from inshrink_core.frame import FrameInfo
    from inshrink_core.retention import Retention
    from inshrink_core.search.bounded import StepWriter


def opened_base(base: BaseLike | None, config: ChainConfig) -> BaseModel | None:
    """Return the base model of a new archive, if there is one and the codec can be relative to it."""
    model = None if base is None else open_base(base)
    if model is not None:
        require_base_codec(config.config)
    return model


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
    last_step
        The step of the last save or restore, or the archive's last; None where there is none.

    Notes
    -----
    A cell of a notebook that is run again after an interruption makes its saver again, while the first one
    is still there, for a variable or a traceback refers to it. The first one is *in use* within its ``with``
    statement, and while the thread that used it last is another one and alive. Where it is not in use, it
    lets go: what it has spooled is archived, the lock is released, and whoever uses it afterwards gets an
    error that says so. A forked child takes nothing over: the lock is its parent's.
    """

    path: Path | str
    last_step: int | None
    _entered = False
    _taken_over = False

    def _begin(
        self,
        config: ChainConfig,
        base: BaseModel | None,
        *,
        step_writer: StepWriter | None = None,
        on_failure: Callable[[SpooledSave, Exception], None] | None = None,
        retention: Retention | None = None,
    ) -> FrameInfo | None:
        """Open archive and spool, and archive what an earlier process left.

        Returns
        -------
        FrameInfo or None
            The archive's last frame where training would go on from it and it is missing.
        """
        writer = self._open_writer()
        try:
            self._spool = Spool(spool_folder(self.path))
            recovered = self._spool.recover()
            self._archiver = Archiver(
                writer,
                config,
                self._spool,
                recovered,
                step_writer=step_writer,
                base=base,
                on_failure=on_failure,
                retention=retention,
            )
            # At the end of the interpreter what is pending is archived, not abandoned.
            self._finalizer = weakref.finalize(self, self._archiver.close_quietly)
        except BaseException:
            writer.close()
            raise
        head = writer.reader.listed_head
        self.last_step = recovered[-1].step if recovered else head.step if head else None
        self._restored = recovered[-1].restored if recovered else None
        self._parent: bytes | None = None
        return None if recovered or head in writer.reader.frames else head

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The saves that could not be archived, of earlier processes too: where their files are, and why."""
        return self._spool.set_aside_saves

    def _require_next(self, step: int) -> None:
        """Refuse a step that cannot follow the last one."""
        if type(step) is not int or step < 0:
            raise InputError("a step is a whole number from 0", found=repr(step), expected="an int ≥ 0")
        if self.last_step is not None and step <= self.last_step:
            raise StepConflictError(
                f"step {step} is not after step {self.last_step}, the last one",
                where=str(self.path),
                remedy="where training goes on from an earlier step, restore that step first",
            )

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

    @property
    def is_usable_here(self) -> bool:
        """Whether this is the process that opened the archive, and not one forked from it."""
        return self._process == os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        raise InputError(
            "a saver can be neither copied nor pickled: it writes the archive from this process",
            where=str(self.path),
            remedy="make it in the process that saves",
        )

    def _use(self) -> None:
        """Note who uses it.

        Raises
        ------
        LockedError
            Its successor has taken over, or it belongs to the process that this one was forked from.
        """
        if not self.is_usable_here:
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


_HOLDING: Final[WeakValueDictionary[str | tuple[int, int], Holding]] = WeakValueDictionary()
"""Who opened an archive last in this process, by what the archive's folder is, however it is spelled."""


def _identity(archive: Path | str) -> str | tuple[int, int]:
    if isinstance(archive, str):
        return archive.rstrip("/")
    found = archive.stat()
    return found.st_dev, found.st_ino


class Forgiving(Closing):
    """What never stops a training: saves that are not in the archive are counted, and reported at the end.

    Attributes
    ----------
    path
        The archive.
    """

    path: Path | str

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
