"""Comparison of restored steps with the original ones, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject
from inshrink_app.services.evaluating import EvaluatorCode, judged_by
from inshrink_app.services.jobs import start_job
from inshrink_app.services.opening import opened

from inshrink_core.chain import ChainReport
from inshrink_core.evaluate import EvaluatedStep
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.shared.measured import Known, Measurement, Measurements, merged

_SPREAD = 8
"""Number of steps that a comparison covers by default: enough to show a trend, and quick."""


def spread_of(steps: Sequence[int]) -> tuple[int, ...]:
    """Return a few evenly spread steps with the first and the last; all of them if there are few."""
    if len(steps) <= _SPREAD:
        return tuple(steps)
    return tuple(steps[round(i * (len(steps) - 1) / (_SPREAD - 1))] for i in range(_SPREAD))


def comparison(
    subject: Subject,
    archives: Sequence[Path],
    steps: Sequence[int],
    judge: EvaluatorCode | None,
    **more: Any,
) -> CompareArchives:
    """Return the request that compares archives with their run."""
    fields = judged_by(judge) | more
    return CompareArchives(tuple(map(str, archives)), str(subject.path), steps=tuple(steps) or None, **fields)


def comparisons(
    subject: Subject,
    archives: Sequence[ChainReport],
    steps: Sequence[int],
    judge: EvaluatorCode | None,
    metrics: Sequence[str] = (),
    **more: Any,
) -> list[CompareArchives]:
    """Return one request per metric that compares archives with their run.

    Without metrics, the evaluator's own metric is used. For other metrics, the direction follows from the
    name.
    """
    among = [chain for chain in archives if set(steps) & set(chain.steps)] or archives
    used = [step for step in steps if any(step in chain.steps for chain in among)]
    judges = [judge]
    if judge is not None and metrics:
        judges = [
            judge._replace(
                metric=metric, direction=judge.direction if metric == judge.metric else "", is_asked=True
            )
            for metric in metrics
        ]
    paths = [chain.path for chain in among]
    return [comparison(subject, paths, used, evaluator, **more) for evaluator in judges]


def start_compare(
    subject: Subject,
    archives: Sequence[ChainReport],
    requests: Sequence[CompareArchives],
    judge: EvaluatorCode,
) -> Job:
    """Start a comparison. The evaluator must be trusted or bundled.

    A changed run or archive makes a new question, so earlier jobs do not answer it.
    """
    of = (opened(str(subject.path)).token, *(chain.content for chain in archives))
    return start_job(Work.asking(requests, subject.path, "archives", "compare", of=of, trusted=judge.trusted))


def known_by_metric(chain: ChainReport) -> dict[str, Known]:
    """Return the newest measurement of an archive for each metric.

    If no measurement matches the present archive, return those from before its last change.
    """
    store = Measurements.of_archive(chain) if chain.archive_id else None
    for earlier in (False, True):
        rows = [] if store is None else list(store.rows("compare", earlier=earlier))
        if earlier and rows:
            rows = [row for row in rows if row.content == rows[0].content]
        found = {}
        for metric in dict.fromkeys(str(row.document.get("metric")) for row in rows):
            known = merged([row for row in rows if row.document.get("metric") == metric])
            if known is not None:
                found[metric] = replace(known, archive=str(chain.path), is_current=not earlier)
        if found:
            return found
    return {}


def compared(job: Job) -> tuple[Known, ...]:
    """Return the results of a comparison so far, for each archive and metric."""
    rows: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in job.told():
        rows.setdefault((str(row["of"]), str(row.get("metric"))), {})[int(row["step"])] = row
    found = []
    for (path, _), by_step in rows.items():
        about = next(iter(by_step.values()))
        errors = {step: row.get("standard_error") for step, row in by_step.items()}
        document = {
            "steps": [{n: row.get(n) for n in EvaluatedStep.__slots__} for row in by_step.values()],
            **{name: about[name] for name in ("metric", "direction")},
            "device": "",
            "n_samples": about.get("n"),
            "standard_errors": {step: error for step, error in errors.items() if error is not None},
        }
        asked = {"name": "", "evaluator": ""}
        known = merged([Measurement("compare", job.started_at, "", asked, document)])
        found += [] if known is None else [replace(known, archive=path)]
    return tuple(found)
