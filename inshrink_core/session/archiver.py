"""The background thread of a saver: spooled saves become frames, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from inshrink_core.archive import ArchiveReader, ArchiveWriter
from inshrink_core.chain import ChainConfig, ChainWriter, content_digest, stored_view
from inshrink_core.frame import FrameInfo
from inshrink_core.session.spool import Spool, SpooledSave
from inshrink_core.session.step_writer import AsConfigured, StepWriter

__all__ = ["Archiver"]

MAX_PENDING: Final = 2
"""Saves that may wait: one being encoded and one behind it; a third would only hide that saves come
faster than they can be archived."""

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

    Notes
    -----
    An error stops the thread until it is raised to the caller, by the next `submit`, `flush` or
    `close`; then the thread tries again. The save it concerns stays in the spool.
    """

    def __init__(
        self,
        writer: ArchiveWriter,
        config: ChainConfig,
        spool: Spool,
        recovered: Iterable[SpooledSave],
        step_writer: StepWriter | None = None,
    ) -> None:
        self._writer, self._config, self._spool = writer, config, spool
        self._step_writer = step_writer if step_writer is not None else AsConfigured()
        self._waiting = deque(recovered)
        self._recovered = {save.folder for save in self._waiting}
        """Saves that may be in the archive already."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._chain: ChainWriter | None = None
        self._last: SpooledSave | None = None
        self._thread = threading.Thread(target=self._work, name="inshrink-saver", daemon=True)
        self._thread.start()

    @property
    def reader(self) -> ArchiveReader:
        """The archive's frames. To be used after `flush` alone."""
        return self._writer.reader

    @property
    def n_pending(self) -> int:
        """Number of saves that are not archived yet."""
        return len(self._waiting)

    def wait_for_room(self) -> None:
        """Return when another save may be submitted."""
        self._wait(MAX_PENDING - 1)

    def submit(self, save: SpooledSave) -> None:
        """Add a save behind the others."""
        with self._changed:
            self._waiting.append(save)
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when the archive holds every save."""
        self._wait(0)

    def _wait(self, n_pending: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._waiting) <= n_pending)
            error, self._error = self._error, None
            self._changed.notify_all()
        if error is not None:
            raise error

    def close(self) -> None:
        """Archive what is pending, end the thread and release the archive; harmless when repeated.

        The lock is released even where an error is raised.
        """
        if self._closing:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            try:
                if self._last is not None:
                    self._spool.drop(self._last.folder)
                self._spool.close()
            finally:
                self._writer.close()

    def close_quietly(self) -> None:
        """Close where no one is left to raise to: what could not be archived stays in the spool."""
        try:
            self.close()
        except Exception as error:  # whatever it is, at the interpreter's end there is no one to catch it
            _logger.warning("a save is not archived yet and waits in the spool: %s", error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (bool(self._waiting) and self._error is None))
                if self._closing:
                    return
                save = self._waiting[0]
            try:
                self._archive(save)
            except BaseException as error:  # raised again in the caller's thread
                with self._changed:
                    # It may be in the archive by now; tried again, it must not be appended twice.
                    self._recovered.add(save.folder)
                    self._chain, self._error = None, error
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._waiting.popleft()
                    self._changed.notify_all()

    def _archive(self, save: SpooledSave) -> None:
        """Make one save a frame, and drop the one before it."""
        checkpoint = self._spool.read(save)
        known = self._find(save) if save.folder in self._recovered else None
        if known is not None:
            self._chain = self._chain_from(known, save)
        else:
            if self._chain is None or save.first:
                self._chain = self._chain_from(self._parent_of(save), save)
            self._step_writer.append(self._chain, checkpoint)
        self._spool.mark(save)
        # Its files are read again for the next delta: what is stored exactly is not held in memory.
        if self._last is not None:
            self._spool.drop(self._last.folder)
        self._last = save

    def _parent_of(self, save: SpooledSave) -> FrameInfo | None:
        """Return the frame a save continues from."""
        if save.first and save.restored is not None:
            return self._writer.reader.info(save.restored)
        return self._writer.reader.head

    def _chain_from(self, parent: FrameInfo | None, save: SpooledSave) -> ChainWriter:
        """Return a writer that continues from a frame, on a new branch where frames follow it already."""
        reader = self._writer.reader
        branch = None
        if parent is not None and parent != reader.listed_head:
            branch = reader.next_branch
        restored = None if save.restored is None else reader.info(save.restored)
        return ChainWriter(self._writer, self._config, parent=parent, branch=branch, restored=restored)

    def _find(self, save: SpooledSave) -> FrameInfo | None:
        """Return the frame that holds a save already: the process died before it could note so."""
        reader = self._writer.reader
        view = stored_view(self._spool.read(save), self._config.optimizer)
        digest = content_digest(view)
        for frame in reversed(reader.frames):
            if frame.step != save.step or (save.first and frame.parent_id != save.restored):
                continue
            if reader.frame(frame.frame_id).meta.get("content") == digest:
                return frame
        return None
