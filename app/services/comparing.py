"""Comparing restored steps with the original ones, and what was found."""

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
"""Steps that are compared to begin with: enough to see a course, few enough to wait for."""


def spread_of(steps: Sequence[int]) -> tuple[int, ...]:
    """Return a few steps spread over a run, the first and the last among them; all where there are few."""
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


def start_compare(
    subject: Subject,
    archives: Sequence[ChainReport],
    steps: Sequence[int],
    judge: EvaluatorCode,
    metrics: Sequence[str] = (),
    **more: Any,
) -> Job:
    """Compare; called only after the reader has said that the code may run, or if it is ours.

    It is another question once the run or an archive has changed.

    Parameters
    ----------
    subject, archives, steps
        The run, its archives, and which steps of them.
    judge
        The evaluator.
    metrics
        Metrics of it to compare by, one after the other; by default the one that judges.
    **more
        Fields of each request.
    """
    among = [one for one in archives if set(steps) & set(one.steps)]
    used = [step for step in steps if any(step in one.steps for one in among)]
    paths = [one.path for one in among]
    judges = [_by(judge, metric) for metric in metrics] or [judge]
    requests = [comparison(subject, paths, used, one, **more) for one in judges]
    of = (opened(str(subject.path)).token, *(one.content for one in archives))
    work = Work.asking(requests, subject.path, "archives", "compare", of=of, trusted=judge.trusted)
    return start_job(work)


def _by(judge: EvaluatorCode, metric: str) -> EvaluatorCode:
    """Return an evaluator that judges by a metric, in the direction of its name if it is another one."""
    direction = judge.direction if metric == judge.metric else ""
    return judge._replace(metric=metric, direction=direction, is_asked=True)


def known_by_metric(chain: ChainReport) -> dict[str, Known]:
    """Return what was measured of an archive by each metric, the newest first.

    If nothing is known of the archive as it is, what was measured before its last change.
    """
    store = Measurements.of_archive(chain) if chain.archive_id else None
    for earlier in (False, True):
        rows = [] if store is None else list(store.rows("compare", earlier=earlier))
        if earlier and rows:
            rows = [one for one in rows if one.content == rows[0].content]
        found = {}
        for metric in dict.fromkeys(str(one.document.get("metric")) for one in rows):
            known = merged([one for one in rows if one.document.get("metric") == metric])
            if known is not None:
                found[metric] = replace(known, archive=str(chain.path), is_current=not earlier)
        if found:
            return found
    return {}


def compared(job: Job) -> tuple[Known, ...]:
    """Return what a comparison has found so far, of each archive and metric."""
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
            "standard_errors": {step: one for step, one in errors.items() if one is not None},
        }
        asked = {"name": "", "evaluator": ""}
        known = merged([Measurement("compare", job.started_at, "", asked, document)])
        found += [] if known is None else [replace(known, archive=path)]
    return tuple(found)
