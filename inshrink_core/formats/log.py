"""The metrics a training logged, from whatever file its framework wrote."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import DamagedError
from inshrink_core.formats.disk import MAX_JSON_BYTES, Access, is_dir, is_file

__all__ = ["TrainingLog", "read_log"]

_STEP_COLUMNS: Final = ("step", "global_step", "iter", "iteration")


class TrainingLog(Mapping[str, list[tuple[int, float]]]):
    """Metric to its (step, value) pairs in step order; NaN and infinities stand as they were logged.

    Parameters
    ----------
    series
        The pairs of each metric, in any order.
    origin
        The file, for the user to read; empty where the run has no log.
    """

    def __init__(self, series: Mapping[str, Iterable[tuple[int, float]]], origin: str = "") -> None:
        self._series = {name: sorted(pairs, key=lambda p: p[0]) for name, pairs in series.items()}
        self.origin = origin

    def __getitem__(self, metric: str) -> list[tuple[int, float]]:
        return self._series[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and not value.strip():
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _collect(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        step = next((s for c in _STEP_COLUMNS if (s := _number(row.get(c))) is not None), None)
        if step is None or not math.isfinite(step) or step < 0:
            continue
        for name, value in row.items():
            number = _number(value) if name not in _STEP_COLUMNS else None
            if number is not None and isinstance(name, str):
                series.setdefault(name, []).append((int(step), number))
    return series


def _from_trainer_state(path: Path, access: Access) -> dict[str, list[tuple[int, float]]]:
    state = access.read_json(path)
    history = state.get("log_history") if isinstance(state, dict) else None
    return _collect(row for row in history if isinstance(row, dict)) if isinstance(history, list) else {}


def _text(path: Path, access: Access) -> str:
    return access.read_text(path, MAX_JSON_BYTES).decode(errors="replace")


def _from_csv(path: Path, access: Access) -> dict[str, list[tuple[int, float]]]:
    lines = [line for line in _text(path, access).replace("\0", "").splitlines() if line]
    try:
        return _collect(csv.DictReader(lines))
    except csv.Error as error:
        raise DamagedError(f"no valid CSV ({error})", where=str(path)) from error


def _from_jsonl(path: Path, access: Access) -> dict[str, list[tuple[int, float]]]:
    rows = []
    for line in _text(path, access).splitlines():
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            # The last line of a run that is being written, or that was killed, is often cut off.
            continue
        if isinstance(row, dict):
            rows.append(row)
    return _collect(rows)


def read_log(directory: Path, checkpoints: Iterable[Path] = (), access: Access | None = None) -> TrainingLog:
    """Return the metrics of a run; empty where it logged none.

    Parameters
    ----------
    directory
        The run.
    checkpoints
        Its checkpoints, oldest first: the last one's ``trainer_state.json`` has the whole history.
    access
        Where links may lead; by default into the run. A log elsewhere is passed over.

    Raises
    ------
    DamagedError
        The log is too large or no JSON or CSV.
    """
    access = access or Access.of(directory)

    names = [("metrics.csv", _from_csv), ("metrics.jsonl", _from_jsonl)]
    folders = [path for path in reversed(list(checkpoints)) if is_dir(path)][:1]
    places = [
        (folder, access, [("trainer_state.json", _from_trainer_state), *names])
        for folder in (*folders, directory)
    ]
    if directory.name in ("checkpoints", "checkpoint"):
        # The log of ``run/checkpoints`` lies beside it: no link leads there, so it may be read.
        beside = directory.parent
        places.append((beside, replace(access, root=os.path.realpath(beside)), names))
    for folder, allowed, candidates in places:
        for name, read in candidates:
            path = folder / name
            if is_file(path) and allowed.admits(path):
                return TrainingLog(read(path, allowed), str(path))
    return TrainingLog({})
