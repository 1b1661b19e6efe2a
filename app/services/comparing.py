"""Comparing restored steps with the original ones: whose code judges them, and the job that does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs.job import Job
from inshrink_app.pages.archive.tables import ArchiveChoice
from inshrink_app.pages.compare.tables import ComparedStep, Comparison
from inshrink_app.services import running
from inshrink_app.services.failures import reported
from inshrink_app.services.history import all_jobs, load_json, read_result
from inshrink_app.services.opening import opened, resolve
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

__all__ = [
    "EvaluatorCode",
    "compare_job",
    "compared",
    "evaluator_of",
    "given_evaluator",
    "newest_comparison",
    "start_compare",
]

_MAX_CODE_BYTES = 200_000
"""More code than this is not read before it is trusted, and is not offered."""


class EvaluatorCode(NamedTuple):
    """The code that would judge a run.

    `spec` is empty for the run's own evaluator; `is_bundled` says that it is ours, byte for byte, and needs
    no consent; `digest` is the SHA-256 of the file as it was shown.
    """

    spec: str
    path: Path
    function: str
    metric: str
    direction: str
    code: str
    digest: str
    is_bundled: bool


def evaluator_of(subject: Subject) -> EvaluatorCode | None:
    """Return the evaluator that a run names in ``inshrink.toml``, without executing it; None without one.

    Raises
    ------
    ServiceError
        It cannot be read, or lies outside of the run.
    """
    from inshrink_core.formats.log import read_settings
    from inshrink_core.samples import is_trusted_sample

    folder = subject.path if subject.path.is_dir() else subject.path.parent
    with reported():
        told = read_settings(folder)
        if not told.file:
            return None
        file = (folder / told.file).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise ServiceError(
                Problem(
                    "inshrink.toml names an evaluator outside of the run", str(file), "put it into the run"
                )
            )
        bundled = is_trusted_sample(folder) and told.file == "evaluator.py"
        return _code(
            file, "", told.function or "evaluate", told.metric or "", told.direction or "", bundled=bundled
        )


def given_evaluator(text: str) -> EvaluatorCode:
    """Return the evaluator that a reader names as ``FILE.py`` or ``FILE.py:FUNCTION``.

    Raises
    ------
    ServiceError
        There is no such file inside of the roots.
    """
    name, colon, function = text.strip().rpartition(":")
    if not colon or not function.isidentifier():
        name, function = text.strip(), "evaluate"
    file = resolve(name)
    if file.suffix != ".py" or not file.is_file():
        raise ServiceError(
            Problem("there is no such Python file", str(file), "give FILE.py or FILE.py:FUNCTION")
        )
    with reported():
        return _code(file, f"{file}:{function}", function, "", "", bundled=False)


def _code(
    file: Path, spec: str, function: str, metric: str, direction: str, *, bundled: bool
) -> EvaluatorCode:
    """Read the code, to be shown and to be known again."""
    if file.stat().st_size > _MAX_CODE_BYTES:
        raise ServiceError(Problem("the evaluator is too large to be read before it runs", str(file)))
    content = file.read_bytes()
    return EvaluatorCode(
        spec,
        file,
        function,
        metric,
        direction,
        content.decode("utf-8", "replace"),
        hashlib.sha256(content).hexdigest(),
        bundled,
    )


def _key(
    subject: Subject, archives: Sequence[ArchiveChoice], steps: Sequence[int], spec: str
) -> tuple[str, ...]:
    """Name a comparison: another one once the run or an archive has changed."""
    path = str(subject.path)
    states = [f"{one.path} {one.nbytes} {one.steps[-1] if one.steps else ''}" for one in archives]
    return ("compare", path, opened(path).token, spec, ",".join(map(str, steps)), *states)


def compare_job(
    subject: Subject, archives: Sequence[ArchiveChoice], steps: Sequence[int], spec: str
) -> Job | None:
    """Return the comparison of these archives and steps, if one was started."""
    return running.jobs().get(_key(subject, archives, steps, spec), load_json)


def start_compare(
    subject: Subject, archives: Sequence[ArchiveChoice], steps: Sequence[int], judge: EvaluatorCode
) -> Job:
    """Compare; called only after the reader has said that the code may run, or where it is ours."""
    request: dict[str, Any] = {
        "task": "compare",
        "path": str(subject.path),
        "archives": [str(one.path) for one in archives],
        "steps": list(steps),
        "evaluator": judge.spec,
        "trusted": "" if judge.is_bundled else judge.digest,
    }
    return running.jobs().start(_key(subject, archives, steps, judge.spec), request, load_json, again=True)


def compared(job: Job) -> tuple[Comparison, ...]:
    """Return what a comparison has found, or has found so far, an archive each."""
    if job.state == "finished" and isinstance(job.result, dict):
        parts = {path: part["steps"] for path, part in job.result["archives"].items()}
    else:
        parts = {str(path): [] for path in job.request.get("archives", ())}
        for row in list(job.rows):
            parts.setdefault(str(row["archive"]), []).append(row)
    return tuple(_comparison(path, rows) for path, rows in parts.items())


def newest_comparison(archive: Path, nbytes: int) -> Comparison | None:
    """Return what the newest finished comparison found of an archive of this size; None without one."""
    state = json.dumps(f"{archive} {nbytes} ")[:-1]  # As it begins in the text of `_key`.
    for job in all_jobs():
        if job.task != "compare" or job.state != "finished" or state not in job.key:
            continue
        if isinstance(read_result(job), dict):
            return next((one for one in compared(job) if one.path == archive), None)
    return None


def _comparison(path: str, rows: Sequence[dict[str, Any]]) -> Comparison:
    first = rows[0] if rows else {}
    return Comparison(
        path=Path(path),
        name=Path(path).name,
        metric=str(first.get("metric", "")),
        direction=str(first.get("direction", "")),
        n_samples=first.get("n"),
        steps=tuple(
            ComparedStep(
                step=int(row["step"]),
                original=float(row["original"]),
                restored=float(row["restored"]),
                drop=row["drop"],
                divergence=row["divergence"],
                stale_drop=row["stale_drop"],
                stale_divergence=row["stale_divergence"],
                standard_error=row.get("standard_error"),
            )
            for row in rows
        ),
    )
