"""MLflow: figures of each save as metrics of a run, and a reference to the archive."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from inshrink_core.errors import InputError
from inshrink_core.integrations.trackers import PREFIX, ArchiveTracker
from inshrink_core.integrations.versions import require

__all__ = ["MlflowTracker"]


class MlflowTracker(ArchiveTracker):
    """Logs the figures of an archive to an MLflow run.

    Parameters
    ----------
    archive
        The archive, which need not exist yet.
    run_id
        The run; by default the active one.

    Raises
    ------
    MissingExtraError
        MLflow is not installed; ``mlflow-skinny`` is enough.
    InputError
        It is too old, or there is no active run.

    Notes
    -----
    Figures are metrics over the training step. The reference is the tag ``inshrink.archive``, and an artifact
    ``inshrink/archive.json`` of a few hundred bytes.

    Examples
    --------
    >>> with mlflow.start_run(), MlflowTracker("a.inshrink") as tracker:  # doctest: +SKIP
    ...     tracker.update()
    """

    def __init__(self, archive: str | os.PathLike[str], run_id: str | None = None) -> None:
        mlflow = require("mlflow", extra="mlflow", oldest="2.10", tested="3.17")
        super().__init__(archive)
        self._client = mlflow.MlflowClient()
        run = mlflow.active_run()
        if not run_id and run is None:
            raise InputError("there is no active run of MLflow", remedy="mlflow.start_run(), or give run_id=")
        self._run_id = run_id or str(run.info.run_id)

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _refer(self, about: Mapping[str, Any]) -> None:
        self._client.set_tag(self._run_id, f"{PREFIX}.archive", about["uri"])
        self._client.log_dict(self._run_id, dict(about), f"{PREFIX}/archive.json")
