"""Spooled saves become frames of an archive, on a thread beside the training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from inshrink_core.archive import ArchiveReader, ArchiveWriter, is_archive
from inshrink_core.chain import ChainConfig, ChainWriter, FrameEncoder, holds_content, stored_view
from inshrink_core.chain.archive import open_base_at
from inshrink_core.chain.base import BaseFinder
from inshrink_core.chain.encoder import ChainState
from inshrink_core.chain.prune import PruneRules, carry_out
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorsInMemory, TensorSpec
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
from inshrink_core.search.bounded import AsConfigured, StepWriter
from inshrink_core.training.spool import SetAside, Spool, SpooledSave

if TYPE_CHECKING:
    from inshrink_core.chain import BaseModel


MAX_PENDING: Final = 2
"""Saves that may wait: one being encoded and one behind it; a third would only hide that saves come
faster than they can be archived."""

MAX_ASIDE: Final = 3
"""Saves that are set aside in a row."""

RETAIN_EVERY: Final = 8
"""Saves from one look at what may go to the next: what is re-keyed then is re-keyed once for all of them."""

_NO_FAULT: Final = (
    *(StorageError, OSError, MemoryError, TooLargeError),
    *(BaseModelError, LockedError, MissingExtraError),
)
"""Errors that say nothing against a save: tried again, it may be archived."""

_logger = logging.getLogger(__name__)


class Archiver:
    """Archives spooled saves on a thread of its own; holds the archive's lock until `close`.

    Parameters
    ----------
    writer
        The archive, open for writing; closed by `close`.
    config
        How frames are made.
    spool
        Where the saves lie.
    recovered
        Saves that an earlier process left; they come first.
    step_writer
        How each save is written; by default as `config` says.
    base
        The base model that the archive's first frame is encoded relative to.
    retention
        What stays of the archive; looked at every `RETAIN_EVERY` saves, and when it is closed.

    Attributes
    ----------
    failures
        Why saves are not in the archive, by step.

    Notes
    -----
    The rule of failure is that of `inshrink_core.Saver`. The thread stops where the disk or the archive
    refuses; `wait_for_room`, `flush` and `close` have it try again, and raise where that was in vain.
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
        self._unsaid: list[SetAside] = []
        self._n_in_a_row = 0
        self._orphaned: bytes | None = None
        """The frame that saves were to continue from that were set aside: the next one does."""
        self._process = os.getpid()
        self._step_writer = step_writer if step_writer is not None else AsConfigured()
        self._waiting = deque(recovered)
        self._earlier = frozenset(save.folder for save in self._waiting)
        self._recovered = set(self._earlier)
        """Saves that may be in the archive already."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = self._closed = False
        self._chain: ChainWriter | None = None
        self._last: SpooledSave | None = None
        self._thread = threading.Thread(target=self._work, name="inshrink-saver", daemon=True)
        self._thread.start()

    @property
    def reader(self) -> ArchiveReader:
        """The archive's frames. To be used after `flush` alone."""
        return self._writer.reader

    def write_with(self, step_writer: StepWriter) -> None:
        """Write saves in another way from the next one on; to be used after `flush` alone."""
        self._step_writer = step_writer

    @property
    def pending(self) -> tuple[int, ...]:
        """Steps of the saves that are not archived yet."""
        with self._changed:
            return tuple(save.step for save in self._waiting)

    def wait_for_room(self) -> None:
        """Return when another save may be submitted."""
        self._wait(MAX_PENDING - 1)

    def submit(self, save: SpooledSave) -> None:
        """Add a save behind the others."""
        with self._changed:
            self._waiting.append(self._successor(save))
            self._changed.notify_all()

    def _successor(self, save: SpooledSave) -> SpooledSave:
        """Return a save as it continues from where those would have that were set aside before it."""
        parent, self._orphaned = self._orphaned, None
        if parent is None or save.parent is not None:
            return save
        with contextlib.suppress(InshrinkError):  # then this process alone knows
            return self._spool.adopt(save, parent)
        return save._replace(parent=parent)

    def flush(self) -> None:
        """Return when the archive holds every save that was not set aside."""
        self._wait(0)

    def upload(self) -> None:
        """Return when the archive is where others read it; to be used after `flush` alone.

        Raises
        ------
        StorageError, ConflictError
            As of `ArchiveWriter.flush`.
        """
        self._writer.flush()

    def _wait(self, n_pending: int) -> None:
        if self._process != os.getpid():
            return
        with self._changed:
            self._error = None  # what was refused is tried again
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or len(self._waiting) <= n_pending)
            error: BaseException | None = self._error
            if error is not None and len(self._waiting) > n_pending:
                raise error

    def close(self) -> None:
        """Archive what is pending, end the thread and release the archive; harmless when repeated.

        The lock is released even where an error is raised. One that was interrupted can be repeated. In a
        forked child, which has no such thread, nothing happens.
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
                except Exception as error:  # it waits on this machine
                    if last is not None:
                        self.failures.setdefault(last.step, str(error))
                    raise

    def close_quietly(self) -> None:
        """Close without raising: what could not be archived stays in the spool."""
        try:
            self.close()
        except Exception as error:  # at the interpreter's end nothing could catch it
            _logger.warning("a save is not archived yet and waits in the spool: %s", error)

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # what is wrong shows with a save
            warm_up(self._config)
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
        """Archive a save, or set it aside; return what keeps the thread from going on."""
        try:
            self._archive(save)
        except BaseException as error:  # raised again in the caller's thread
            self._chain = None
            # It may be in the archive by now; tried again, it must not be appended twice.
            self._recovered.add(save.folder)
            if save.step not in self.failures:
                _logger.warning("step %s is not archived, and training goes on: %s", save.step, error)
            self.failures[save.step] = str(error)
            if self._n_in_a_row >= MAX_ASIDE or not self._is_at_fault(save, error):
                return error
            try:
                self._set_aside(save, error)
            except InshrinkError as refusal:
                return refusal
        else:
            self._n_in_a_row = 0
            self.failures.pop(save.step, None)
        return None

    def _set_aside(self, save: SpooledSave, error: BaseException) -> None:
        with self._changed:
            # The record first: ended in between, the next process finds both with the same parent.
            self._orphaned = save.parent or self._orphaned
            if len(self._waiting) > 1:
                self._waiting[1] = self._successor(self._waiting[1])
        aside = self._spool.set_aside(save.folder, error)
        self._unsaid += [] if save.folder in self._earlier else [aside]
        self._n_in_a_row += 1

    def _is_at_fault(self, save: SpooledSave, error: BaseException) -> bool:
        """Tell whether a save could not be archived because of what it is; not the disk, nor the archive."""
        import torch

        if not isinstance(error, Exception) or isinstance(error, (*_NO_FAULT, torch.OutOfMemoryError)):
            return False
        if not is_archive(self._writer.reader.path):  # somebody has moved it away
            return False
        return not isinstance(error, DamagedError) or not self._spool.is_whole(save)

    def require_archived(self) -> None:
        """Say once that saves were set aside, but for those of an earlier process, which stop no later one.

        Raises
        ------
        InputError
            Some were, since this was asked last.
        """
        news, self._unsaid = self._unsaid, []
        if news:
            raise InputError(
                f"{len(news)} saves could not be archived and were set aside; "
                f"step {news[0].step}: {news[0].why}",
                where=str(news[0].folder),
                remedy="take from their files what you need, and remove the folders",
            )

    def _archive(self, save: SpooledSave) -> None:
        """Make one save a frame, and drop the one before it."""
        self._spool.settle(save)
        checkpoint = self._spool.read(save)
        known = self._find(save) if save.folder in self._recovered else None
        if known is not None:
            self._chain = self._chain_from(known, save)
        else:
            if self._chain is None or save.parent is not None:
                self._chain = self._chain_from(self._parent_of(save), save)
            if save.budget is not None:
                self._chain.keep_within(checkpoint, save.budget)
            self._chain.metrics = save.metrics
            self._step_writer.append(self._chain, checkpoint)
        self._spool.mark(save)
        # Its files are read again for the next delta: what is stored exactly is not held in memory.
        if self._last is not None:
            self._spool.drop(self._last.folder)
        self._last = save
        self._n_unretained += self._retention is not None
        if self._n_unretained >= RETAIN_EVERY:
            self._retain()

    def _retain(self) -> None:
        """Prune the archive as the policy says; what keeps it from that keeps no save from being archived."""
        self._n_unretained, policy = 0, self._retention
        if policy is None:
            return
        with self._changed:
            awaited = {one for save in self._waiting for one in (save.parent, save.restored, self._orphaned)}
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
        """Return a writer that continues from a frame, on a new branch where frames follow it already."""
        restored = None if save.restored is None else self._writer.reader.info(save.restored)
        return ChainWriter(self._writer, self._config, parent=parent, restored=restored, base=self._base)

    def _find(self, save: SpooledSave) -> FrameInfo | None:
        """Return the frame that holds a save already: the process died before it could note so."""
        reader = self._writer.reader
        view = stored_view(self._spool.read(save), self._config.optimizer)
        for frame in reversed(reader.frames):
            if frame.step != save.step or save.parent not in (None, frame.parent_id):
                continue
            if holds_content(reader.frame(frame.frame_id), view):
                return frame
        return None


def warm_up(config: ChainConfig) -> None:
    """Encode something small twice, a keyframe and a delta, so that a first save does not pay for kernels.

    Parameters
    ----------
    config
        How saves will be made.

    Notes
    -----
    Takes about two seconds of processor time in a process that has encoded nothing, and milliseconds later.
    """
    import torch

    roles = (TensorRole.WEIGHT, TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ)
    specs = tuple(TensorSpec(name="w", role=role, dtype="float32", shape=(64, 64)) for role in roles)
    values = torch.linspace(0.01, 1, 64 * 64).reshape(64, 64)
    tensors = {spec.key: values for spec in specs}
    checkpoint = stored_view(
        Checkpoint(step=0, specs=specs, source=TensorsInMemory(tensors)), config.optimizer
    )
    state = ChainState()
    for _ in range(2):
        _, results = FrameEncoder(config).encode(checkpoint, state, checkpoint.specs)
        state = ChainState(references={result.spec.key: result.reference for result in results})
