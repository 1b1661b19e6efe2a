"""Comparing restored steps with the original ones, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work, subjects_of
from inshrink_app.model.subject import Subject
from inshrink_app.services.evaluating import EvaluatorCode
from inshrink_app.services.jobs import all_jobs, documents_of, job_of, start_job
from inshrink_app.services.opening import opened

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport
    from inshrink_core.evaluate import EvaluatedStep
    from inshrink_core.verbs.compare import CompareArchives

__all__ = [
    "Compared",
    "compare_job",
    "compared",
    "comparison",
    "newest_comparing",
    "newest_comparison",
    "spread_of",
    "start_compare",
]

_SPREAD = 8
"""Steps that are compared to begin with: enough to see a course, few enough to wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One archive against its run, as far as it is known.

    Parameters
    ----------
    path
        The archive.
    metric, direction
        What was measured, and which way it is better.
    n_samples
        How many samples the evaluator predicted, where it tells.
    steps
        Ascending.
    standard_errors
        Of the originals' metric, by step.
    """

    path: Path
    metric: str
    direction: str
    n_samples: int | None
    steps: tuple[EvaluatedStep, ...]
    standard_errors: dict[int, float | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What to call the archive. Untrusted text."""
        return self.path.name

    @property
    def worst(self) -> EvaluatedStep | None:
        """The step that drops most."""
        known = [row for row in self.steps if row.drop is not None]
        return max(known, key=lambda row: row.drop or 0.0, default=None)

    @property
    def max_restore_cost(self) -> float | None:
        """The largest restore cost."""
        return max((row.restore_cost for row in self.steps if row.restore_cost is not None), default=None)

    @property
    def max_divergence(self) -> float | None:
        """The largest divergence."""
        return max((row.divergence for row in self.steps if row.divergence is not None), default=None)


def spread_of(steps: Sequence[int]) -> tuple[int, ...]:
    """Return a few steps spread over a run, the first and the last among them; all where there are few."""
    if len(steps) <= _SPREAD:
        return tuple(steps)
    return tuple(steps[round(i * (len(steps) - 1) / (_SPREAD - 1))] for i in range(_SPREAD))


def comparison(
    subject: Subject, archives: Sequence[Path], steps: Sequence[int], judge: EvaluatorCode | None
) -> CompareArchives:
    """Return the request that compares archives with their run."""
    from inshrink_core.verbs.compare import CompareArchives

    fields = {"trust_run": True} if judge is None else judge.fields
    return CompareArchives(tuple(map(str, archives)), str(subject.path), steps=tuple(steps) or None, **fields)


def _state(archive: Path, nbytes: int) -> str:
    return f"{archive} {nbytes}"


def _work(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode
) -> Work:
    """Return a comparison: another question once the run or an archive has changed."""
    held = [one for one in archives if set(steps) & set(one.steps)]
    used = [step for step in steps if any(step in one.steps for one in held)]
    states = [text for one in archives for text in (_state(one.path, one.nbytes), *one.state)]
    return Work.asking(
        [comparison(subject, [one.path for one in held], used, judge)],
        shown=subject.path,
        page="compare",
        topic="compare",
        of=(opened(str(subject.path)).token, *states),
        trusted=judge.trusted,
    )


def compare_job(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode
) -> Job | None:
    """Return the comparison of these archives and steps, if one was started."""
    return job_of(_work(subject, archives, steps, judge))


def start_compare(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode
) -> Job:
    """Compare; called only after the reader has said that the code may run, or where it is ours."""
    return start_job(_work(subject, archives, steps, judge))


def compared(job: Job) -> tuple[Compared, ...]:
    """Return what a comparison has found, or has found so far, an archive each."""
    from inshrink_core.evaluate import EvaluatedStep

    rows: dict[str, dict[int, dict[str, Any]]] = {
        path: {} for one in job.requests if one.verb() == "compare" for path in subjects_of(one)
    }
    for row in job.told():
        rows.setdefault(str(row["of"]), {})[int(row["step"])] = row
    found = []
    for path, by_step in rows.items():
        last = next(iter(by_step.values()), {})
        steps = [
            EvaluatedStep(**cast("dict[str, Any]", {name: row.get(name) for name in EvaluatedStep.__slots__}))
            for _, row in sorted(by_step.items())
        ]
        found.append(
            Compared(
                path=Path(path),
                metric=str(last.get("metric", "")),
                direction=str(last.get("direction", "")),
                n_samples=last.get("n"),
                steps=tuple(steps),
                standard_errors={step: row.get("standard_error") for step, row in by_step.items()},
            )
        )
    return tuple(found)


def newest_comparison(archive: Path, nbytes: int) -> Compared | None:
    """Return what the newest finished comparison found of an archive of this size; None without one."""
    job = newest_comparing(archive, nbytes)
    found = () if job is None else compared(job)
    return next((one for one in found if one.path == archive and one.steps), None)


def newest_comparing(archive: Path, nbytes: int) -> Job | None:
    """Return the newest finished comparison of an archive of this size; None without one."""
    state = _state(archive, nbytes)
    for job in all_jobs():
        is_finished = job.verb == "compare" and job.state == "finished"
        if is_finished and (state in job.work.of or _has_made(job, archive, nbytes)):
            return job
    return None


def _has_made(job: Job, archive: Path, nbytes: int) -> bool:
    """Return whether a job that did the whole has written this archive, as large as it is now."""
    if job.work.topic != "shrink" or getattr(job.requests[0], "archive", "") != str(archive):
        return False
    documents = documents_of(job)
    return bool(documents) and documents[0].get("archive_bytes") == nbytes
