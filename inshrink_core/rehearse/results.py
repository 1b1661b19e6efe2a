"""Finished trainings on disk, so that a rehearsal goes on where it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inshrink_core.execution import keep_result, key_digest, load_result
from inshrink_core.rehearse.report import TrainingResult

__all__ = ["ResultStore", "parse_training"]


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
        return f"{kind}-seed{key['seed']}-{key_digest(key)}"

    def load(self, kind: str, key: Mapping[str, Any]) -> TrainingResult | None:
        """Return a result; None where there is none, or none that can be read."""
        return load_result(self._path(kind, key), key, "result", parse_training)

    def keep(self, kind: str, key: Mapping[str, Any], result: TrainingResult) -> None:
        """Write a result: whole, or not at all.

        Raises
        ------
        StorageError
            The disk is full, or refuses.
        """
        keep_result(self._path(kind, key), key, "result", dataclasses.asdict(result))

    def _path(self, kind: str, key: Mapping[str, Any]) -> Path:
        return self.folder / f"{self.name_of(kind, key)}.json"


def parse_training(values: Mapping[str, Any]) -> TrainingResult:
    """Return a result from its JSON.

    Raises
    ------
    ValueError, TypeError, KeyError
        It is none.
    """
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
        promise=_parse_promise(values.get("promise")),
    )
    if not result.steps or not len(result.steps) == len(result.metrics) == len(result.train_losses):
        raise ValueError("its curves differ in length")
    return result


def _parse_promise(values: Any) -> Mapping[str, Any] | None:
    """Return how saves keep their bounds; raises ValueError, TypeError or KeyError where it does not say."""
    if values is None:
        return None
    if not isinstance(values["bounds"], dict) or not isinstance(values["evaluations"], int):
        raise TypeError("what is promised has the wrong type")
    for frame in values["frames"]:
        for name in ("drop", "divergence"):
            if frame[name] is not None and not isinstance(frame[name], int | float):
                raise TypeError(f"the {name} of a save is no number")
    promise: Mapping[str, Any] = values
    return promise
