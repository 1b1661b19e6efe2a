"""Comparison of restored steps with the original ones, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inshrink_app.jobs import Job, Work
from inshrink_app.model import Subject
from inshrink_app.services.evaluating import EvaluatorCode, evaluator_fields
from inshrink_app.services.opening import opened

from inshrink_core.chain.report import ChainReport
from inshrink_core.evaluate import Comparison, EvaluatedStep
from inshrink_core.metrics import Direction
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.shared.measured import EvaluatorId, Known, Measurements, merged

MAX_COMPARED = 8
"""Number of steps that a comparison covers by default: enough to show a trend, and quick."""


def comparison(
    subject: Subject,
    archives: Sequence[Path],
    steps: Sequence[int],
    evaluator: EvaluatorCode | None,
    **more: Any,
) -> CompareArchives:
    """Return the request that compares archives with their run."""
    fields = evaluator_fields(evaluator) | more
    return CompareArchives(tuple(map(str, archives)), str(subject.path), steps=tuple(steps) or None, **fields)


def comparison_work(
    subject: Subject,
    archives: Sequence[ChainReport],
    request: CompareArchives,
    evaluator: EvaluatorCode | None,
) -> Work:
    """Return the work of a comparison. The evaluator must be trusted or bundled.

    A changed run or archive makes a new question, so earlier jobs do not answer it.
    """
    of = (opened(str(subject.path)).token, *(chain.content for chain in archives))
    trusted = "" if evaluator is None else evaluator.trusted
    return Work.asking([request], subject.path, "archives", "compare", of=of, trusted=trusted)


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
    for row in job.partial_rows():
        rows.setdefault((str(row["of"]), str(row.get("metric"))), {})[int(row["step"])] = row
    found = []
    for (path, _), by_step in rows.items():
        first = next(iter(by_step.values()))
        errors = {
            step: error for step, row in by_step.items() if (error := row.get("standard_error")) is not None
        }
        in_order = (row for _, row in sorted(by_step.items()))
        fields: list[dict[str, Any]] = [
            {name: row.get(name) for name in EvaluatedStep.__slots__} for row in in_order
        ]
        steps = [EvaluatedStep(**row) for row in fields]
        known = Known(
            archive=path,
            at=job.started_at,
            evaluator=EvaluatorId("", ""),
            comparison=Comparison.over(steps, first["metric"], Direction(first["direction"])),
            n_samples=first.get("n"),
            standard_errors=errors,
        )
        found.append(known)
    return tuple(found)
