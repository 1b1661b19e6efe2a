"""Comparing restored steps with the original ones: whose code evaluates them, and what was found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from inshrink_app.jobs.commands import archives_of, is_shrinking, option, steps_words
from inshrink_app.jobs.job import Job
from inshrink_app.services.failures import reported
from inshrink_app.services.jobs import all_jobs, documents_of, job_of, start_job
from inshrink_app.services.opening import opened, resolve
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

if TYPE_CHECKING:
    from inshrink_core.chain import ChainReport
    from inshrink_core.evaluate import EvaluatedStep

__all__ = [
    "Compared",
    "EvaluatorCode",
    "compare_job",
    "compare_words",
    "compared",
    "evaluator_of",
    "given_evaluator",
    "newest_comparing",
    "newest_comparison",
    "spread_of",
    "start_compare",
]

_SPREAD = 8
"""Steps that are compared to begin with: enough to see a course, few enough to wait for."""

_MAX_CODE_BYTES = 200_000
"""More code than this is not read before it is trusted, and is not offered."""


class EvaluatorCode(NamedTuple):
    """The code that would evaluate a run.

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

    @property
    def words(self) -> list[str]:
        """The options that have a command use it."""
        return ["--evaluator", self.spec] if self.spec else [] if self.is_bundled else ["--trust-run"]

    @property
    def trusted(self) -> dict[str, str] | None:
        """What a job is told of the reader's consent; None where none is needed."""
        return None if self.is_bundled else {"file": str(self.path), "digest": self.digest}


def evaluator_of(subject: Subject) -> EvaluatorCode | None:
    """Return the evaluator that a run names in ``inshrink.toml``, without executing it; None without one.

    Raises
    ------
    ServiceError
        It cannot be read, or lies outside of the run.
    """
    from inshrink_core.formats.log import read_settings
    from inshrink_core.samples import is_trusted_sample

    folder = _folder_of(subject)
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


def _folder_of(subject: Subject) -> Path:
    """Return the folder of a run; of a checkpoint file, the one that it lies in."""
    return subject.path if subject.path.is_dir() else subject.path.parent


def given_evaluator(text: str, subject: Subject) -> EvaluatorCode:
    """Return the evaluator that a reader names as ``FILE.py`` or ``FILE.py:FUNCTION``.

    Parameters
    ----------
    text
        What was typed; a relative path is looked for in the run's folder, and then where the explorer was
        started.
    subject
        The run.

    Raises
    ------
    ServiceError
        There is no such file inside of the roots.
    """
    name, colon, function = text.strip().rpartition(":")
    if not colon or not function.isidentifier():
        name, function = text.strip(), "evaluate"
    beside = _folder_of(subject) / name
    is_beside = "\0" not in name and not Path(name).is_absolute() and beside.is_file()
    file = resolve(str(beside) if is_beside else name)
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
    digest = hashlib.sha256(content).hexdigest()
    shown = content.decode("utf-8", "replace")
    return EvaluatorCode(spec, file, function, metric, direction, shown, digest, bundled)


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


def compare_words(
    subject: Subject, archives: Sequence[Path], steps: Sequence[int], judge: EvaluatorCode | None
) -> list[str]:
    """Return the command that compares archives with their run."""
    own = ["--trust-run"] if judge is None else judge.words
    return ["compare", *map(str, archives), "--against", str(subject.path), *own, *steps_words(steps)]


def _key(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], spec: str
) -> tuple[str, ...]:
    """Name a comparison: another one once the run or an archive has changed."""
    path = str(subject.path)
    states = [f"{one.path} {one.nbytes} {one.steps[-1] if one.steps else ''}" for one in archives]
    return ("compare", path, opened(path).token, spec, ",".join(map(str, steps)), *states)


def compare_job(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode
) -> Job | None:
    """Return the comparison of these archives and steps, if one was started."""
    return job_of(_key(subject, archives, steps, judge.spec))


def start_compare(
    subject: Subject, archives: Sequence[ChainReport], steps: Sequence[int], judge: EvaluatorCode
) -> Job:
    """Compare; called only after the reader has said that the code may run, or where it is ours."""
    held = [one for one in archives if set(steps) & set(one.steps)]
    used = [step for step in steps if any(step in one.steps for one in held)]
    words = compare_words(subject, [one.path for one in held], used, judge)
    return start_job(_key(subject, archives, steps, judge.spec), [words], subject.path, trusted=judge.trusted)


def compared(job: Job) -> tuple[Compared, ...]:
    """Return what a comparison has found, or has found so far, an archive each."""
    from inshrink_core.evaluate import EvaluatedStep

    rows: dict[str, dict[int, dict[str, Any]]] = {
        path: {} for words in job.commands if words[0] == "compare" for path in archives_of(words)
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
    state = json.dumps(f"{archive} {nbytes} ")[:-1]  # As it begins in the text of `_key`.
    for job in all_jobs():
        is_finished = job.verb == "compare" and job.state == "finished"
        if is_finished and (state in job.key or _has_made(job, archive, nbytes)):
            return job
    return None


def _has_made(job: Job, archive: Path, nbytes: int) -> bool:
    """Return whether a job that did the whole has written this archive, as large as it is now."""
    if not is_shrinking(job.commands) or option(job.commands[0], "-o") != str(archive):
        return False
    documents = documents_of(job)
    return bool(documents) and documents[0].get("archive_bytes") == nbytes
