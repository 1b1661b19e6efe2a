"""Hugging Face's Trainer: a callback archives its checkpoints, and it resumes from archived ones."""

from __future__ import annotations

import logging
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.chain.restoring import restore_folder
from inshrink_core.formats.matching.registered import saved_names
from inshrink_core.integrations.ranks import FirstRankSaver, barrier, step_to_restore
from inshrink_core.integrations.versions import require
from inshrink_core.training.recorded import record_of
from inshrink_core.training.saver import Saver

require("transformers", extra="hf", oldest="4.50", tested="5.23")

from transformers import TrainerCallback  # noqa: E402 - checked above

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from inshrink_core.training.check import Check

__all__ = ["InshrinkCallback", "restore_checkpoint"]

_logger = logging.getLogger(__name__)

_FOLDER: Final = re.compile(r"checkpoint-(\d{1,18})")
_UNFINISHED: Final = "checkpoint-is-incomplete.txt"
"""The Trainer's marker file in an incomplete folder."""

_CLOCK_SECONDS: Final = 2.0
"""Resolution of file times on FAT."""


class InshrinkCallback(FirstRankSaver, TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Archives every checkpoint that a Trainer saves.

    Parameters
    ----------
    archive
        The archive, created if needed; locked during the training.
    check
        ``check(model)``, as for `Saver`: every save is evaluated during training and meets
        `max_restore_cost`. If only `max_restore_cost` is given, the loss on the Trainer's first evaluation
        batch; saves are then checked from the first evaluation on.
    max_restore_cost
        Bound of the restore cost of every save, the expected relative rise of the loss; with `check` .3 %
        by default.
    **options
        As for `inshrink_core.Saver`: `codec`, `config`, `optimizer_state`, `keyframe_every`,
        `device`, `threads`, `base`, `retention`.

    Raises
    ------
    LockedError
        Another process is writing the archive.
    InputError
        An option is invalid, or transformers is too old.
    StepConflictError
        At the start of training: the archive has later steps, but not the one that training starts from.

    Notes
    -----
    All ranks meet at a barrier after each save, and the first one archives, so all must write to one file
    system. A checkpoint that SIGTERM made the Trainer save (`enable_jit_checkpoint`) is archived when the
    training ends. A failed save never stops the training (`failures`). A save that cannot be checked is
    stored exactly; a check that does not work is logged and omitted.
    """

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        check: Check | None = None,
        max_restore_cost: float | None = None,
        **options: Any,
    ) -> None:
        self._begun = time.time()
        self._check, self._max_restore_cost = check, max_restore_cost
        self._to_be_checked = check is not None or max_restore_cost is not None
        self._archive_to(archive, options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Continue from the frame that the training resumes from."""
        self._begun = time.time()
        saver = self._reopen()
        if saver is not None:
            saver.resume(state.global_step, _folder_of(args, state.global_step))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Archive the checkpoint."""
        barrier()
        step, model, optimizer = state.global_step, parts.get("model"), parts.get("optimizer")

        def save(saver: Saver) -> None:
            if self._to_be_checked and model is not None:
                self._begin_checks(saver, model, parts.get("eval_dataloader"))
            known = model is not None and hasattr(optimizer, "param_groups")
            parameters = record_of(model, [optimizer], saved_names(model)) if known else None
            saver.save_folder(_folder_of(args, step), step, parameters=parameters)

        self._attempt(step, save)

    def _begin_checks(self, saver: Saver, model: nn.Module, batches: Any) -> None:
        """Check this save and later ones, once there is a check or an evaluation batch."""
        if self._check is None and batches is None:
            return
        self._to_be_checked = False
        try:
            check = self._check if self._check is not None else _loss_on(next(iter(batches)))
            saver.check_with(model, check, self._max_restore_cost)
        except Exception as error:  # no error stops the training
            _logger.warning("saves are not checked: %s", error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Archive checkpoints that were saved without a call, wait, and release the archive."""
        barrier()
        if self._saver is not None:
            for step, folder in _unreported(Path(str(args.output_dir)), state.global_step, self._begun):
                if step > (self._saver.last_step or -1):
                    self._attempt(step, partial(Saver.save_folder, path=folder, step=step))
        self.close()


def restore_checkpoint(
    archive: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    step: int | None = None,
    *,
    device: str = "auto",
) -> str | None:
    """Write an archived step where a Trainer resumes from.

    Parameters
    ----------
    archive
        The archive.
    output_dir
        As in the training's arguments. The Trainer reads from the folder during training.
    step
        The step; by default the last one.
    device
        Where tensors are decoded; does not change the files.

    Returns
    -------
    str or None
        The folder, for ``train(resume_from_checkpoint=…)``; None without a step if there is no archive.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive has no such step, or its file is missing.
    ExistsError
        The folder exists and has other content.

    Notes
    -----
    If the Trainer's folder of that step still exists, training resumes from it, bit for bit. Every rank may
    call this.
    """
    found = step_to_restore(archive, step)
    if found is None:
        return None
    opened, info = found
    folder = Path(output_dir) / f"checkpoint-{info.step}"
    restore_folder(opened, folder, info.step, device=device)
    return str(folder)


def _loss_on(batch: Any) -> Check:
    """Return a check of the model's loss on a batch, with its predictions."""

    def loss(model: nn.Module) -> Any:
        device = next(model.parameters()).device
        found = model(**{name: value.to(device) for name, value in batch.items()})
        logits = getattr(found, "logits", None)
        if logits is None or logits.dim() < 2:
            return found.loss
        return {"loss": found.loss, "log_probs": logits.float().log_softmax(-1).flatten(0, -2)}

    return loss


def _folder_of(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{step}"


def _unreported(output_dir: Path, last: int, since: float) -> list[tuple[int, Path]]:
    """Return complete checkpoints written since the training began, in order."""
    found = []
    for folder in output_dir.iterdir() if output_dir.is_dir() else ():
        named = _FOLDER.fullmatch(folder.name)
        complete = (folder / "trainer_state.json").is_file() and not (folder / _UNFINISHED).exists()
        if named and int(named[1]) <= last and complete and folder.stat().st_mtime >= since - _CLOCK_SECONDS:
            found.append((int(named[1]), folder))
    return sorted(found)
