"""Read the files beside the checkpoints of a run: logged metrics, in any format, and `inshrink.toml`."""

from __future__ import annotations

import csv
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from inshrink_core.errors import ConfigError, DamagedError, InputError, clipped, named
from inshrink_core.formats.disk import MAX_JSON_BYTES, MAX_VALUES, Access, is_dir, is_file, parse_json
from inshrink_core.formats.logs.event_file import is_event_file, scalar_rows

SETTINGS_NAME: Final = "inshrink.toml"
_MAX_SETTINGS_BYTES: Final = 1 << 20
_MAX_TEXT_BYTES: Final = 32_000_000
"""Maximum size of a text file of metrics; parsed numbers take up to twenty times as much memory."""

_STEP_COLUMNS: Final = ("step", "global_step", "iter", "iteration")
_STEP_WORDS: Final = (*_STEP_COLUMNS, "epoch", "epochs", "current_epoch")
_TIME_WORDS: Final = ("wall_time", "wall time", "timestamp", "time", "runtime", "elapsed")
_DELIMITERS: Final = ",;\t"


class TrainingLog(dict[str, list[tuple[int, float]]]):
    """Metrics mapped to (step, value) pairs in step order; NaN and infinities are preserved.

    Parameters
    ----------
    series
        The pairs of each metric, in any order.
    origin
        Path of the file, for display; empty if the run has no log.
    """

    def __init__(self, series: Mapping[str, Iterable[tuple[int, float]]], origin: str = "") -> None:
        super().__init__({name: sorted(pairs, key=lambda p: p[0]) for name, pairs in series.items()})
        self.origin = origin


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _logged(
    rows: Iterable[Mapping[str, Any]], step_columns: Sequence[str] = _STEP_COLUMNS
) -> dict[str, list[tuple[int, float]]]:
    """Return the metrics of rows by step, without counters and times."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        step = next((s for c in step_columns if (s := _number(row.get(c))) is not None), None)
        if step is None or not math.isfinite(step) or step < 0:
            continue
        for name, value in row.items():
            number = _number(value) if name not in step_columns else None
            if number is not None and isinstance(name, str):
                series.setdefault(name, []).append((int(step), number))
    return {name: pairs for name, pairs in series.items() if _word(name) not in (*_STEP_WORDS, *_TIME_WORDS)}


def _word(name: str) -> str:
    """Return a column's name without decorations of loggers: ``trainer/global_step``, ``_step``."""
    return name.casefold().rpartition("/")[2].strip(" _")


def read_metrics(path: str | os.PathLike[str]) -> TrainingLog:
    """Return the metrics of a file in any format by step.

    Parameters
    ----------
    path
        CSV (with commas, semicolons or tabs), JSON lines, a JSON list,
        ``trainer_state.json``, or an event file of TensorBoard. The content determines the format.

    Raises
    ------
    NotFoundError
        The file does not exist.
    RefusedLinkError
        The file is a link to another directory.
    DamagedError
        The file is larger than 256 MB.
    InputError
        The file has no number, no column named like a step, or no metric beside it; steps are not whole
        numbers; or it is more than 32 MB of text.

    Notes
    -----
    The step is the first column with the name of a step, or else of an epoch; counters and times are no
    metrics. The last line of a file being written may be truncated; it is ignored, as are damaged records of
    an event file. Names are untrusted and returned as in the file, without padding.

    Examples
    --------
    >>> import inshrink_core
    >>> read_metrics(inshrink_core.sample("digits-cnn") / "metrics.jsonl")["val_loss"][0][0]
    10
    """
    file = Path(path)
    content = Access.of(file.parent).read_text(file, MAX_JSON_BYTES)
    if not is_event_file(content) and len(content) > _MAX_TEXT_BYTES:
        raise InputError("more than 32 MB of text", where=str(file), remedy="keep, say, every tenth row")
    numbers = ({name: _number(value) for name, value in row.items() if name} for row in _rows(content, file))
    rows = [{name: value for name, value in row.items() if value is not None} for row in numbers]
    columns = dict.fromkeys(name for row in rows for name in row)
    if not columns:
        expected = "CSV, JSON lines or TensorBoard's event file"
        raise InputError("no metrics: no number in a named column", where=str(file), expected=expected)
    words = {_word(name): name for name in reversed(columns)}
    step = next((words[word] for word in _STEP_WORDS if word in words), None)
    facts = {"where": str(file), "found": f"columns {named([*columns])}"}
    if step is None:
        raise InputError("no column is called like a step", remedy="call one of them 'step'", **facts)
    if any(math.isfinite(row[step]) and row[step] % 1 for row in rows if step in row):
        raise InputError(f"'{clipped(step)}' has fractions, and a step is a whole number", **facts)
    series = _logged(rows, (step,))
    if not series:
        raise InputError(f"no row has a metric beside '{clipped(step)}'", **facts)
    return TrainingLog(series, str(file))


def _rows(content: bytes, path: Path) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a metrics file."""
    if is_event_file(content):
        return scalar_rows(content)
    # detect_encoding recognizes byte order marks of UTF-8, -16 and -32, and otherwise the zeros in ASCII.
    text = content.decode(json.detect_encoding(content[:4]), errors="replace").replace("\0", "")
    if text.lstrip()[:1] not in ("{", "["):
        return _csv_rows(text, path)
    _require_few(sum(map(text.count, ",[{")), path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = []
        for line in text.splitlines():
            # The last line of a running or killed training is often truncated.
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    if isinstance(found, dict) and isinstance(found.get("log_history"), list):
        found = found["log_history"]
    return [row for row in (found if isinstance(found, list) else [found]) if isinstance(row, dict)]


def _csv_rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    delimiter = max(_DELIMITERS, key=lines[0].count) if lines else ","
    _require_few(text.count(delimiter) + len(lines), path)
    rows = _cells(lines, delimiter, path)
    names = [name.strip("# ") for name in next(rows, [])]
    return (dict(zip(names, row, strict=False)) for row in rows)


def _cells(lines: Iterable[str], delimiter: str, path: Path) -> Iterator[list[str]]:
    try:
        for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True):
            yield [cell.strip() for cell in row]
    except csv.Error as error:
        raise DamagedError(f"no valid CSV ({error})", where=str(path)) from error


def _require_few(n_values: int, path: Path) -> None:
    if n_values > MAX_VALUES:
        facts = {"expected": f"at most {MAX_VALUES:,}", "found": f"{n_values:,}"}
        remedy = "keep every tenth row, for example"
        raise DamagedError("a log has more values than are read", where=str(path), remedy=remedy, **facts)


def log_of_trainer(content: bytes, where: str) -> TrainingLog:
    """Return the metrics in a ``trainer_state.json``; empty if it has no history.

    Raises
    ------
    DamagedError
        The content is not valid JSON.
    """
    state = parse_json(content, where)
    history = state.get("log_history") if isinstance(state, dict) else None
    rows = history if isinstance(history, list) else ()
    return TrainingLog(_logged(row for row in rows if isinstance(row, dict)), where)


def read_log(directory: Path, checkpoints: Iterable[Path] = (), access: Access | None = None) -> TrainingLog:
    """Return the metrics of a run; empty if it logged none.

    Parameters
    ----------
    directory
        The run.
    checkpoints
        Its checkpoints, oldest first: the last one's ``trainer_state.json`` has the whole history.
    access
        Access rights for links; by default into the run. A log elsewhere is ignored.

    Raises
    ------
    DamagedError
        The log is too large, or not valid JSON or CSV.
    """
    access = access or Access.of(directory)
    names = ("trainer_state.json", "metrics.csv", "metrics.jsonl")
    folders = [path for path in reversed(list(checkpoints)) if is_dir(path)][:1]
    places = [(folder, access, [*names]) for folder in (*folders, directory)]
    if directory.name in ("checkpoints", "checkpoint"):
        # The log of ``run/checkpoints`` is beside that folder; no link is involved, so it may be read.
        beside = directory.parent
        places.append((beside, replace(access, root=os.path.realpath(beside)), [*names[1:]]))
    for folder, allowed, candidates in places:
        for path in (folder / name for name in candidates):
            if is_file(path) and allowed.admits(path):
                content = allowed.read_text(path, MAX_JSON_BYTES)
                if path.name == names[0]:
                    return log_of_trainer(content, str(path))
                return TrainingLog(_logged(_rows(content, path)), str(path))
    return TrainingLog({})


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's evaluator and its metric; None for missing settings.

    Parameters
    ----------
    file
        Python file of the evaluator, relative to the run. Naming it runs nothing: executing it requires the
        user's consent.
    function
        The function in it.
    metric
        The metric to compare.
    direction
        ``lower`` or ``higher``: which is better.
    """

    file: str | None = None
    function: str | None = None
    metric: str | None = None
    direction: Literal["lower", "higher"] | None = None


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    evaluator: RunSettings = RunSettings()


def read_settings(directory: Path, access: Access | None = None) -> RunSettings:
    """Return the settings of a run; defaults if it has no file.

    Parameters
    ----------
    directory
        The run.
    access
        Access rights for links; by default into the directory.

    Raises
    ------
    RefusedLinkError
        The file is a link out of the run.
    ConfigError
        The file is not valid TOML, has an unknown key, or a value of the wrong type.
    """
    path = directory / SETTINGS_NAME
    if not is_file(path):
        return RunSettings()
    try:
        text = (access or Access.of(directory)).read_text(path, _MAX_SETTINGS_BYTES)
    except DamagedError as error:
        raise ConfigError(f"the settings: {error.what}", where=str(path), expected="at most 1 MB") from error
    try:
        return msgspec.convert(tomllib.loads(text.decode()), _Settings).evaluator
    except (ValueError, RecursionError) as error:
        known = f"known are evaluator.{{{', '.join(RunSettings.__struct_fields__)}}}"
        raise ConfigError(f"no valid settings: {error}", where=str(path), remedy=known) from error
