"""Lightning's sharded strategies: their checkpoint folders are archived, and training resumes from one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inshrink_core.errors import InputError
from inshrink_core.formats.distributed import METADATA
from inshrink_core.integrations.ranks import FirstRankSaver
from inshrink_core.integrations.versions import require
from inshrink_core.training.saver import Saver

require("lightning", extra="lightning", oldest="2.5", tested="2.6")

from lightning.pytorch.strategies import (  # noqa: E402 - checked above
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

__all__ = ["InshrinkFSDPStrategy", "InshrinkModelParallelStrategy"]


class _ShardsArchived(FirstRankSaver, ParallelStrategy):  # type: ignore[misc,unused-ignore]
    """Archives the checkpoint folders of a strategy."""

    _SHARDED: tuple[str, Any]
    """The strategy's option for saving shards, and its value."""

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        archive_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name, sharded = self._SHARDED
        if options.setdefault(name, sharded) != sharded:
            raise InputError(
                f"with this {name} a checkpoint is one file",
                expected=repr(sharded),
                found=repr(options[name]),
                remedy="use Lightning's strategy with the plug-in InshrinkCheckpointIO",
            )
        super().__init__(**options)
        self._archive_to(archive, archive_options or {})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint as the strategy does, and archive it.

        Parameters
        ----------
        checkpoint
            The content, from Lightning.
        filepath
            The folder.
        storage_options
            Passed to the strategy, which refuses them.
        """
        step = checkpoint.get("global_step", -1)
        path = Path(self.broadcast(filepath))
        if self.is_global_zero and (path / METADATA).is_file():
            # Its files may be linked into the spool and must not be written again in place.
            shutil.rmtree(path)
        self.barrier()
        super().save_checkpoint(checkpoint, path, storage_options)
        self.barrier()

        def save(saver: Saver) -> None:
            if step != saver.last_step:
                saver.save_folder(path, step)

        self._attempt(step, save)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Load a checkpoint as the strategy does; a training continues from its frame.

        Parameters
        ----------
        checkpoint_path
            The folder, saved by Lightning or written by `restore_checkpoint`.
        **options
            As for the strategy.

        Raises
        ------
        StepConflictError
            The archive has later steps, but not the one that training continues from.
        """
        path = Path(self.broadcast(checkpoint_path))
        loaded: dict[str, Any] = super().load_checkpoint(path, **options)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            saver = self._reopen()
            if saver is not None:
                saver.resume(loaded["global_step"], path)
        return loaded

    def teardown(self) -> None:
        """End the strategy; archive pending saves and release the archive."""
        super().teardown()
        self.close()


class InshrinkModelParallelStrategy(_ShardsArchived, ModelParallelStrategy):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint of a training with FSDP2 or tensor parallelism.

    Parameters
    ----------
    archive
        The archive, created if needed; locked from the first save until the training ends.
    archive_options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`.
    **options
        As for Lightning's ``ModelParallelStrategy``.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or lightning is too old.

    Notes
    -----
    Each rank writes its shards; the first one links the finished folder into the archive's spool, so all
    ranks must share a file system. Lightning may remove the folder; the frame stays. Errors never stop the
    training (`failures`).
    """

    _SHARDED = ("save_distributed_checkpoint", True)


class InshrinkFSDPStrategy(_ShardsArchived, FSDPStrategy):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint of a training with FSDP, whose state is saved sharded.

    Parameters
    ----------
    archive, archive_options
        As for `InshrinkModelParallelStrategy`.
    **options
        As for Lightning's ``FSDPStrategy``.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or lightning is too old.
    """

    _SHARDED = ("state_dict_type", "sharded")
