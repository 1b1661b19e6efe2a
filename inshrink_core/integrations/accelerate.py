"""Accelerate: its saved state is archived, and loaded from the archive."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.archive.storage.registry import local_beside
from inshrink_core.chain import Archive
from inshrink_core.chain.restoring import restore_folder
from inshrink_core.integrations.ranks import FirstRankSaver, is_first_rank, step_to_restore
from inshrink_core.integrations.versions import require
from inshrink_core.training.recorded import record_of
from inshrink_core.training.saver import Saver

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratorSaver"]


class AcceleratorSaver(FirstRankSaver):
    """Saves the state of an Accelerator into an archive, and loads it from there.

    Parameters
    ----------
    accelerator
        The training's accelerator.
    archive
        The archive, created if needed; locked from the first save or load until `close`.
    **options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or accelerate is too old.
    MissingExtraError
        Accelerate is not installed.

    Notes
    -----
    Every rank makes one and calls its methods; the first rank archives. All ranks must share the archive's
    file system.
    """

    def __init__(self, accelerator: Accelerator, archive: str | os.PathLike[str], **options: Any) -> None:
        require("accelerate", extra="hf", oldest="1.0", tested="1.15")
        self._accelerator = accelerator
        self._archive_to(archive, options)

    def save_state(self, step: int, *, metrics: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Save the state of all prepared objects.

        Parameters
        ----------
        step
            The training step; greater than that of the last save.
        metrics
            Metrics of the step, by name, for the `keep_best` of a policy.
        **options
            For `Accelerator.save_state`.

        Notes
        -----
        Accelerate writes its files beside the archive, or where its own naming puts them; they are archived
        during training. Raises nothing: see `failures`.
        """
        written = folder = self._folder(f"saving-{step}")
        failed: Exception | None = None
        try:
            written = Path(self._accelerator.save_state(str(folder), **options))
        except Exception as error:  # a full disk must not stop the training
            failed = error
        self._accelerator.wait_for_everyone()

        def save(saver: Saver) -> None:
            if failed is not None:
                raise failed
            saver.save_folder(written, step, parameters=self._parameters(), metrics=metrics)

        self._attempt(step, save)
        if written == folder and is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)

    def _parameters(self) -> bytes | None:
        """Return the names of the optimizers' parameters, if there is only one model."""
        models, optimizers = self._accelerator._models, self._accelerator._optimizers
        return record_of(models[0], optimizers) if len(models) == 1 else None

    def load_state(self, step: int | None = None, **options: Any) -> int | None:
        """Load the state of an archived step into all prepared objects.

        Parameters
        ----------
        step
            The step; by default the last one.
        **options
            For `Accelerator.load_state`.

        Returns
        -------
        int or None
            The step; None if the archive is empty, and nothing changed.

        Raises
        ------
        NotFoundError, MissingFrameError
            The archive has no such step, or its file is missing.
        """
        saver = self._reopen()
        self._settle()
        self._accelerator.wait_for_everyone()
        found = step_to_restore(self.path, step)
        if found is None:
            return None
        opened, info = found
        with self._restored(opened, info.step) as folder:
            self._accelerator.load_state(str(folder), **options)
            if saver is not None:
                saver.resume(info.step, folder)
        return info.step

    @contextlib.contextmanager
    def _restored(self, archive: Archive, step: int) -> Iterator[Path]:
        """Yield a restored folder, written by the first rank, to all ranks."""
        folder = self._folder(f"loading-{step}")
        try:
            if self._saver is not None:
                shutil.rmtree(folder, ignore_errors=True)
                restore_folder(archive, folder, step)
        finally:
            self._accelerator.wait_for_everyone()
        try:
            yield folder
        finally:
            self._accelerator.wait_for_everyone()
            if self._saver is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, suffix: str) -> Path:
        beside = local_beside(self.path, f".{suffix}.tmp")
        return beside.with_name(f".{beside.name}")
