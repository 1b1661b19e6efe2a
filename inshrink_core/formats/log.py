"""What lies beside the checkpoints of a run: the metrics it logged, and `inshrink.toml`."""

from __future__ import annotations

import csv
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import ConfigError, DamagedError
from inshrink_core.formats.disk import MAX_JSON_BYTES, Access, is_dir, is_file

__all__ = ["SETTINGS_NAME", "RunSettings", "TrainingLog", "read_log", "read_settings"]

SETTINGS_NAME: Final = "inshrink.toml"
_MAX_SETTINGS_BYTES: Final = 1 << 20
_DIRECTIONS: Final = ("lower", "higher")
_SETTINGS: Final = ("file", "function", "metric", "direction")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run's own evaluator and what it measures; None where the file says nothing.

    Parameters
    ----------
    file
        Python file of the evaluator, relative to the run. Naming it runs nothing: whoever executes it
        must have the user's word.
    function
        The function in it.
    metric
        The metric that counts.
    direction
        ``lower`` or ``higher``: which is better.
    """

    file: str | None = None
    function: str | None = None
    metric: str | None = None
    direction: str | None = None

    def __post_init__(self) -> None:
        for key in _SETTINGS:
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"evaluator.{key} must be text", found=type(value).__name__, expected="str")
        if self.direction is not None and self.direction not in _DIRECTIONS:
            raise ConfigError(
                "evaluator.direction is unknown", expected=" or ".join(_DIRECTIONS), found=self.direction[:40]
            )


def read_settings(directory: Path, access: Access | None = None) -> RunSettings:
    """Return the settings of a run; defaults where there is no file.

    Parameters
    ----------
    directory
        The run.
    access
        Where links may lead; by default into the directory.

    Raises
    ------
    RefusedLinkError
        The file is a link out of the run.
    ConfigError
        The file is no TOML, has an unknown key, or a value of the wrong kind.
    """
    path = directory / SETTINGS_NAME
    if not is_file(path):
        return RunSettings()
    try:
        text = (access or Access.of(directory)).read_text(path, _MAX_SETTINGS_BYTES)
    except DamagedError as error:
        raise ConfigError(f"the settings: {error.what}", where=str(path), expected="at most 1 MB") from error
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no valid TOML: {error}", where=str(path)) from error
    evaluator = table.get("evaluator", {})
    if not isinstance(evaluator, dict):
        raise ConfigError("'evaluator' must be a table", where=str(path))
    unknown = [key for key in table if key != "evaluator"]
    unknown += [f"evaluator.{key}" for key in evaluator if key not in _SETTINGS]
    if unknown:
        raise ConfigError(
            f"unknown key '{unknown[0]}'",
            where=str(path),
            remedy=f"known are evaluator.{{{', '.join(_SETTINGS)}}}",
        )
    try:
        return RunSettings(**evaluator)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(path), expected=error.expected, found=error.found) from error
