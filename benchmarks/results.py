"""Results as CSV, one file a benchmark, each row naming its machine and the date it was measured."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import inshrink_core
from inshrink_core.execution import keep_result, key_digest, load_result

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parent / "data"


def machine() -> str:
    """Name the processor and how many cores this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__.partition('+')[0]}"


def stamp() -> dict[str, object]:
    """Return what every row begins with: when, where and with which version it was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "version": inshrink_core.__version__,
    }


def write(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write rows to ``results/NAME.csv`` and return the path.

    Rows measured earlier bear their own stamp, the others today's. A column that a row lacks is empty.
    """
    RESULTS.mkdir(exist_ok=True)
    today = stamp()
    path = RESULTS / f"{name}.csv"
    columns = dict.fromkeys([*today, *(key for row in rows for key in row)])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns))
        writer.writeheader()
        writer.writerows(today | {key: _plain(value) for key, value in row.items()} for row in rows)
    return path


def renew(name: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Path:
    """Write rows to ``results/NAME.csv``, and keep those that are there of what was not measured anew.

    Parameters
    ----------
    name, rows
        As for `write`.
    columns
        What a row is about: of rows that agree in these the new one stays.
    """
    path = RESULTS / f"{name}.csv"
    found: dict[tuple[str, ...], Mapping[str, object]] = {}
    if path.exists():
        with path.open(newline="") as file:
            found = {tuple(row[column] for column in columns): row for row in csv.DictReader(file)}
    found |= {tuple(str(row[column]) for column in columns): row for row in rows}
    return write(name, list(found.values()))


def kept(
    folder: str, name: str, key: Mapping[str, Any], measure: Callable[[], list[dict[str, object]]]
) -> list[dict[str, object]]:
    """Return rows that were measured before under the same key; else measure and keep them.

    Parameters
    ----------
    folder
        Below ``benchmarks/data``.
    name
        Of the file, which ends in a digest of the key.
    key
        Everything the rows depend on, as JSON values; the version of the code is no part of it, the
        bitstreams of the codecs should be.
    measure
        Makes the rows, of JSON values.
    """
    path = DATA / folder / f"{re.sub('[^A-Za-z0-9.-]+', '-', name)}-{key_digest(key)}.json"
    rows: list[dict[str, object]] | None = load_result(path, key, "rows", list)
    if rows is None:
        rows = [stamp() | row for row in measure()]
        # What could not be measured today may be possible tomorrow.
        if not any("skipped" in row for row in rows):
            keep_result(path, key, "rows", rows)
    return rows


def nothing_new() -> list[dict[str, object]]:
    """Take the place of a measurement where only what is kept is wanted.

    Raises
    ------
    LookupError
        Always.
    """
    raise LookupError("this was not measured yet")


def _plain(value: object) -> object:
    """Round floats to what the measurement can carry."""
    return f"{value:.5g}" if isinstance(value, float) else value
