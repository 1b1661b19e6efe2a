"""Archives spooled saves on a background thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

import torch
from msgspec.structs import replace

from inshrink_core.archive import ArchiveReader, ArchiveWriter, is_archive
from inshrink_core.chain import ChainConfig, ChainWriter, holds_content, stored_view
from inshrink_core.chain.archive import open_base_at
from inshrink_core.chain.base import BaseFinder, BaseModel
from inshrink_core.chain.prune import PruneRules, carry_out
from inshrink_core.errors import (
    BaseModelError,
    DamagedError,
    InputError,
    InshrinkError,
    LockedError,
    MissingExtraError,
    StepConflictError,
    StorageError,
    TooLargeError,
)
from inshrink_core.frame import FrameInfo
from inshrink_core.retention import Retention
from inshrink_core.search.bounded import StepWriter
from inshrink_core.training.spool import QuarantinedSave, Spool, SpooledSave

MAX_PENDING: Final = 2
"""Saves that may wait: one being encoded and one behind it. More would hide that saves come faster than
they can be archived."""

MAX_QUARANTINED: Final = 3
"""Most consecutive saves that are quarantined."""

RETAIN_EVERY: Final = 8
"""Saves between two prunings, which re-key frames once for all of them."""

_NO_FAULT: Final = (
    *(StorageError, OSError, MemoryError, TooLargeError),
    *(BaseModelError, LockedError, MissingExtraError),
)
"""Errors that are not the save's fault: it is tried again."""

_logger = logging.getLogger(__name__)


class Archiver:
    """Archives spooled saves on a background thread; holds the archive's lock until `close`.

    Parameters
    ----------
    writer
        The archive, open for writing; closed by `close`.
    config
        How frames are encoded.
    spool
        The spool.
    recovered
        Saves of an earlier process; they come first.
    step_writer
        Writes each save; by default with `config`.
    base
        The base model that the archive's first frame is encoded relative to.
    retention
        Which steps stay; applied after every `RETAIN_EVERY` saves, and at `close`.

    Attributes
    ----------
    failures
        Why saves are not in the archive, by step.

    Notes
    -----
    `inshrink_core.Saver` documents how failures are handled. The thread stops if the disk or the archive
    refuses; `wait_for_room`, `flush` and `close` make it try again, and raise if that fails.
    """

    def __init__(
        self,
        writer: ArchiveWriter,
        config: ChainConfig,
        spool: Spool,
        recovered: Iterable[SpooledSave],
        *,
        step_writer: StepWriter | None = None,
        base: BaseModel | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._writer, self._config, self._spool, self._base = writer, config, spool, base
        self._retention, self._n_unretained = retention, 0
        self.failures: dict[int, str] = {}
        self._unreported: list[QuarantinedSave] = []
        self._n_in_a_row = 0
        self._detached: bytes | None = None
        """The parent frame of saves that were quarantined; the next save gets it."""
        self._process = os.getpid()
        self._step_writer = step_writer
        self._waiting = deque(recovered)
        self._earlier = frozenset(save.folder for save in self._waiting)
        self._recovered = set(self._earlier)
        """Saves that may already be in the archive."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = self._closed = False
        self._chain: ChainWriter | None = None
        self._last: SpooledSave | None = None
        self._thread = threading.Thread(target=self._work, name="inshrink-saver", daemon=True)
        self._thread.start()

    @property
    def reader(self) -> ArchiveReader:
        """The archive's frames; use it only after `flush`."""
        return self._writer.reader

    def write_with(self, step_writer: StepWriter) -> None:
        """Write later saves with another writer; use it only after `flush`."""
        self._step_writer = step_writer

    @property
    def pending(self) -> tuple[int, ...]:
        """Steps of the saves not archived yet."""
        with self._changed:
            return tuple(save.step for save in self._waiting)

    def wait_for_room(self) -> None:
        """Wait until another save may be submitted."""
        self._wait(MAX_PENDING - 1)

    def submit(self, save: SpooledSave) -> None:
        """Queue a save."""
        with self._changed:
            self._waiting.append(self._successor(save))
            self._changed.notify_all()

    def _successor(self, save: SpooledSave) -> SpooledSave:
        """Return a save with the parent of saves before it that were quarantined."""
        parent, self._detached = self._detached, None
        if parent is None or save.parent is not None:
            return save
        with contextlib.suppress(InshrinkError):  # then only this process knows the parent
            return self._spool.adopt(save, parent)
        return replace(save, parent=parent)

    def flush(self) -> None:
        """Wait until every save is archived or quarantined."""
        self._wait(0)

    def upload(self) -> None:
        """Wait for the archive's uploads; use it only after `flush`.

        Raises
        ------
        StorageError, ConflictError
            As `ArchiveWriter.flush`.
        """
        self._writer.flush()

    def _wait(self, n_pending: int) -> None:
        if self._process != os.getpid():
            return
        with self._changed:
            self._error = None  # a refused save is tried again
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or len(self._waiting) <= n_pending)
            error: BaseException | None = self._error
            if error is not None and len(self._waiting) > n_pending:
                raise error

    def close(self) -> None:
        """Archive pending saves, end the thread and release the archive; may be repeated.

        The lock is released even if an error is raised. Does nothing in a forked child, which has no thread.
        """
        if self._closed or self._process != os.getpid():
            return
        try:
            if not self._closing:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            try:
                last, self._last = self._last, None
                if last is not None:
                    self._spool.drop(last.folder)
                if self._n_unretained:
                    self._retain()
                self._spool.close()
            finally:
                try:
                    self._writer.close()
                    self._closed = True
                except Exception as error:  # the upload queue keeps the frame
                    if last is not None:
                        self.failures.setdefault(last.step, str(error))
                    raise

    def close_quietly(self) -> None:
        """Close without raising; saves that could not be archived stay in the spool."""
        try:
            self.close()
        except Exception as error:  # at interpreter exit nothing could catch it
            _logger.warning("a save is not archived yet and waits in the spool: %s", error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (bool(self._waiting) and self._error is None))
                if self._closing:
                    return
                save = self._waiting[0]
            refused = self._try(save)
            with self._changed:
                if refused is None:
                    self._waiting.popleft()
                self._error = refused
                self._changed.notify_all()

    def _try(self, save: SpooledSave) -> BaseException | None:
        """Archive a save, or quarantine it; return the error that stops the thread, if any."""
        try:
            self._archive(save)
        except BaseException as error:  # raised again in the caller's thread
            self._chain = None
            # It may already be in the archive; a second try must not append it again.
            self._recovered.add(save.folder)
            if save.step not in self.failures:
                _logger.warning("step %s is not archived, and training continues: %s", save.step, error)
            self.failures[save.step] = str(error)
            if self._n_in_a_row >= MAX_QUARANTINED or not self._is_at_fault(save, error):
                return error
            try:
                self._quarantine(save, error)
            except InshrinkError as refusal:
                return refusal
        else:
            self._n_in_a_row = 0
            self.failures.pop(save.step, None)
        return None

    def _quarantine(self, save: SpooledSave, error: BaseException) -> None:
        with self._changed:
            # The record first: if the process ends here, the next one finds both with the same parent.
            self._detached = save.parent or self._detached
            if len(self._waiting) > 1:
                self._waiting[1] = self._successor(self._waiting[1])
        quarantined = self._spool.quarantine(save.folder, error)
        self._unreported += [] if save.folder in self._earlier else [quarantined]
        self._n_in_a_row += 1

    def _is_at_fault(self, save: SpooledSave, error: BaseException) -> bool:
        """Tell whether an error is the save's fault, and neither the disk's nor the archive's."""
        if not isinstance(error, Exception) or isinstance(error, (*_NO_FAULT, torch.OutOfMemoryError)):
            return False
        if not is_archive(self._writer.reader.path):  # the archive was moved
            return False
        return not isinstance(error, DamagedError) or not self._spool.is_complete(save)

    def require_archived(self) -> None:
        """Raise once for saves of this process that were quarantined.

        Raises
        ------
        InputError
            Some were, since the last call.
        """
        news, self._unreported = self._unreported, []
        if news:
            raise InputError(
                f"{len(news)} saves could not be archived and were quarantined; "
                f"step {news[0].step}: {news[0].why}",
                where=str(news[0].folder),
                remedy="take from their files what you need, and remove the folders",
            )

    def _archive(self, save: SpooledSave) -> None:
        """Append one save as a frame, and drop the one before it."""
        self._spool.settle(save)
        checkpoint = self._spool.read(save)
        known = self._find(save) if save.folder in self._recovered else None
        if known is not None:
            self._chain = self._chain_from(known, save)
        else:
            if self._chain is None or save.parent is not None:
                self._chain = self._chain_from(self._parent_of(save), save)
            metrics = save.metrics.items()
            self._chain.metrics = {name: math.nan if value is None else value for name, value in metrics}
            if self._step_writer is None:
                self._chain.append(checkpoint)
            else:
                self._step_writer.append(self._chain, checkpoint)
        self._spool.mark(save)
        # The next delta reads its files again: exact tensors are not kept in memory.
        if self._last is not None:
            self._spool.drop(self._last.folder)
        self._last = save
        self._n_unretained += self._retention is not None
        if self._n_unretained >= RETAIN_EVERY:
            self._retain()

    def _retain(self) -> None:
        """Apply the retention policy; a failure does not stop saves."""
        self._n_unretained, policy = 0, self._retention
        if policy is None:
            return
        with self._changed:
            awaited = {frame for s in self._waiting for frame in (s.parent, s.restored, self._detached)}
        rules = PruneRules(**vars(policy))
        try:
            bases = BaseFinder(self._writer.reader.path, self._base, open_base_at)
            plan = carry_out(self._writer, rules, bases=bases, needed=awaited)
        except (InshrinkError, OSError) as error:
            _logger.warning("the archive is not pruned, and saves go on: %s", error)
            return
        if plan.changes:
            self._chain = None

    def _parent_of(self, save: SpooledSave) -> FrameInfo | None:
        """Return the frame a save continues from."""
        reader = self._writer.reader
        parent = reader.head if save.parent is None else reader.info(save.parent)
        if parent is not None and parent.step >= save.step:
            raise StepConflictError(
                f"the archive was written meanwhile: step {save.step} does not follow its step {parent.step}",
                where=str(reader.path),
            )
        return parent

    def _chain_from(self, parent: FrameInfo | None, save: SpooledSave) -> ChainWriter:
        """Return a writer that continues from a frame, on a new branch if other frames follow it."""
        restored = None if save.restored is None else self._writer.reader.info(save.restored)
        return ChainWriter(self._writer, self._config, parent=parent, restored=restored, base=self._base)

    def _find(self, save: SpooledSave) -> FrameInfo | None:
        """Return the frame of a save that was archived but not marked before the process died."""
        reader = self._writer.reader
        view = stored_view(self._spool.read(save), self._config.optimizer)
        for frame in reversed(reader.frames):
            if frame.step != save.step or save.parent not in (None, frame.parent_id):
                continue
            if holds_content(reader.frame(frame.frame_id), view):
                return frame
        return None
