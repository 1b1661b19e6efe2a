"""Comparing restored steps with the original ones, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work
from inshrink_app.model.subject import Subject
from inshrink_app.services.evaluating import EvaluatorCode, judged_by
from inshrink_app.services.jobs import start_job
from inshrink_app.services.opening import opened

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport
    from inshrink_core.verbs.compare import CompareArchives
    from inshrink_core.verbs.shared.measured import Known

__all__ = [
    "compared",
    "comparison",
    "spread_of",
    "start_compare",
]

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
    from inshrink_core.verbs.compare import CompareArchives

    fields = judged_by(judge) | more
    return CompareArchives(tuple(map(str, archives)), str(subject.path), steps=tuple(steps) or None, **fields)


def _work(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode, **more: Any
) -> Work:
    """Return a comparison: another question once the run or an archive has changed."""
    held = [one for one in archives if set(steps) & set(one.steps)]
    used = [step for step in steps if any(step in one.steps for one in held)]
    return Work.asking(
        [comparison(subject, [one.path for one in held], used, judge, **more)],
        shown=subject.path,
        page="compare",
        topic="compare",
        of=(opened(str(subject.path)).token, *(one.content for one in archives)),
        trusted=judge.trusted,
    )


def start_compare(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode, **more: Any
) -> Job:
    """Compare; called only after the reader has said that the code may run, or where it is ours."""
    return start_job(_work(subject, archives, steps, judge, **more))


def compared(job: Job) -> tuple[Known, ...]:
    """Return what a comparison has found so far, an archive each; what it has found is kept by the engine."""
    from inshrink_core.evaluate import Comparison, EvaluatedStep
    from inshrink_core.metrics import Direction
    from inshrink_core.verbs.shared.measured import EvaluatorId, Known

    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in job.told():
        rows.setdefault(str(row["of"]), {})[int(row["step"])] = row
    found = []
    for path, by_step in rows.items():
        last = next(iter(by_step.values()))
        steps = [
            EvaluatedStep(**cast("dict[str, Any]", {name: row.get(name) for name in EvaluatedStep.__slots__}))
            for _, row in sorted(by_step.items())
        ]
        errors = {step: row.get("standard_error") for step, row in by_step.items()}
        found.append(
            Known(
                archive=path,
                at=job.started_at,
                evaluator=EvaluatorId("", ""),
                comparison=Comparison.over(steps, str(last["metric"]), Direction(last["direction"])),
                n_samples=last.get("n"),
                standard_errors={step: one for step, one in errors.items() if one is not None},
            )
        )
    return tuple(found)
