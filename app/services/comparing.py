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
from inshrink_core.verbs.shared.measured import Known, Measurement, merged

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
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode, **more: Any
) -> Job:
    """Compare; called only after the reader has said that the code may run, or where it is ours.

    It is another question once the run or an archive has changed.
    """
    held = [one for one in archives if set(steps) & set(one.steps)]
    used = [step for step in steps if any(step in one.steps for one in held)]
    request = comparison(subject, [one.path for one in held], used, judge, **more)
    of = (opened(str(subject.path)).token, *(one.content for one in archives))
    work = Work.asking([request], subject.path, "compare", "compare", of=of, trusted=judge.trusted)
    return start_job(work)


def compared(job: Job) -> tuple[Known, ...]:
    """Return what a comparison has found so far, an archive each; what it has found is kept by the engine."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in job.told():
        rows.setdefault(str(row["of"]), {})[int(row["step"])] = row
    found = []
    for path, by_step in rows.items():
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
