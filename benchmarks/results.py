"""Results as CSV, one file a benchmark, each row naming its machine and date."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from pathlib import Path

import torch

import inshrink_core

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


def write(name: str, rows: list[dict[str, object]]) -> Path:
    """Write rows to ``results/NAME.csv`` and return the path."""
    RESULTS.mkdir(exist_ok=True)
    stamp = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "version": inshrink_core.__version__,
    }
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*stamp, *rows[0]])
        writer.writeheader()
        writer.writerows(stamp | {key: _plain(value) for key, value in row.items()} for row in rows)
    return path


def _plain(value: object) -> object:
    """Round floats to what the measurement can carry."""
    return f"{value:.5g}" if isinstance(value, float) else value
