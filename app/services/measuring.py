"""Sensitivity measurements as jobs, and their tables for the pages."""

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
import streamlit as st
from inshrink_app.jobs import Job, Work, subject_of
from inshrink_app.model import Sensitivity, Subject
from inshrink_app.services.inside import reported
from inshrink_app.services.jobs import LOADERS, all_jobs, documents_of, job_of, start_job
from inshrink_app.services.opening import engine_at, opened
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row
from inshrink_core.chain import ChainReport
from inshrink_core.checkpoint import OPTIMIZER_ROLES, TensorRole, TensorSpec, twins
from inshrink_core.errors import NotFoundError, StorageError
from inshrink_core.execution import write_whole
from inshrink_core.formats.attribution.laws import in_order
from inshrink_core.request import Request
from inshrink_core.sensitivity import STATISTICS, Grouping
from inshrink_core.verbs.sensitivity import Sensitivity as Measure

_TABLES_FILE = "tables.npz"
_LATEST_FIRST_BYTES = 50_000_000
"""A run with more bytes to read shows its last step first."""


def told_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run's last checkpoint supports, the most informative first."""
    roles = {row.role for row in subject.tensors}
    known = {
        "fisher": "exp_avg_sq" in roles,
        "taylor": bool(roles & {"gradient", "exp_avg"}),
        "update": len(subject.steps) > 1,
        "magnitude": True,
    }
    return tuple(metric for metric, is_told in known.items() if is_told)


def averages_of(subject: Subject) -> tuple[str, ...]:
    """Return the weights that are a moving average of others: a second model, which counts exclude."""
    specs = {row.name: row.shape for row in subject.model_tensors}
    return tuple(twins(specs))


def with_averages(subject: Subject, tables: Mapping[str, Sensitivity]) -> Mapping[str, Sensitivity]:
    """Return tables in which tensors of a moving average take the values of the tensors they average.

    Only tensors without values are filled in; their parameters count in no share.
    """
    table = tables["tensor"]
    places = {row.name: place for place, row in enumerate(table.rows)}
    pairs = twins({row.name: row.shape for row in subject.model_tensors})
    averages = {places[name]: places[twin] for name, twin in pairs.items() if {name, twin} <= places.keys()}
    if not averages:
        return tables
    rows, originals = list(averages), list(averages.values())
    values = {name: measured.copy() for name, measured in table.values.items()}
    for column in values.values():
        column[rows] = np.where(np.isfinite(column[rows]), column[rows], column[originals])
    sizes = np.broadcast_to(table.extents(), table.values["mean"].shape).copy()
    sizes[rows] = 0.0
    return {"tensor": dataclasses.replace(table, values=values, sizes=sizes)}


def tells_order(subject: Subject, names: Sequence[str]) -> bool:
    """Return whether rows follow the order of the model in its files or code, instead of names."""
    return subject.is_ordered or in_order(names, ()) != list(names)


def measured(subject: Subject, metric: str) -> Mapping[str, Sensitivity] | None:
    """Return the tables of a metric by grouping if it was measured; never start a measurement."""
    job = sensitivity_job(str(subject.path), metric)
    return job.result if job is not None and job.state == "finished" else None


def untold_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run's checkpoints cannot provide."""
    known = told_metrics(subject)
    return tuple(name for name in ("taylor", "fisher", "update") if name not in known)


def optimizer_state(subject: Subject) -> tuple[str, ...]:
    """Return the roles of optimizer state in the last checkpoint, without counters."""
    roles = {row.role for row in subject.tensors}
    return tuple(role.value for role in TensorRole if role in roles & OPTIMIZER_ROLES - {TensorRole.STEP})


def measuring_cost(subject: Subject, metric: str) -> int:
    """Return the bytes that an uncached measurement of a metric reads, from sizes alone."""
    roles = {
        "magnitude": {"weight"},
        "taylor": {"weight", "gradient", "exp_avg"},
        "fisher": {"exp_avg_sq"},
        "update": {"weight"},
    }[metric]
    readings = 2 if metric == "update" else 1  # each checkpoint and its predecessor
    return readings * len(subject.steps) * sum(row.nbytes for row in subject.tensors if row.role in roles)


def sensitivity_request(subject: Subject, metric: str, by: str) -> Request[Any]:
    """Return the request that measures a metric."""
    return Measure(str(subject.path), metric=metric, by=by)


def _work(text: str, metric: str) -> Work:
    """Return the work that measures a run; for a large run, the last step comes first."""
    found = opened(text)
    request = Measure(str(found.subject.path), metric=metric, by=",".join(Grouping))
    requests = [request]
    if len(found.subject.steps) > 1 and measuring_cost(found.subject, metric) > _LATEST_FIRST_BYTES:
        requests.insert(0, dataclasses.replace(request, steps=found.subject.steps[-1:]))
    return Work.asking(requests, found.subject.path, "sensitivity", metric, of=(found.token,))


def measured_so_far(subject: Subject, job: Job | None) -> dict[str, Sensitivity] | None:
    """Return the partial tables of a running measurement, with gaps; None before the first values."""
    documents = [] if job is None else job.documents[-1:]
    if not documents:
        return None
    ((metric, tables),) = _tables(documents[0]).items()
    table = tables["tensor"]
    places = [subject.steps.index(step) for step in table.steps if step in subject.steps]
    values = {}
    for name, known in table.values.items():
        values[name] = np.full((len(table.rows), len(subject.steps)), np.nan, np.float32)
        values[name][:, places] = known
    complete = dataclasses.replace(table, metric=metric, steps=subject.steps, values=values)
    return {"tensor": complete}


def unmeasured(subject: Subject, metric: str) -> dict[str, Sensitivity]:
    """Return an empty table of a metric, with its rows and steps from headers alone."""
    specs = [row for row in subject.tensors if row.role == "weight"]
    values = np.full((len(specs), len(subject.steps)), np.nan, np.float32)
    return _made_of(subject, metric, specs, values)


def _made_of(
    subject: Subject, metric: str, specs: Sequence[TensorSpec], values: NDArray[Any], note: str = ""
) -> dict[str, Sensitivity]:
    """Return a table by tensor of computed values that are not statistics."""
    rows = tuple(
        Row(
            spec.name,
            spec.name.rpartition(".")[0],
            str(spec.layer or ""),
            "weight",
            1,
            spec.numel,
            spec.shape,
        )
        for spec in specs
    )
    shared = dict.fromkeys(STATISTICS, values.astype(np.float32))
    return {
        "tensor": Sensitivity(
            metric=metric, by="tensor", rows=rows, steps=subject.steps, values=shared, note=note
        )
    }


def relative_updates(
    update: Mapping[str, Sensitivity], magnitude: Mapping[str, Sensitivity]
) -> dict[str, Sensitivity]:
    """Return update sizes relative to the magnitude of the weights."""
    found = {}
    for by, table in update.items():
        sizes = magnitude[by].values["mean"]
        if sizes.shape != table.values["mean"].shape:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {
                name: np.where(sizes > 0, moved / sizes, np.nan) for name, moved in table.values.items()
            }
        found[by] = dataclasses.replace(table, metric="ratio", values=values)
    return found


def archived_bits(subject: Subject, chain: ChainReport) -> dict[str, Sensitivity]:
    """Return the bits per weight of every tensor at every step of an archive, from its indexes."""
    return _archived_bits(str(subject.path), str(chain.path), tuple(map(str, chain.state)), subject, chain)


@st.cache_resource(show_spinner=False, max_entries=4)
def _archived_bits(
    path: str, archive: str, state: tuple[str, ...], _subject: Subject, _chain: ChainReport
) -> dict[str, Sensitivity]:
    engine: Any = engine_at(archive, "-".join(state))
    specs = [row for row in _subject.tensors if row.role == "weight"]
    values = np.full((len(specs), len(_subject.steps)), np.nan)
    with reported():
        for column, step in enumerate(_subject.steps):
            if step not in engine:
                continue
            frame = engine.reader.find(step)
            for row, spec in enumerate(specs):
                with contextlib.suppress(NotFoundError):
                    nbytes = sum(block.nbytes for block in engine.blocks(frame, spec.key))
                    values[row, column] = 8 * nbytes / max(1, spec.numel)
    return _made_of(_subject, "bits", specs, values, f"As written in {_chain.name}.")


def same_at_all_steps(
    subject: Subject, metric: str, by_key: Mapping[str, float], note: str
) -> dict[str, Any]:
    """Return a table with one value per tensor, repeated for all steps."""
    specs = [row for row in subject.tensors if row.role == "weight"]
    column = np.array([by_key.get(spec.key, np.nan) for spec in specs])
    return _made_of(subject, metric, specs, np.repeat(column[:, None], len(subject.steps), axis=1), note)


def compared_errors(subject: Subject) -> dict[str, Sensitivity] | None:
    """Return the relative error of every tensor at every step, if the archive was compared with the run."""
    for job in all_jobs():
        against = [
            document["fields"].get("against")
            for document in job.work.documents
            if document["verb"] == "verify"
        ]
        if job.state != "finished" or str(subject.path) not in against:
            continue
        rows = [row for document in documents_of(job) for row in document.get("errors", ())]
        if rows:
            specs = [row for row in subject.tensors if row.role == "weight"]
            places = {spec.key: place for place, spec in enumerate(specs)}
            columns = {step: place for place, step in enumerate(subject.steps)}
            values = np.full((len(specs), len(columns)), np.nan)
            for row in rows:
                if row["tensor"] in places and row["step"] in columns and row["relative_rms"] is not None:
                    values[places[row["tensor"]], columns[row["step"]]] = row["relative_rms"]
            archive = Path(subject_of(job.requests[-1])).name
            return _made_of(subject, "error", specs, values, f"As restored from {archive}.")
    return None


def sensitivity_job(text: str, metric: str) -> Job | None:
    """Return the newest measurement of a metric, whose result maps groupings to tables; None without one."""
    return _of(job_of(_work(text, metric)), metric)


def _of(job: Job | None, metric: str) -> Job | None:
    """Return a job whose result holds the tables of one metric."""
    if job is None or not isinstance(job.result, dict) or metric not in job.result:
        return job
    return dataclasses.replace(job, result=job.result[metric])


def start_sensitivity(text: str, metric: str) -> Job:
    """Start measuring a metric in another process, or return the existing measurement."""
    job = start_job(_work(text, metric), again=False)
    return _of(job, metric) or job


def load_tables(job: Job) -> dict[str, dict[str, Sensitivity]]:
    """Return the tables of a finished job, by metric and grouping."""
    path = job.folder / _TABLES_FILE
    found = _stored_tables(path)
    if found is None:
        found = _tables(job.reports()[-1])
        _keep_tables(path, found)
    return found


LOADERS["sensitivity"] = load_tables


def _keep_tables(path: Path, found: Mapping[str, Mapping[str, Sensitivity]]) -> None:
    """Store the tables of a document in a binary form that is read a hundred times as fast."""
    tables = [table for grouped in found.values() for table in grouped.values()]
    about = [(table.metric, table.by, table.rows, table.steps, table.note) for table in tables]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for i, table in enumerate(tables):
        arrays |= {f"{i}.{name}": values for name, values in table.values.items()}
    content = io.BytesIO()
    np.savez(content, **arrays)
    with contextlib.suppress(StorageError):  # Without the binary form, the document is read again.
        write_whole(path, content.getvalue())


def _stored_tables(path: Path) -> dict[str, dict[str, Sensitivity]] | None:
    """Return the tables stored by `_keep_tables`; None if they are missing or damaged."""
    found: dict[str, dict[str, Sensitivity]] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            for i, (metric, by, rows, steps, note) in enumerate(json.loads(stored["about"].tobytes())):
                found.setdefault(metric, {})[by] = Sensitivity(
                    metric=metric,
                    by=by,
                    rows=tuple(
                        Row(*row)._replace(shape=None if row[-1] is None else tuple(row[-1])) for row in rows
                    ),
                    steps=tuple(steps),
                    values={name: stored[f"{i}.{name}"] for name in STATISTICS},
                    note=note,
                )
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile):
        return None
    return found


def _tables(document: Mapping[str, Any]) -> dict[str, dict[str, Sensitivity]]:
    """Return the tables in the document of ``inshrink sensitivity --by`` with several groupings."""
    tables = {str(table["by"]): table for table in document["tables"]}
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
    """Return values by row and step; gaps are NaN."""
    return np.asarray(rows, np.float32).reshape(-1, len(steps))


def _note(table: Mapping[str, Any], *, restored: bool) -> str:
    """Return what a user must know to interpret the values."""
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
