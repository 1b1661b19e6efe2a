"""Measuring sensitivities, in another process; the pages ask for tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from inshrink_app.jobs.registry import Job
from inshrink_app.services import running
from inshrink_app.services.drilldown import gain_partner
from inshrink_app.services.opening import opened
from inshrink_app.widgets.tables import GROUPINGS, METRICS, STATISTICS, HeatRow, Sensitivity, Subject
from numpy.typing import NDArray

__all__ = [
    "cancel_sensitivity",
    "forget_sensitivity",
    "measuring_cost",
    "sensitivity_job",
    "sensitivity_loader",
    "start_sensitivity",
    "told_metrics",
]


def told_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run's last checkpoint tells by itself, the most telling first."""
    roles = {row.role for row in subject.tensors}
    told = {
        "fisher": "exp_avg_sq" in roles,
        "taylor": bool(roles & {"gradient", "exp_avg"}),
        "update": len(subject.steps) > 1,
        "magnitude": True,
    }
    return tuple(metric for metric, is_told in told.items() if is_told)


def measuring_cost(subject: Subject, metric: str) -> int:
    """Return the bytes that measuring a metric reads where no measurement is cached, from sizes alone."""
    roles = {
        "magnitude": {"weight"},
        "taylor": {"weight", "gradient", "exp_avg"},
        "fisher": {"exp_avg_sq"},
        "update": {"weight"},
    }.get(metric, {"weight", "exp_avg_sq"})
    # Each checkpoint, and the one before it; for a gain both are read twice.
    readings = {"update": 2, "gain": 4, "noise": 4}.get(metric, 1)
    return readings * len(subject.steps) * sum(row.nbytes for row in subject.tensors if row.role in roles)


def _job_key(text: str, metric: str) -> tuple[str, str, str]:
    """Name the measurement that a page asks for: the same in every tab, another when the run has changed."""
    found = opened(text)
    return (str(found.subject.path), found.token, metric)


def sensitivity_job(text: str, metric: str) -> Job | None:
    """Return the measurement of a metric, if one was started; its result maps groupings to tables."""
    return running.jobs().get(_job_key(text, metric), sensitivity_loader(metric))


def start_sensitivity(text: str, metric: str) -> Job:
    """Start measuring a metric in another process, or return the measurement that there is."""
    key = _job_key(text, metric)
    request = {"task": "sensitivity", "path": key[0], "metric": metric}
    if METRICS[metric].pooled:
        subject = opened(text).subject
        partner = gain_partner(subject)
        request |= {} if partner is None else {"archive" if subject.kind == "run" else "run": partner}
    return running.jobs().start(key, request, sensitivity_loader(metric))


def cancel_sensitivity(text: str, metric: str) -> None:
    """Stop measuring."""
    running.jobs().cancel(_job_key(text, metric))


def forget_sensitivity(text: str, metric: str) -> None:
    """Drop a measurement that failed or was cancelled."""
    running.jobs().forget(_job_key(text, metric))


def sensitivity_loader(metric: str) -> Callable[[Path], dict[str, Sensitivity]]:
    """Return what reads the worker's file: one table per grouping."""

    def load(path: Path) -> dict[str, Sensitivity]:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            steps = tuple(int(step) for step in header["steps"])
            return {
                by: Sensitivity(
                    metric=metric,
                    by=by,
                    rows=(rows := tuple(_heat_row(row) for row in header["rows"][by])),
                    steps=steps,
                    values={name: _read_values(file, len(rows), len(steps)) for name in STATISTICS},
                    note=str(header["note"]),
                )
                for by in GROUPINGS
            }

    return load


def _read_values(file: BinaryIO, n_rows: int, n_steps: int) -> NDArray[np.float32]:
    """Read one table of values; too few bytes are a ValueError."""
    content = file.read(4 * n_rows * n_steps)
    return np.frombuffer(content, "<f4").reshape(n_rows, n_steps)


def _heat_row(row: list[Any]) -> HeatRow:
    """Rebuild a row from the worker's header."""
    name, layer, n_tensors, numel, shape = row
    return HeatRow(
        str(name), str(layer), int(n_tensors), int(numel), None if shape is None else tuple(map(int, shape))
    )
