"""Evaluators of a run: their code, consent to run it, their trial, and comparisons of archives."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inshrink_app.jobs import Work
from inshrink_app.model import ServiceError, Subject
from inshrink_app.server.recent import is_trusted
from inshrink_app.server.roots import settings
from inshrink_app.services.archives import original_of
from inshrink_app.services.chosen import chosen
from inshrink_app.services.inside import answered, reported
from inshrink_app.services.jobs import job_of
from inshrink_app.services.opening import opened, resolve

from inshrink_core.chain.report import ChainReport
from inshrink_core.evaluate import own_samples
from inshrink_core.formats.logs.log import read_settings
from inshrink_core.samples import is_trusted_sample
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.evaluate import Evaluate

_MAX_CODE_BYTES = 200_000
"""Code larger than this is neither read nor offered."""


class EvaluatorCode(NamedTuple):
    """The code of an evaluator.

    `spec` is empty for the run's own evaluator. `is_bundled` marks a byte-identical copy of a sample's
    evaluator, which needs no consent. `digest` is the SHA-256 of the displayed file. `is_asked` marks a
    metric chosen by the user.
    """

    spec: str
    path: Path
    function: str
    metric: str
    direction: str
    code: str
    digest: str
    is_bundled: bool
    is_asked: bool = False

    @property
    def name(self) -> str:
        """Return a short name."""
        return own_samples.AUTO if self.spec == own_samples.AUTO else self.path.stem

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields by which a request names the evaluator."""
        metric = {"metric": self.metric, "direction": self.direction} if self.is_asked else {}
        given = {"evaluator": self.spec} if self.spec else {} if self.is_bundled else {"trust_run": True}
        return given | {name: value for name, value in metric.items() if value}

    @property
    def trusted(self) -> str:
        """Return the consent for a job: the digest, or empty if the evaluator needs none."""
        return "" if self.is_bundled else self.digest


def named_evaluator(shown: Subject) -> EvaluatorCode | None:
    """Return the evaluator chosen for a run, else the run's own, else a suitable one; None without any.

    Raises
    ------
    ServiceError
        The chosen evaluator cannot be read.
    """
    now = chosen(shown)
    subject = original_of(shown) or shown
    text = now.evaluator
    evaluator = None if text else evaluator_of(subject)
    if evaluator is None:
        text = text or _likely(subject)
        evaluator = given_evaluator(text, subject) if text else None
    if evaluator is None or not now.metric:
        return evaluator
    return evaluator._replace(metric=now.metric, direction=now.direction, is_asked=True)


def may_run(evaluator: EvaluatorCode) -> bool:
    """Return whether an evaluator may run: it is bundled, or the user trusts this content of its file."""
    return evaluator.is_bundled or is_trusted(evaluator.path, evaluator.digest)


def consent_to(evaluator: EvaluatorCode | None) -> str:
    """Return the consent for a job with an evaluator, or with none (`EvaluatorCode.trusted`)."""
    return "" if evaluator is None else evaluator.trusted


def evaluator_and_trust(shown: Subject) -> tuple[EvaluatorCode | None, bool]:
    """Return the evaluator of a run, None without one, and whether it may run."""
    with contextlib.suppress(ServiceError):
        evaluator = named_evaluator(shown)
        return evaluator, evaluator is not None and may_run(evaluator)
    return None, False


def trusted_evaluator(shown: Subject) -> EvaluatorCode | None:
    """Return the evaluator of a run if it may run; else None."""
    evaluator, ready = evaluator_and_trust(shown)
    return evaluator if ready else None


def metrics_told(shown: Subject) -> tuple[str, ...]:
    """Return the known metrics of the chosen evaluator; empty before its first trial."""
    evaluator, _ = evaluator_and_trust(shown)
    with contextlib.suppress(ServiceError):
        job = None if evaluator is None else job_of(evaluator_trial(original_of(shown) or shown, evaluator))
        if job is not None and job.result:
            return tuple(map(str, job.result["metrics"]))
    return ()


def _likely(shown: Subject) -> str:
    """Return a suitable evaluator for a run that names none; empty without one."""
    folder = shown.folder if settings().may_write(shown.folder) else settings().roots[0]

    def find() -> str:
        return own_samples.likely_evaluator(folder / "evaluator.py", shown.newest, shown.directory)

    return answered(("evaluator", str(shown.path), opened(str(shown.path)).token), find)


def evaluator_fields(evaluator: EvaluatorCode | None) -> dict[str, Any]:
    """Return the request fields of an evaluator; for None, those of the run's own."""
    return {"trust_run": True} if evaluator is None else evaluator.fields


def evaluator_of(subject: Subject) -> EvaluatorCode | None:
    """Return the evaluator that ``inshrink.toml`` of a run names, without executing it; None without one.

    Raises
    ------
    ServiceError
        The file cannot be read, or is outside of the run.
    """
    folder = subject.folder
    with reported():
        named = read_settings(folder)
        if not named.file:
            return None
        file = (folder / named.file).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise ServiceError(
                "inshrink.toml names an evaluator outside of the run", str(file), "put it into the run"
            )
        bundled = is_trusted_sample(folder) and named.file == "evaluator.py"
        return _code(
            file, "", named.function or "evaluate", named.metric or "", named.direction or "", bundled=bundled
        )


def given_evaluator(text: str, subject: Subject) -> EvaluatorCode:
    """Return the evaluator that a user names as ``FILE.py``, ``FILE.py:FUNCTION`` or ``auto``.

    Parameters
    ----------
    text
        The name as typed. A relative path is resolved in the run's folder, then in the folder where the
        explorer was started.
    subject
        The run.

    Raises
    ------
    ServiceError
        No such file exists inside the roots.
    """
    if text.strip() == own_samples.AUTO:
        code = Path(own_samples.__file__)
        return _code(code, own_samples.AUTO, own_samples.evaluator_of.__name__, "", "", bundled=True)
    name, colon, function = text.strip().rpartition(":")
    if not colon or not function.isidentifier():
        name, function = text.strip(), "evaluate"
    beside = subject.folder / name
    is_beside = "\0" not in name and not Path(name).is_absolute() and beside.is_file()
    file = resolve(str(beside) if is_beside else name)
    if file.suffix != ".py" or not file.is_file():
        raise ServiceError("there is no such Python file", str(file), "give FILE.py or FILE.py:FUNCTION")
    with reported():
        return _code(file, f"{file}:{function}", function, "", "", bundled=False)


def _code(
    file: Path, spec: str, function: str, metric: str, direction: str, *, bundled: bool
) -> EvaluatorCode:
    """Read the code for display, with its digest."""
    if file.stat().st_size > _MAX_CODE_BYTES:
        raise ServiceError("the evaluator is too large to be read before it runs", str(file))
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    shown = content.decode("utf-8", "replace")
    return EvaluatorCode(spec, file, function, metric, direction, shown, digest, bundled)


def evaluator_trial(shown: Subject, evaluator: EvaluatorCode) -> Work:
    """Return the trial of an evaluator in its present state on the last step."""
    asked = evaluator._replace(is_asked=False)  # One trial returns all of the evaluator's metrics.
    request = Evaluate(str(shown.path), step=shown.steps[-1], **asked.fields)
    of = (opened(str(shown.path)).token, evaluator.digest)
    return Work.asking([request], shown.path, "run", "evaluator", of=of, trusted=evaluator.trusted)


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
    trusted = consent_to(evaluator)
    return Work.asking([request], subject.path, "archives", "compare", of=of, trusted=trusted)
