"""Finished trainings on disk, so that a rehearsal goes on where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import StorageError
from inshrink_core.rehearse.report import TrainingResult

__all__ = ["ResultStore"]

_MAX_NBYTES: Final = 1 << 24
"""A result is a few numbers a save; one of 16 MB is something else."""

_logger = logging.getLogger(__name__)


class ResultStore:
    """Results by what they are the result of.

    Parameters
    ----------
    folder
        Made when the first result is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, kind: str, key: Mapping[str, Any]) -> str:
        """Return the file name, without suffix, of a result.

        Parameters
        ----------
        kind
            ``uninterrupted`` or ``restored``.
        key
            Everything the result depends on, as JSON values.
        """
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return f"{kind}-seed{key['seed']}-{digest}"

    def load(self, kind: str, key: Mapping[str, Any]) -> TrainingResult | None:
        """Return a result; None where there is none, or none that can be read."""
        path = self.folder / f"{self.name_of(kind, key)}.json"
        try:
            if path.stat().st_size > _MAX_NBYTES:
                return None
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["key"] != json.loads(json.dumps(key)):
                return None
            return _parse(document["result"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _logger.warning("%s is no result (%s): it is trained again", path, error)
            return None

    def keep(self, kind: str, key: Mapping[str, Any], result: TrainingResult) -> None:
        """Write a result: whole, or not at all.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        path = self.folder / f"{self.name_of(kind, key)}.json"
        temporary = path.with_name(f".{path.name}.tmp")
        document = {"key": key, "result": dataclasses.asdict(result)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise StorageError(f"the result cannot be kept: {error.strerror}", where=str(path)) from error


def _parse(values: Mapping[str, Any]) -> TrainingResult:
    """Return a result from its JSON; raises ValueError, TypeError or KeyError where it is none."""
    result = TrainingResult(
        seed=int(values["seed"]),
        steps=tuple(int(step) for step in values["steps"]),
        metrics=tuple(float(value) for value in values["metrics"]),
        train_losses=tuple(float(value) for value in values["train_losses"]),
        seconds=float(values["seconds"]),
        save_seconds=float(values["save_seconds"]),
        raw_weights=int(values["raw_weights"]),
        weights_nbytes=int(values["weights_nbytes"]),
        raw_total=int(values["raw_total"]),
        nbytes=int(values["nbytes"]),
    )
    if not result.steps or not len(result.steps) == len(result.metrics) == len(result.train_losses):
        raise ValueError("its curves differ in length")
    return result
