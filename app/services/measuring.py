"""Sensitivity measurements as jobs, and their tables for the pages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inshrink_app.jobs import Job, Work, subject_of
from inshrink_app.model import Sensitivity, Subject
from inshrink_app.services.inside import answered, reported
from inshrink_app.services.jobs import LOADERS, all_jobs, documents_of, newest_job
from inshrink_app.services.opening import engine_of, opened, reading_of
from numpy.typing import NDArray

from inshrink_core.analysis.profile import Row
from inshrink_core.chain.report import ChainReport
from inshrink_core.checkpoint import OPTIMIZER_ROLES, TensorRole, TensorSpec, twins
from inshrink_core.errors import NotFoundError
from inshrink_core.formats.matching.laws import in_order
from inshrink_core.request import Request
from inshrink_core.sensitivity import STATISTICS
from inshrink_core.verbs.sensitivity import Sensitivity as Measure

_LATEST_FIRST_BYTES = 50_000_000
"""A run with more bytes to read shows its last step first."""


def available_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run's last checkpoint supports, the most discriminative first."""
    roles = {row.role for row in subject.tensors}
    known = {
        "fisher": "exp_avg_sq" in roles,
        "taylor": bool(roles & {"gradient", "exp_avg"}),
        "update": len(subject.steps) > 1,
        "magnitude": True,
    }
    return tuple(metric for metric, is_available in known.items() if is_available)


def missing_metrics(subject: Subject) -> tuple[str, ...]:
    """Return the metrics that a run's checkpoints cannot provide."""
    known = available_metrics(subject)
    return tuple(name for name in ("taylor", "fisher", "update") if name not in known)


def averages_of(subject: Subject) -> tuple[str, ...]:
    """Return the weights that are a moving average of others: a second model, which counts exclude."""
    specs = {row.name: row.shape for row in subject.model_tensors}
    return tuple(twins(specs))


def with_averages(subject: Subject, table: Sensitivity) -> Sensitivity:
    """Return a table in which the parameters of a moving average count in no share."""
    averages = set(averages_of(subject))
    if averages.isdisjoint(row.name for row in table.rows):
        return table
    sizes = [[0.0 if row.name in averages else row.numel] for row in table.rows]
    return dataclasses.replace(table, sizes=np.array(sizes, np.float64))


def has_model_order(subject: Subject, names: Sequence[str]) -> bool:
    """Return whether rows follow the order of the model in its files or code, instead of names."""
    return subject.is_ordered or in_order(names, ()) != list(names)


def optimizer_state(subject: Subject) -> tuple[str, ...]:
    """Return the roles of optimizer state in the last checkpoint, without counters."""
    roles = {row.role for row in subject.tensors}
    return tuple(role.value for role in TensorRole if role in roles & OPTIMIZER_ROLES - {TensorRole.STEP})


def measuring_cost(subject: Subject, metric: str) -> int:
    """Return the bytes that a measurement reads, from sizes alone; checkpoints are measured once."""
    before = earlier_measurement(subject, metric)
    return _read_nbytes(subject, metric, len(set(subject.steps).difference(before.steps if before else ())))


def _read_nbytes(subject: Subject, metric: str, n_steps: int) -> int:
    roles = {
        "magnitude": {"weight"},
        "taylor": {"weight", "gradient", "exp_avg"},
        "fisher": {"exp_avg_sq"},
        "update": {"weight"},
    }[metric]
    readings = 2 if metric == "update" else 1  # each checkpoint and its predecessor
    return readings * n_steps * sum(row.nbytes for row in subject.tensors if row.role in roles)


def sensitivity_request(subject: Subject, metric: str, by: str) -> Request[Any]:
    """Return the request that measures a metric."""
    return Measure(str(subject.path), metric=metric, by=by)


def sensitivity_work(subject: Subject, metric: str) -> Work:
    """Return the work that measures a metric of a run; for a large run, the last step comes first."""
    steps = subject.steps
    request = Measure(str(subject.path), metric=metric)
    requests = [request]
    if len(steps) > 1 and _read_nbytes(subject, metric, len(steps)) > _LATEST_FIRST_BYTES:
        requests.insert(0, dataclasses.replace(request, steps=steps[-1:]))
    of = (opened(str(subject.path)).token,)
    return Work.asking(requests, subject.path, "sensitivity", metric, of=of)


def latest_measured(subject: Subject, metric: str) -> Sensitivity | None:
    """Return an earlier measurement, else the values at the last step alone, which a thread measures.

    None if these are not there yet, or take too long.

    Raises
    ------
    ServiceError
        The last step cannot be read.
    """
    known = earlier_measurement(subject, metric)
    if known is not None or _read_nbytes(subject, metric, 1) > _LATEST_FIRST_BYTES:
        return known
    engine, token = engine_of(subject)

    def measure() -> Sensitivity:
        with reported():
            return _table(Measure(engine, metric=metric, steps=subject.steps[-1:]).perform().to_json())

    table = reading_of(subject).ahead((token, metric), measure)
    return None if table is None else _at_all_steps(subject, table)


def measured_so_far(subject: Subject, job: Job) -> Sensitivity | None:
    """Return the partial table of a running measurement, with gaps; None before the first values."""
    if not job.documents:
        return None
    return _at_all_steps(subject, _table(job.documents[-1]))


def _at_all_steps(subject: Subject, table: Sensitivity) -> Sensitivity:
    """Return a table of some steps as one of all steps, with gaps."""
    places = [subject.steps.index(step) for step in table.steps if step in subject.steps]
    values = {name: np.full((len(table.rows), len(subject.steps)), np.nan) for name in table.values}
    for name, known in table.values.items():
        values[name][:, places] = known
    return dataclasses.replace(table, steps=subject.steps, values=values)


def _weights(subject: Subject) -> list[TensorSpec]:
    return [row for row in subject.tensors if row.role == "weight"]


def _table_of(
    subject: Subject, metric: str, values: NDArray[np.floating[Any]], note: str = ""
) -> Sensitivity:
    """Return a table of values that are not statistics, by weight and step."""
    rows = tuple(
        _row(spec.name, spec.name.rpartition(".")[0], str(spec.layer or ""), spec.shape, spec.numel)
        for spec in _weights(subject)
    )
    shared = dict.fromkeys(STATISTICS, values.astype(np.float32))
    return Sensitivity(metric=metric, rows=rows, steps=subject.steps, values=shared, note=note)


def _row(name: str, block: str, layer_type: str, shape: Sequence[int], numel: int) -> Row:
    return Row(name, block, layer_type, "weight", 1, numel, tuple(shape))


def unmeasured(subject: Subject, metric: str) -> Sensitivity:
    """Return an empty table of a metric, with its rows and steps from headers alone."""
    return _table_of(subject, metric, np.full((len(_weights(subject)), len(subject.steps)), np.nan))


def relative_updates(update: Sensitivity, magnitude: Sensitivity) -> Sensitivity:
    """Return update sizes relative to the magnitude of the weights."""
    sizes = magnitude.values["mean"]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {name: np.where(sizes > 0, moved / sizes, np.nan) for name, moved in update.values.items()}
    return dataclasses.replace(update, metric="ratio", values=values)


def archived_bits(subject: Subject, chain: ChainReport) -> Sensitivity:
    """Return the bits per weight of every tensor at every step of an archive, from its indexes."""
    state = tuple(map(str, chain.state))

    def read() -> Sensitivity:
        engine: Any = opened(str(chain.path)).engine
        specs = _weights(subject)
        values = np.full((len(specs), len(subject.steps)), np.nan)
        for column, step in enumerate(subject.steps):
            frame = engine.reader.find(step) if step in engine else None
            for row, spec in enumerate(specs if frame is not None else ()):
                with contextlib.suppress(NotFoundError):
                    nbytes = sum(block.nbytes for block in engine.blocks(frame, spec.key))
                    values[row, column] = 8 * nbytes / max(1, spec.numel)
        return _table_of(subject, "bits", values, f"As written in {chain.name}.")

    return answered(("bits", str(subject.path), subject.steps, str(chain.path), state), read)


def estimated_bits(subject: Subject, by_key: Mapping[str, float]) -> Sensitivity:
    """Return the estimated bits per weight of every tensor, which are the same at every step."""
    column = np.array([by_key.get(spec.key, np.nan) for spec in _weights(subject)])
    values = np.repeat(column[:, None], len(subject.steps), axis=1)
    return _table_of(subject, "bits", values, "Estimated for all steps together." if by_key else "")


def compared_errors(subject: Subject) -> Sensitivity | None:
    """Return the relative error of every tensor at every step, if an archive was compared with the run."""
    rows = {spec.key: place for place, spec in enumerate(_weights(subject))}
    columns = {step: place for place, step in enumerate(subject.steps)}
    for job in all_jobs():
        against = [one["fields"].get("against") for one in job.work.documents if one["verb"] == "verify"]
        if job.state != "finished" or str(subject.path) not in against:
            continue
        errors = [error for document in documents_of(job) for error in document.get("errors", ())]
        if errors:
            values = np.full((len(rows), len(columns)), np.nan)
            for error in errors:
                if error["tensor"] in rows and error["step"] in columns:
                    # A missing error becomes NaN.
                    values[rows[error["tensor"]], columns[error["step"]]] = error["relative_rms"]
            archive = Path(subject_of(job.requests[-1])).name
            return _table_of(subject, "error", values, f"As restored from {archive}.")
    return None


def earlier_measurement(subject: Subject, metric: str) -> Sensitivity | None:
    """Return the newest finished measurement of a run, also from before it grew; None without one."""
    job = newest_job("sensitivity", metric, subject.path, "finished")
    return None if job is None else job.result


LOADERS["sensitivity"] = lambda job: _table(job.reports()[-1])


def _table(document: Mapping[str, Any]) -> Sensitivity:
    """Return the table of ``inshrink sensitivity``, tensor by tensor; gaps become NaN."""
    rows, shape = document["rows"], (-1, len(document["steps"]))
    return Sensitivity(
        metric=str(document["metric"]),
        rows=tuple(
            _row(row["name"], row["block"], row["layer_type"], row["shape"], row["n_parameters"])
            for row in rows
        ),
        steps=tuple(document["steps"]),
        values={
            name: np.array([row[name] for row in rows], np.float32).reshape(shape) for name in STATISTICS
        },
        note=_note(document),
    )


def _note(document: Mapping[str, Any]) -> str:
    """Return what a user must know to interpret the values."""
    notes = []
    sources = {source for source in document["sources"] if source is not None}
    if "exp_avg" in sources or "mixed" in sources:
        where = "The checkpoints hold" if sources == {"exp_avg"} else "Some checkpoints hold"
        notes.append(f"{where} no gradients; Adam's first moment replaces them.")
    n_left_out = sum(sum(row["n_nonfinite"]) for row in document["rows"])
    if n_left_out:
        notes.append(f"{n_left_out:,} values are NaN or infinite and are left out.")
    return " ".join(notes)
