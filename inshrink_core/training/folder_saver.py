"""Checkpoints that another program writes, archived while it trains; and written back for it to go on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.restoring import read_lineage
from inshrink_core.errors import StepConflictError, StorageError
from inshrink_core.frame import FrameInfo
from inshrink_core.retention import Retention, metrics_of
from inshrink_core.training.archiver import MAX_PENDING
from inshrink_core.training.closing import Forgiving, Holding, opened_base
from inshrink_core.training.spool import Notes, SpooledSave

if TYPE_CHECKING:
    import os

    from torch import nn

    from inshrink_core.chain import BaseLike
    from inshrink_core.codec import AnyCodec
    from inshrink_core.training.check import Check, CheckedWriter

__all__ = ["FolderSaver"]

_logger = logging.getLogger(__name__)


class FolderSaver(Holding, Forgiving):
    """Archives checkpoints that a trainer has written, and never stops its training.

    Parameters
    ----------
    archive
        The archive to make or to go on with. Locked against other writers until `close`.
    codec, config, optimizer_state, keyframe_every, device, threads, base, retention
        As for `Saver`.

    Attributes
    ----------
    path
        The archive: its path, or its URL.
    last_step
        The step of the last save, or the archive's last; None where there is none.

    Raises
    ------
    LockedError
        Another process is writing the archive, or a saver of this one that is in use (as for `Saver`).
    InputError
        An argument is wrong.

    Notes
    -----
    `save` makes hard links to the files and returns; a background thread syncs them, archives them and
    removes the links. A save outlives the process at once, and a power loss when the thread has synced it.
    Two saves may wait; before a third, `save` blocks.

    What goes wrong later is logged for each save and counted in `failures`. A save that finds the disk full
    waits in the spool and is tried again with the next one. One that cannot be archived at all is set aside
    (`set_aside`), and from the fourth in a row on given up, so that the disk does not fill.

    Examples
    --------
    >>> import pathlib, tempfile, torch
    >>> from inshrink_core.training import FolderSaver
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> (folder / "checkpoint-1").mkdir()
    >>> torch.save({"weight": torch.ones(64, 64)}, folder / "checkpoint-1" / "pytorch_model.bin")
    >>> with FolderSaver(folder / "run.inshrink") as saver:
    ...     saver.save(folder / "checkpoint-1", 1)
    >>> saver.failures
    {}
    """

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        codec: str | None = None,
        config: Mapping[str, Any] | AnyCodec | None = None,
        optimizer_state: str | None = None,
        keyframe_every: int = 32,
        device: str = "auto",
        threads: int | None = None,
        base: BaseLike | None = None,
        retention: Retention | None = None,
    ) -> None:
        self.path = place_of(archive)
        self._failures: dict[int, str] = {}
        self._spooled: set[int] = set()
        self._checked: CheckedWriter | None = None
        made = make_chain_config(
            self.path, codec, config, optimizer_state, keyframe_every, device, threads or 1
        )
        self._config = made
        self._retention = retention
        self._begin(
            made,
            opened_base(base, made),
            on_failure=self._on_failure,
            retention=retention,
        )

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step."""
        return self._failures

    @property
    def n_pending(self) -> int:
        """Number of saves that are not archived yet."""
        return self._archiver.n_pending

    @property
    def check_failures(self) -> Mapping[int, str]:
        """Why saves could not be checked, by step: they are stored exactly."""
        return {} if self._checked is None else dict(self._checked.failures)

    def check_with(self, model: nn.Module, check: Check, max_restore_cost: float | None = None) -> None:
        """Check every save from now on, and bound what a restore of it costs.

        Parameters
        ----------
        model
            The model that trains; a copy of it is judged, beside the training.
        check, max_restore_cost
            As for `Saver`.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        EvaluatorError
            The model cannot be copied, or the check is of no use.
        """
        from inshrink_core.training.check import CheckedWriter

        resumed = self.last_step is not None
        checked = CheckedWriter.beside(model, check, self._config, max_restore_cost, resumed=resumed)
        self._drain()
        self._archiver.write_with(checked)
        self._checked = checked

    def resume(self, step: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Say where training goes on, before the first save: the next frame continues from there.

        Parameters
        ----------
        step
            The step that training has reached; 0 for one that begins.
        folder
            The checkpoint that was loaded. Where it was restored from this archive, the codec gets the
            values that training continues from.

        Raises
        ------
        StepConflictError
            The archive holds later steps, and not this one.
        MissingFrameError
            The frame to go on from is missing.
        LockedError
            A later saver of this process has taken over.
        """
        self._use()
        self._drain()
        reader = self._archiver.reader
        lineage = None if folder is None else read_lineage(Path(folder))
        known = {frame.frame_id: frame for frame in reader.frames}
        if lineage is not None and lineage.archive_id == reader.archive_id and lineage.frame_id in known:
            self.resume_from(known[lineage.frame_id])
            return
        if self.last_step is None or (self.last_step <= step and step > 0):
            return
        frames = [frame for frame in reader.frames if frame.step == step and not frame.is_named]
        if not frames:
            raise StepConflictError(
                f"the archive holds step {self.last_step} already, and training begins after step {step}",
                where=str(self.path),
                remedy="go on from a step that is archived, or give another archive",
            )
        newest = max(frames, key=lambda frame: frame.generation)
        self._restored, self._parent, self.last_step = None, newest.frame_id, step

    def resume_from(self, frame: FrameInfo) -> None:
        """Say that training goes on from the values of a frame: the next save continues from it."""
        self._restored = self._parent = frame.frame_id
        self.last_step = frame.step

    def save(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        parameters: bytes | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Archive a finished checkpoint, a folder or a file.

        Parameters
        ----------
        path
            The checkpoint. It may be deleted when this returns; it must not be written again in place.
        step
            Its training step; greater than that of the last save.
        parameters
            Names of the optimizers' parameters (`inshrink_core.training.recorded.record_of`), where the
            training knows them: else whose the optimizer's state is follows from its order alone.
        metrics
            What was measured at the step, by name: those that `retention` goes by are kept with it.

        Notes
        -----
        Raises nothing: see `failures`. Costs a link a file: 0.3 ms for a folder of Hugging Face's trainer.
        """
        source = Path(path)
        notes = Notes(metrics_of(self._retention, metrics))
        self._put(
            step,
            lambda **lineage: self._spool.link(step, source, parameters=parameters, notes=notes, **lineage),
        )

    def save_files(
        self, files: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> bool:
        """Archive a checkpoint of several files with what `torch.save` takes, by name.

        Parameters
        ----------
        files
            The content of each file; bytes are written as they are.
        step, metrics
            As for `save`.

        Returns
        -------
        bool
            Whether it was spooled.

        Notes
        -----
        Raises nothing: see `failures`. The save survives a power loss when this returns.
        """
        notes = Notes(metrics_of(self._retention, metrics))
        return self._put(
            step, lambda **lineage: self._spool.put(step, files, as_folder=True, notes=notes, **lineage)
        )

    def _put(self, step: int, spool: Callable[..., SpooledSave]) -> bool:
        """Spool a save by a function of its lineage, and have it archived; tell whether that went well."""
        try:
            self._use()
            self._require_next(step)
            self._wait_for_room()
            self._archiver.submit(spool(restored=self._restored, parent=self._parent))
        except Exception as error:  # training goes on, whatever it is
            self.note(step, error)
            return False
        self.last_step, self._parent = step, None
        self._spooled.add(step)
        return True

    def _wait_for_room(self) -> None:
        """Wait until another save may be spooled; after an error, let the thread try once more."""
        for _ in range(2):
            try:
                self._archiver.wait_for_room()
            except Exception:  # noted by the thread already
                continue
            return
        if self._archiver.n_pending >= MAX_PENDING:
            raise StorageError("earlier saves wait to be archived", where=str(self.path))

    def note(self, step: int, error: Exception) -> None:
        """Count a save as failed, and log it once."""
        if step not in self._failures:
            _logger.warning("step %s is not archived, and training goes on: %s", step, error)
        self._failures[step] = str(error)

    def _on_failure(self, save: SpooledSave, error: Exception) -> None:
        self._spooled.add(save.step)  # by an earlier process, maybe
        self.note(save.step, error)

    def _drain(self) -> None:
        """Wait until nothing is being archived; what the disk refuses waits on."""
        with contextlib.suppress(Exception):
            self._archiver.flush()

    def flush(self, *, strict: bool = False, remote: bool = False) -> None:
        """Return when the archive holds every save that it can hold.

        Parameters
        ----------
        strict
            Whether to raise where it does not hold all of them.
        remote
            Of an archive in a bucket, wait until the last frame is uploaded, too.

        Raises
        ------
        StorageError
            Saves are not in the archive, with `strict`, or not in the bucket, with `remote`.
        LockedError
            A later saver of this process has taken over.
        """
        self._use()
        self._drain()
        self._forgive()
        if strict:
            self._require_none()
        if remote:
            self._archiver.upload()

    def _forgive(self) -> None:
        """Forget failures of saves that came to be archived after all; note those that wait behind one."""
        for step in self._archiver.pending:
            if step not in self._failures:
                self.note(step, StorageError("it waits in the spool behind an earlier save"))
        archived = {frame.step for frame in self._archiver.reader.frames}
        # A frame of a step that was not spooled here is of another training.
        for step in archived & self._spooled & self._failures.keys():
            del self._failures[step]

    def _release(self) -> None:
        if self._finalizer.detach() is not None:
            self._drain()
            self._forgive()
            try:
                self._archiver.upload()
            except Exception as error:  # it waits on this machine
                self.note(self.last_step or 0, error)
        self._archiver.close_quietly()
        if self._checked is not None:
            self._checked.close()

    def _let_go(self) -> None:
        self._release()
