"""Store of measurements of archives and runs, shared by the verbs and the explorer.

The store is a log of JSON lines: one per archive in the user's cache, named by the archive's id, and one for
each run in its results folder. Each row records an answer: the digest of the content, the question, the
document and the time. A question asked again about the same content is answered from the log. Rows about
other content describe an earlier state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, TypeVar

import msgspec

from inshrink_core.errors import StorageError
from inshrink_core.evaluate import Comparison, EvaluatedStep, Evaluator
from inshrink_core.evaluate.comparison import Compared
from inshrink_core.execution.results import (
    MAX_SHARED_NBYTES,
    add_line,
    key_digest,
    results_folder,
    shared_lines,
    user_cache_folder,
)
from inshrink_core.request import Option

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.chain.report import ChainReport
    from inshrink_core.formats import Run

_VERSION: Final = 1
_FOLDER: Final = "measured"
_OF_RUN: Final = "run"
_SUFFIX: Final = ".jsonl"
_LAST_TIME: Final = 4_102_444_800

R = TypeVar("R")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Choice between stored results and new measurements.

    Parameters
    ----------
    again
        Measure again, even if the same measurement is stored.
    """

    again: Annotated[bool, Option()] = False


class EvaluatorId(NamedTuple):
    """Identity of an evaluator: its name, and a digest of its file and settings."""

    name: str
    digest: str

    @classmethod
    def of(cls, evaluator: Evaluator) -> Self:
        """Return the identity of an evaluator, from its current file."""
        from inshrink_core.search.trials import evaluator_digest

        return cls(evaluator.spec, evaluator_digest(evaluator))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A stored answer: the verb, the Unix time, the digest of the content, the question and the document.

    `question` and `document` come from a file: their values are not trusted.
    """

    kind: str
    at: float
    content: str
    question: dict[str, Any]
    document: dict[str, Any]
    v: int = _VERSION


@dataclass(frozen=True, slots=True)
class _Question:
    """The question of a comparison (`question_of`)."""

    evaluator: str
    name: str
    run: dict[str, str] = field(default_factory=dict)
    before: dict[str, int | None] = field(default_factory=dict)


class Measurements:
    """Stored measurements of one archive or run.

    Parameters
    ----------
    folder
        Folder of the log; None stores and knows nothing.
    name
        Name of the log, without suffix.
    content
        Digest of the current content.
    """

    def __init__(self, folder: Path | None, name: str, content: str) -> None:
        self._file = None if folder is None else folder / _FOLDER / f"{name}{_SUFFIX}"
        self.content = content

    @classmethod
    def of_archive(cls, archive: Archive | ChainReport) -> Self:
        """Return the measurements of an archive; nothing is known of a report without an id."""
        from inshrink_core.chain.report import ChainReport, content_digest

        if isinstance(archive, ChainReport):
            name, content = archive.archive_id, archive.content
        else:
            reader = archive.reader
            name = reader.archive_id.hex()
            content = content_digest(name, ((o.frame_id.hex(), o.digest.hex()) for o in reader.frames))
        return cls(user_cache_folder(make=False) if name else None, name, content)

    @classmethod
    def of_run(cls, run: Run, *, make: bool = False) -> Self:
        """Return the measurements of a run, identified by the paths, sizes and times of its files."""
        return cls(results_folder(run.directory, make=make), _OF_RUN, run_content(run))

    def add(self, kind: str, question: Mapping[str, Any], document: Mapping[str, Any]) -> None:
        """Store an answer; a failure to write is logged and not raised."""
        row = {"v": _VERSION, "kind": kind, "at": time.time(), "content": self.content}
        row |= {"question": dict(question), "document": dict(document)}
        try:
            if self._file is not None:
                add_line(self._file, row, MAX_SHARED_NBYTES)
        except StorageError as error:
            _logger.info("%s", error)

    def rows(self, kind: str, *, earlier: bool = False) -> Iterator[Measurement]:
        """Yield the answers of a verb, newest first: about the current content, or any `earlier` one."""
        every = () if self._file is None else shared_lines(self._file)
        lines = (row for row in every if row.get("kind") == kind)
        read = (answer for row in lines if (answer := read_as(Measurement, row)) is not None)
        known = [entry for entry in read if entry.v == _VERSION and 0 <= entry.at <= _LAST_TIME]
        for entry in sorted(known, key=lambda entry: -entry.at):
            if (entry.content != self.content) is earlier:
                yield entry

    def find(self, kind: str, question: Mapping[str, Any]) -> Measurement | None:
        """Return the newest answer to a question about the current content; None if none is stored."""
        asked = key_digest(question)
        return next((row for row in self.rows(kind) if key_digest(row.question) == asked), None)


def run_content(run: Run) -> str:
    """Return a digest of a run's content, from the paths, sizes and times of its files."""
    return key_digest({"run": [run.identity(step) for step in run.steps]})


def read_as(kind: type[R], values: Mapping[str, Any]) -> R | None:
    """Return a record made of JSON values; None, with a log message, if they do not fit."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        _logger.info("what was kept is passed over: %s", error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Known measurements of an archive: the last of each step, by one evaluator.

    Parameters
    ----------
    archive
        Path of the archive when measured. Untrusted text, as the evaluator's name.
    at
        Unix time of the newest measurement.
    evaluator
        The evaluator that measured.
    comparison
        The steps, and the worst figures; `measured_at` is the time of the oldest measurement.
    n_samples
        Number of samples predicted, if known.
    standard_errors
        Standard error of the originals' metric, by step.
    is_current
        Whether the measurements describe the archive's current content; otherwise an earlier one.
    """

    archive: str
    at: float
    evaluator: EvaluatorId
    comparison: Comparison
    n_samples: int | None = None
    standard_errors: Mapping[int, float]
    is_current: bool = True

    @property
    def worst(self) -> EvaluatedStep | None:
        """The step that drops most."""
        return self._largest("drop")

    @property
    def costliest(self) -> EvaluatedStep | None:
        """The step whose restore costs most."""
        return self._largest("restore_cost")

    def _largest(self, figure: str) -> EvaluatedStep | None:
        known = {row: value for row in self.comparison.steps if (value := getattr(row, figure)) is not None}
        return max(known, key=known.__getitem__, default=None)

    @property
    def name(self) -> str:
        """Name of the archive's file. Untrusted text."""
        return Path(self.archive).name


def known_by_metric(archive: Archive | ChainReport) -> dict[str, Known]:
    """Return the measurements of an archive for each metric, by the evaluator that measured it last.

    Parameters
    ----------
    archive
        The archive.

    Returns
    -------
    dict
        Measurements of the current content, the newest first; if none exist, of the content before the last
        change.
    """
    store = Measurements.of_archive(archive)
    for earlier in (False, True):
        rows = list(store.rows("compare", earlier=earlier))
        if earlier:  # Use a single earlier state of the archive.
            rows = [row for row in rows if row.content == rows[0].content]
        of_metric: dict[str, list[Measurement]] = {}
        for row in rows:
            of_metric.setdefault(str(row.document.get("metric")), []).append(row)
        found = {metric: known for metric, own in of_metric.items() if (known := merged(own)) is not None}
        if found:
            path = str(archive.path)
            return {m: replace(known, archive=path, is_current=not earlier) for m, known in found.items()}
    return {}


def merged(
    rows: Sequence[Measurement],
    evaluator: EvaluatorId | None = None,
    originals: Mapping[str, str] | None = None,
) -> Known | None:
    """Merge comparisons of the same content: for each step the newest, by one evaluator.

    Parameters
    ----------
    rows
        Comparisons, the newest first.
    evaluator
        The evaluator; by default the one that measured last.
    originals
        Identities of the originals, by step as text; results for other originals are ignored.
    """
    from inshrink_core.evaluate import Comparison

    steps: dict[int, EvaluatedStep] = {}
    errors: dict[int, float] = {}
    used: list[tuple[Measurement, Compared]] = []
    for row in rows:
        asked, found = read_as(_Question, row.question), read_as(Compared, row.document)
        if asked is None or found is None or not found.steps:
            continue
        if evaluator is None:
            evaluator = EvaluatorId(asked.name, asked.evaluator)
        if asked.evaluator != evaluator.digest:
            continue
        fresh = [
            item for item in found.steps if item.step not in steps and _is_of(asked, item.step, originals)
        ]
        if fresh:
            used.append((row, found))
            steps |= {entry.step: entry for entry in fresh}
            known = found.standard_errors
            errors |= {entry.step: known[entry.step] for entry in fresh if entry.step in known}
    if not steps or evaluator is None:
        return None
    (newest, first), oldest = used[0], min(row.at for row, _ in used)
    ordered = [steps[step] for step in sorted(steps)]
    return Known(
        archive="",
        at=newest.at,
        evaluator=evaluator,
        comparison=Comparison.over(
            ordered, first.metric, first.direction, device=first.device, measured_at=oldest
        ),
        n_samples=first.n_samples,
        standard_errors=errors,
    )


def _is_of(asked: _Question, step: int, originals: Mapping[str, str] | None) -> bool:
    """Return whether a step was compared with the current original, and with the current one before it."""
    if originals is None:
        return True
    before = asked.before.get(str(step))
    needed = [str(step), *([] if before is None else [str(before)])]
    return all(row in originals and asked.run.get(row) == originals[row] for row in needed)


def question_of(
    evaluator: EvaluatorId, run: Run, steps: Sequence[int], before: Mapping[int, int | None]
) -> dict[str, Any]:
    """Return the question of a comparison: the evaluator, the originals, and the step before each."""
    looked_at = {*steps, *(row for row in before.values() if row is not None)}
    return {
        "evaluator": evaluator.digest,
        "name": evaluator.name,
        "run": {str(step): run.identity(step) for step in sorted(looked_at)},
        "before": {str(step): before.get(step) for step in steps},
    }
