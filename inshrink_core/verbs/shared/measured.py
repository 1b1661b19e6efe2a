"""Store of measurements of archives and runs, shared by the verbs and the explorer.

The store is a log of JSON lines, in the run's folder if that is writable, else in the user's cache: one log
per archive, named by the archive's id, and one for the run itself. Each row records an answer: the digest of
the content, the question, the document and the time. A question asked again about the same content is
answered from the log. Rows about other content describe an earlier state.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    folders
        Folders of the logs.
    name
        Name of the log, without suffix.
    content
        Digest of the current content.
    """

    def __init__(self, folders: Iterable[Path], name: str, content: str) -> None:
        self._files = [folder / f"{name}{_SUFFIX}" for folder in dict.fromkeys(folders)]
        self.content = content

    @classmethod
    def of_archive(
        cls, archive: Archive | ChainReport, run: Path | None = None, *, make: bool = False
    ) -> Self:
        """Return the measurements of an archive.

        Parameters
        ----------
        archive
            The archive; nothing is known of a report without an id.
        run
            Directory of its run, if known; for ``NAME.inshrink`` the folder ``NAME`` beside it is found
            anyway.
        make
            Whether to make the folders, for a result to be stored.
        """
        from inshrink_core.chain.report import ChainReport, content_digest

        if isinstance(archive, ChainReport):
            name, content = archive.archive_id, archive.content
        else:
            reader = archive.reader
            name = reader.archive_id.hex()
            content = content_digest(name, ((o.frame_id.hex(), o.digest.hex()) for o in reader.frames))
        return cls(_folders(Path(archive.path), run, make=make) if name else (), name, content)

    @classmethod
    def of_run(cls, run: Run, *, make: bool = False) -> Self:
        """Return the measurements of a run, identified by the paths, sizes and times of its files."""
        found = results_folder(run.directory, make=make)
        return cls([] if found is None else [found / _FOLDER], _OF_RUN, run_content(run))

    def add(self, kind: str, question: Mapping[str, Any], document: Mapping[str, Any]) -> None:
        """Store an answer; a failure to write is logged and not raised."""
        row = {"v": _VERSION, "kind": kind, "at": time.time(), "content": self.content}
        row |= {"question": dict(question), "document": dict(document)}
        for file in self._files:
            try:
                add_line(file, row, MAX_SHARED_NBYTES)
            except StorageError as error:
                _logger.info("%s", error)

    def rows(self, kind: str, *, earlier: bool = False) -> Iterator[Measurement]:
        """Yield the answers of a verb, newest first: about the current content, or any `earlier` one."""
        lines = (row for file in self._files for row in shared_lines(file) if row.get("kind") == kind)
        read = (answer for row in lines if (answer := read_as(Measurement, row)) is not None)
        known = [entry for entry in read if entry.v == _VERSION and 0 <= entry.at <= _LAST_TIME]
        found = {(entry.at, entry.content, key_digest(entry.question)): entry for entry in known}
        for entry in sorted(found.values(), key=lambda entry: -entry.at):
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


def _folders(archive: Path, run: Path | None, *, make: bool) -> list[Path]:
    """Return the folders of an archive's measurements: its run's, and one found from the archive alone."""
    beside = Path(str(archive).removesuffix(".inshrink"))
    # A folder without results is not touched: it may only share the name.
    has_results = beside != archive and beside.is_dir() and results_folder(beside, make=False) is not None
    is_run = has_results and ((beside / ".inshrink").is_dir() or run is not None)
    places = [item for item in (run, beside if is_run else None) if item is not None]
    found = [results_folder(place, make=make) for place in dict.fromkeys(map(_real, places))]
    folders = [row / _FOLDER for row in found if row is not None]
    leads_to = is_run and (run is None or _real(run) == _real(beside))
    users = None if leads_to and make else user_cache_folder()
    return folders if users is None else [*folders, users / _FOLDER]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


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


def known_by_metric(archive: Archive | ChainReport, run: Path | None = None) -> dict[str, Known]:
    """Return the measurements of an archive for each metric, by the evaluator that measured it last.

    Parameters
    ----------
    archive
        The archive.
    run
        The directory of its run, if known (`Measurements.of_archive`).

    Returns
    -------
    dict
        Measurements of the current content, the newest first; if none exist, of the content before the last
        change.
    """
    store = Measurements.of_archive(archive, run)
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
