"""Results as CSV, one file a benchmark, each row naming its machine and the date it was measured."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

import inshrink_core

RESULTS = Path(__file__).parent / "results"
DATA = Path(__file__).parent / "data"


def machine() -> str:
    """Name the processor and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: *(.+)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    model = named[1].strip() if named else platform.processor() or platform.machine()
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


def write_each(name: str, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write the table of `write` after each row, of rows that take long to measure, and print the row."""
    found: list[Mapping[str, object]] = []
    for row in rows:
        found.append(row)
        sys.stderr.write(f"{row}\n")
        write(name, found)
    return RESULTS / f"{name}.csv"


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of ``results/NAME.csv``."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def renew(name: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Path:
    """Write rows to ``results/NAME.csv``, and keep those that are there of what was not measured anew.

    Parameters
    ----------
    name, rows
        As for `write`.
    columns
        What a row is about: of rows that agree in these the new one stays.
    """
    known = read(name) if (RESULTS / f"{name}.csv").exists() else []
    found = {tuple(str(row[column]) for column in columns): row for row in (*known, *rows)}
    return write(name, list(found.values()))


def _plain(value: object) -> object:
    """Round floats to what the measurement can carry."""
    return f"{value:.5g}" if isinstance(value, float) else value
