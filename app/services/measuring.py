"""Measuring sensitivities as jobs; the pages ask for tables."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from inshrink_app.jobs import Job, Work
from inshrink_app.model import Sensitivity, Subject
from inshrink_app.services.jobs import LOADERS, job_of, start_job
from inshrink_app.services.opening import opened

from inshrink_core.analysis.profile import Row
from inshrink_core.checkpoint import OPTIMIZER_ROLES, TensorRole
from inshrink_core.errors import StorageError
from inshrink_core.execution import write_whole
from inshrink_core.formats.attribution.laws import in_order
from inshrink_core.request import Request
from inshrink_core.sensitivity import STATISTICS, Grouping
from inshrink_core.verbs.sensitivity import Sensitivity as Measure

_KEPT_TABLES = "tables.npz"


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


def known_shares(subject: Subject) -> tuple[str, dict[str, float]]:
    """Return the most telling metric that was measured, and which share each tensor carries at the last step.

    Both are empty where none was measured.
    """
    found = {metric: tables for metric in told_metrics(subject) if (tables := measured(subject, metric))}
    if not found:
        return "", {}
    metric = next(iter(found))
    table = found[metric]["tensor"]
    carried = table.carried()[:, -1]
    total = float(np.nansum(carried)) or 1.0
    return metric, {
        row.name: float(one) / total for row, one in zip(table.rows, carried, strict=True) if np.isfinite(one)
    }


def tells_order(subject: Subject, names: Sequence[str]) -> bool:
    """Whether rows stand in the order of the model, as its files or its code have it; else by name."""
    return subject.is_ordered or in_order(names, ()) != list(names)


def measured(subject: Subject, metric: str) -> Mapping[str, Sensitivity] | None:
    """Return the tables of a metric by grouping, where it was measured; nothing is begun."""
    job = sensitivity_job(str(subject.path), metric)
    return job.result if job is not None and job.state == "finished" else None


def untold_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run cannot tell, whatever is measured."""
    told = told_metrics(subject)
    return tuple(name for name in ("taylor", "fisher", "update") if name not in told)


def optimizer_state(subject: Subject) -> tuple[str, ...]:
    """Return the roles of optimizer state that the last checkpoint holds, counters aside."""
    roles = {row.role for row in subject.tensors}
    return tuple(role.value for role in TensorRole if role in roles & OPTIMIZER_ROLES - {TensorRole.STEP})


def measuring_cost(subject: Subject, metric: str) -> int:
    """Return the bytes that measuring a metric reads where no measurement is cached, from sizes alone."""
    roles = {
        "magnitude": {"weight"},
        "taylor": {"weight", "gradient", "exp_avg"},
        "fisher": {"exp_avg_sq"},
        "update": {"weight"},
    }[metric]
    readings = 2 if metric == "update" else 1  # each checkpoint, and the one before it
    return readings * len(subject.steps) * sum(row.nbytes for row in subject.tensors if row.role in roles)


def sensitivity_request(subject: Subject, metric: str, by: str) -> Request[Any]:
    """Return the request that measures a metric."""
    return Measure(str(subject.path), metric=metric, by=by)


def _work(text: str, metric: str) -> Work:
    """Return the measurement that a page asks for: another question when the run has changed."""
    found = opened(text)
    request = sensitivity_request(found.subject, metric, ",".join(Grouping))
    return Work.asking([request], found.subject.path, "sensitivity", metric, of=(found.token,))


def sensitivity_job(text: str, metric: str) -> Job | None:
    """Return the measurement of a metric, if one was started; its result maps groupings to tables."""
    return _of(job_of(_work(text, metric)), metric)


def _of(job: Job | None, metric: str) -> Job | None:
    """Return a job with the tables of one metric as its result."""
    if job is None or not isinstance(job.result, dict) or metric not in job.result:
        return job
    return dataclasses.replace(job, result=job.result[metric])


def start_sensitivity(text: str, metric: str) -> Job:
    """Start measuring a metric in another process, or return the measurement that there is."""
    job = start_job(_work(text, metric), again=False)
    return _of(job, metric) or job


def load_tables(job: Job) -> dict[str, dict[str, Sensitivity]]:
    """Return what a job measured: by metric, one table a grouping."""
    kept = job.folder.path / _KEPT_TABLES
    found = _kept_tables(kept)
    if found is None:
        found = _tables(job.reports()[-1])
        _keep_tables(kept, found)
    return found


LOADERS["sensitivity"] = load_tables


def _keep_tables(path: Path, found: Mapping[str, Mapping[str, Sensitivity]]) -> None:
    """Keep what a document told in a form that is read a hundred times as fast."""
    tables = [table for grouped in found.values() for table in grouped.values()]
    about = [(table.metric, table.by, table.rows, table.steps, table.note) for table in tables]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for i, table in enumerate(tables):
        arrays |= {f"{i}.{name}": values for name, values in table.values.items()}
    content = io.BytesIO()
    np.savez(content, **arrays)
    with contextlib.suppress(StorageError):  # What is not kept is read from the document again.
        write_whole(path, content.getvalue())


def _kept_tables(path: Path) -> dict[str, dict[str, Sensitivity]] | None:
    """Return what `_keep_tables` kept; None where there is nothing, or nothing sound."""
    found: dict[str, dict[str, Sensitivity]] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            for i, (metric, by, rows, steps, note) in enumerate(json.loads(held["about"].tobytes())):
                found.setdefault(metric, {})[by] = Sensitivity(
                    metric=metric,
                    by=by,
                    rows=tuple(
                        Row(*row)._replace(shape=None if row[-1] is None else tuple(row[-1])) for row in rows
                    ),
                    steps=tuple(steps),
                    values={name: held[f"{i}.{name}"] for name in STATISTICS},
                    note=note,
                )
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile):
        return None
    return found


def _tables(document: Mapping[str, Any]) -> dict[str, dict[str, Sensitivity]]:
    """Return the tables of ``inshrink sensitivity --by`` with several groupings."""
    tables = {str(one["by"]): one for one in document["tables"]}
    counts = {by: Counter(str(row[by]) for row in tables["tensor"]["rows"]) for by in ("block", "layer_type")}
    found = {}
    for by, table in tables.items():
        rows = tuple(
            Row(
                str(row["name"]),
                str(row["block"]),
                str(row["layer_type"]),
                "weight",
                counts[by][str(row["name"])] if by in counts else 1,
                int(row["n_parameters"]),
                None if row["shape"] is None else tuple(map(int, row["shape"])),
            )
            for row in table["rows"]
        )
        found[by] = Sensitivity(
            metric=str(document["metric"]),
            by=by,
            rows=rows,
            steps=tuple(map(int, table["steps"])),
            values={
                name: _array([row[name] for row in table["rows"]], table["steps"]) for name in STATISTICS
            },
            note=_note(tables["tensor"], restored=bool(document["restored"])),
        )
    return {str(document["metric"]): found}


def _array(
    rows: Sequence[Sequence[float | None]], steps: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return values by row and step; a gap is NaN."""
    return np.asarray(rows, np.float32).reshape(-1, len(steps))


def _note(table: Mapping[str, Any], *, restored: bool) -> str:
    """Say what a reader must know to read the values right."""
    notes = []
    if restored:
        notes.append("Measured on the restored weights, so the error of the compression is part of it.")
    sources = {source for source in table["sources"] if source is not None}
    if "exp_avg" in sources or "mixed" in sources:
        notes.append(
            "The checkpoints hold no gradients, so Adam's first moment stands for them."
            if sources == {"exp_avg"}
            else "Where a checkpoint holds no gradients, Adam's first moment stands for them."
        )
    n_left_out = sum(sum(row["n_nonfinite"]) for row in table["rows"])
    if n_left_out:
        notes.append(f"{n_left_out:,} values are NaN or infinite and are left out.")
    return " ".join(notes)
