"""Comparing what restores with what was trained: the task metric of every step, and the drop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import Part, Report, Table
from inshrink_core.request import Option, R_co, Request, python_call
from inshrink_core.text import nats, percent, plain
from inshrink_core.verbs.shared.groups import (
    AnyArchive,
    AnyRun,
    ArchiveLike,
    Bounding,
    Opening,
    PathLike,
    Sparing,
    Stepping,
    steps_of,
)
from inshrink_core.verbs.shared.measured import (
    Asking,
    EvaluatorId,
    Measurements,
    compared_document,
    merged,
    question_of,
)
from inshrink_core.verbs.shared.showing import known_fact, unreadable_lines

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.evaluate import Comparison, EvaluatedStep, Evaluation, Evaluator
    from inshrink_core.formats import Run

__all__ = [
    "Compare",
    "CompareArchives",
    "Comparisons",
    "compare",
    "compare_archives",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons(Report):
    """Several archives of a run, each compared with it.

    Parameters
    ----------
    archives
        Path and comparison of each.
    passed
        Of an archive, by its path, the steps that prove little.
    with_gain
        Whether gain and noise were asked for.
    failure
        Why the command ends with an error: a bound that is not kept, or originals that cannot be read; None
        where it does not.

    Examples
    --------
    >>> Comparisons(archives=()).to_json()
    {'archives': []}
    """

    archives: tuple[tuple[str, Comparison], ...]
    passed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    with_gain: bool = False
    failure: InshrinkError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compare --json``: of one archive alone its comparison."""
        rows = [{"archive": path, **found.to_json()} for path, found in self.archives]
        return self.archives[0][1].to_json() if len(rows) == 1 else {"archives": rows}

    def shown(self) -> Iterator[Part]:
        """Yield a row a step of each archive, and the worst of them."""
        yield from unreadable_lines(self.archives[0][1].unreadable)
        for path, one in self.archives:
            passed = self.passed.get(path, ())
            columns = {heading: form for heading, (_, form) in _COLUMNS.items()}
            rows = [
                (*(getattr(row, name) for name, _ in _COLUMNS.values()), "≈" if row.step in passed else "")
                for row in one.steps
            ]
            yield Table(columns | {"": None}, rows, title=path if len(self.archives) > 1 else "")
            if passed:
                yield "≈ the previous checkpoint, which stores nothing, does as well: the step proves little"
            if self.with_gain:
                yield Table(
                    {"step": str, "gain": _short, "noise": _short},
                    [(row.step, row.restore_gain, row.restore_noise) for row in one.steps],
                    title="After a restore at the step before",
                )
            yield "metric", f"{one.metric}, {one.direction} is better"
            yield "largest drop", percent(one.max_drop)
            yield "largest divergence", f"{nats(one.max_divergence)} nats"
            yield "mean divergence", f"{nats(one.mean_divergence)} nats"
            yield "largest restore cost", f"{percent(one.max_restore_cost)} of the loss"
            yield known_fact(one.measured_at)


_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str] | None]] = {
    "step": ("step", str),
    "original": ("original", plain),
    "restored": ("restored", plain),
    "drop": ("drop", percent),
    "divergence": ("divergence", nats),
    "previous drop": ("stale_drop", percent),
    "previous div.": ("stale_divergence", nats),
}


def _short(value: float | None) -> str:
    return plain(value, 3)


@dataclass(frozen=True)
class _Comparing(Stepping, Asking, EvaluatorRequest, Opening, Request[R_co]):
    """How archives of a run are compared with it.

    Parameters
    ----------
    against
        The original run.
    gain
        Measure too how much of each step's movement a restore would keep, which costs an encoding of it.
    """

    _: KW_ONLY
    gain: bool = False

    def _compared(
        self, archives: Sequence[ArchiveLike], against: Run | PathLike
    ) -> tuple[Comparisons, Run, Sequence[int] | None]:
        """Compare archives with their run; return what was found, the run, and the steps asked for."""
        from inshrink_core.evaluate import OriginalEvaluations

        opened = [self.opened_archive(one) for one in archives]
        if not opened:
            raise InputError("there is no archive to compare", remedy="name one, or several of the run")
        run = self.opened_run(against)
        asked = steps_of(opened[0] if len(opened) == 1 else run, self.steps)
        run = run.readable(_looked_at(opened, run, asked))
        chosen = [_common_steps(one, run, asked, alone=len(opened) == 1) for one in opened]
        found, done, total = [], 0, sum(map(len, chosen))
        with (
            self.resolve(run) as judge,
            tempfile.TemporaryDirectory(prefix="inshrink-compare-") as folder,
        ):
            originals = OriginalEvaluations(lambda step: judge.evaluate(run[step]), Path(folder))
            for one, common in zip(opened, chosen, strict=True):
                rows = _Rows(self.progress, str(one.path), done, total)
                known = originals if len(opened) > 1 else None
                found.append((str(one.path), self._compared_one(one, run, common, judge, known, rows)))
                done += len(common)
            originals.clear()
        return Comparisons(archives=tuple(found)), run, asked

    def _compared_one(
        self,
        archive: Archive,
        run: Run,
        steps: Sequence[int],
        judge: Evaluator,
        known: Callable[[int], Evaluation] | None,
        rows: _Rows,
    ) -> Comparison:
        """Compare an archive at some steps, except at those whose results are stored; store the others."""
        from inshrink_core.evaluate import Comparison, compare_steps
        from inshrink_core.metrics import Direction

        store = Measurements.of_archive(archive, run.directory, make=True)
        evaluator = EvaluatorId.of(judge)
        question = question_of(evaluator, run, steps, _before(archive, run))
        had = None if self.again else merged(tuple(store.rows("compare")), evaluator, question["run"])
        there: dict[int, EvaluatedStep] = {}
        device, measured_at = archive.device, None
        if had is not None:
            there = {
                row.step: row
                for row in had.comparison.steps
                if row.step in steps
                and (not self.gain or row.restore_gain is not None or row.stale_drop is None)
            }
            rows.about = had.comparison.metric, had.comparison.direction.value
            rows.standard_errors, rows.n_samples = dict(had.standard_errors), had.n_samples
            for row in there.values():
                rows.report(row)
            measured_at = had.comparison.measured_at if there else None
            device = device if len(there) < len(steps) else had.comparison.device
        if missing := [step for step in steps if step not in there]:
            try:
                compare_steps(run, archive.sequential(), judge, steps=missing, known=known, on_step=rows.take)
                rows.rows = _with_gains(rows.rows, archive, run) if self.gain else rows.rows
            finally:  # What was measured before an interruption is known to the next attempt.
                if rows.rows:
                    errors = {row.step: rows.standard_errors.get(row.step) for row in rows.rows}
                    about = (*rows.about, archive.device)
                    store.add(
                        "compare", question, compared_document(rows.rows, about, rows.n_samples, errors)
                    )
            there |= {row.step: row for row in rows.rows}
        return Comparison.over(
            [there[step] for step in steps],
            rows.about[0],
            Direction(rows.about[1]),
            device=device,
            unreadable=run.unreadable,
            measured_at=measured_at,
        )


@dataclass(frozen=True)
class Compare(_Comparing["Comparison"]):
    """Evaluate every step as trained, as restored, and with the previous checkpoint in its place.

    Parameters
    ----------
    archive
        The archive to judge.

    Raises
    ------
    UntrustedCodeError
        The run's own evaluator would be executed without consent; bundled samples need none.
    EvaluatorError
        The evaluator failed.

    Notes
    -----
    What cannot be read of the run is not compared, and named in the comparison's `unreadable`. To know,
    every original is read once before.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[-2:])
    >>> inshrink_core.compare(target, run).metric
    'accuracy'
    """

    archive: ArchiveLike
    against: Annotated[AnyRun, Option(("--against",), metavar="RUN")]

    def perform(self) -> Comparison:
        """Compare it."""
        return self._compared([self.archive], self.against)[0].archives[0][1]


compare = python_call(Compare)


@dataclass(frozen=True)
class CompareArchives(Sparing, Bounding, _Comparing[Comparisons]):
    """Evaluate every step as trained, as restored, and with the previous checkpoint in its place.

    Parameters
    ----------
    archives
        The archive to judge, or several of the run: each original step is evaluated once.

    Raises
    ------
    InputError
        There is no archive, or one that has no step in common with the run.
    UntrustedCodeError, EvaluatorError
        As `compare`.
    StorageError
        There is no room for the predictions of the originals, which several archives share in a temporary
        folder.

    Notes
    -----
    What was found is kept with the run, and answers the next comparison of the same archive with the same
    originals by the same evaluator (`measured_at` of it says so). A bound that is not kept is the report's
    `failure`.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for coarseness in (1, 8):
    ...     config = {"coarseness": coarseness}
    ...     _ = inshrink_core.compress(run, folder / str(coarseness), steps=run.steps[-1:], config=config)
    >>> found = inshrink_core.verbs.compare_archives([folder / "1", folder / "8"], run).archives
    >>> found[0][1].max_divergence < found[1][1].max_divergence
    True
    """

    archives: Annotated[Sequence[AnyArchive], Option(metavar="ARCHIVE", many=True)]
    against: Annotated[AnyRun, Option(("--against",), metavar="RUN")]

    COMMAND: ClassVar = "compare"
    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink compare digits.inshrink --against runs/digits --evaluator judge.py:evaluate",
        "inshrink compare digits.inshrink --against runs/digits --trust-run --max-drop 0.01",
        "inshrink compare lattice.inshrink uniform.inshrink --against runs/digits --trust-run",
    )

    def perform(self) -> Comparisons:
        """Compare them, and check the bounds."""
        from inshrink_core.formats import unreadable_error
        from inshrink_core.search.bounds import failure_of, passed_by_previous

        found, run, asked = self._compared(self.archives, self.against)
        failures = [
            None
            if self.skip_damaged
            else unreadable_error(found.archives[0][1].unreadable, run.address, asked),
            *(failure_of(self.bounds.limits, comparison, path) for path, comparison in found.archives),
        ]
        return replace(
            found,
            passed={
                path: passed_by_previous(self.bounds.limits, comparison)
                for path, comparison in found.archives
            },
            with_gain=self.gain,
            failure=next((failure for failure in failures if failure is not None), None),
        )


compare_archives = python_call(CompareArchives)


def _before(archive: Archive, run: Run) -> dict[int, int | None]:
    """Return the step before each of those that an archive and its run have in common."""
    common = [step for step in run.steps if step in archive.listed_steps]
    return dict(zip(common, [None, *common], strict=False))


def _looked_at(archives: Sequence[Archive], run: Run, asked: Collection[int] | None) -> set[int]:
    """Return the originals that a comparison looks at: each step that is compared, and the one before it."""
    found: set[int] = set()
    for one in archives:
        common = [step for step in run.steps if step in one.listed_steps]
        for before, step in zip([None, *common], common, strict=False):
            if asked is None or step in asked:
                found |= {step} if before is None else {before, step}
    return found


def _common_steps(archive: Archive, run: Run, asked: Sequence[int] | None, *, alone: bool) -> tuple[int, ...]:
    """Return the steps at which an archive is compared.

    Raises
    ------
    InputError
        There are none.
    """
    from inshrink_core.formats import unreadable_error

    listed = archive.listed_steps
    wanted = listed if asked is None else asked if alone else [step for step in asked if step in listed]
    common = tuple(step for step in wanted if step in run.steps)
    if not common:
        if error := unreadable_error(run.unreadable, run.address, wanted):
            raise error
        raise InputError(
            "the archive and the run have no step in common", where=f"{archive.path} and {run.path}"
        )
    return common


@dataclass(slots=True)
class _Rows:
    """The steps of one archive that were measured, which are reported as they come."""

    progress: OnProgress | None
    archive: str
    done: int
    total: int
    rows: list[EvaluatedStep] = field(default_factory=list)
    standard_errors: dict[int, float | None] = field(default_factory=dict)
    n_samples: int | None = None
    about: tuple[str, str] = ("", "")

    def take(self, row: EvaluatedStep, original: Evaluation) -> None:
        """Add a step that was measured."""
        self.rows.append(row)
        self.standard_errors[row.step] = original.standard_errors.get(original.metric)
        self.n_samples = None if original.log_probs is None else len(original.log_probs)
        self.about = original.metric, original.direction.value
        self.report(row)

    def report(self, row: EvaluatedStep) -> None:
        """Report a step."""
        self.done += 1
        if self.progress is None:
            return
        found = {
            **asdict(row),
            "archive": self.archive,
            "metric": self.about[0],
            "direction": self.about[1],
            "standard_error": self.standard_errors.get(row.step),
            "n": self.n_samples,
        }
        self.progress(Progress("compare", self.done, self.total, row.step, found=found))


def _with_gains(rows: Sequence[EvaluatedStep], archive: Archive, run: Run) -> list[EvaluatedStep]:
    """Add gain and noise to every step that has a previous one."""
    from inshrink_core.analysis.gain import restore_gain

    measured = restore_gain(archive, run, steps=[row.step for row in rows], device=archive.device)
    gains: dict[int, Any] = {
        one.step: {"restore_gain": one.gain, "restore_noise": one.noise} for one in measured.steps
    }
    return [replace(row, **gains.get(row.step, {})) for row in rows]
