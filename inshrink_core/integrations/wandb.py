"""Weights & Biases: figures of each save beside the run's own, and a reference to the archive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inshrink_core.integrations.trackers import PREFIX, ArchiveTracker
from inshrink_core.integrations.versions import require

if TYPE_CHECKING:
    import wandb

__all__ = ["WandbTracker"]


class WandbTracker(ArchiveTracker):
    """Logs the figures of an archive to a run of Weights & Biases.

    Parameters
    ----------
    run
        The run that ``wandb.init`` returned, online or offline.
    archive
        The archive, which need not exist yet.

    Raises
    ------
    MissingExtraError
        Wandb is not installed.
    InputError
        It is too old.

    Notes
    -----
    Figures are logged over ``inshrink/step``, so that their order is independent of the run's steps. The
    archive becomes an artifact of type ``inshrink-archive`` with a reference and no bytes.

    Examples
    --------
    >>> with wandb.init() as run, inshrink_core.Saver("a.inshrink", model) as saver:  # doctest: +SKIP
    ...     with WandbTracker(run, saver.path) as tracker:
    ...         for step in range(1, 1001):
    ...             train(step)
    ...             if step % 100 == 0:
    ...                 with tracker.saving(step):
    ...                     saver.save(step)
    ...         saver.close()
    """

    def __init__(self, run: wandb.Run, archive: str | os.PathLike[str]) -> None:
        require("wandb", extra="wandb", oldest="0.17", tested="0.31")
        super().__init__(archive)
        self._run = run
        run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({f"{PREFIX}/step": step, **figures})

    def _refer(self, about: Mapping[str, Any]) -> None:
        import wandb

        name = f"{self._run.id}-{PREFIX}"
        artifact = wandb.Artifact(name, type=f"{PREFIX}-archive", metadata=dict(about))
        artifact.add_reference(about["uri"], name=about["name"], checksum=False)
        self._run.log_artifact(artifact)
