"""Comparing what restores with what was trained: the task metric of every step, and the drop."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import Report
from inshrink_core.request import Option, R_co, Request, python_call
from inshrink_core.text import nats, percent, plain, printable
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
    Known,
    Measurements,
    compared_document,
    merged,
    question_of,
)
from inshrink_core.verbs.shared.showing import known_fact, show_facts, show_table, show_unreadable

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import Archive
    from inshrink_core.evaluate import Comparison, EvaluatedStep, Evaluation
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

    def rows(self) -> list[dict[str, Any]]:
        """Return the documents of the comparisons, each with its archive."""
        return [{"archive": path, **found.to_json()} for path, found in self.archives]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compare --json``: of one archive alone its comparison."""
        return self.archives[0][1].to_json() if len(self.archives) == 1 else {"archives": self.rows()}

    def show(self, console: Console) -> None:
        """Print a row a step of each archive, and the worst of them."""
        show_unreadable(console, self.archives[0][1].unreadable)
        for path, comparison in self.archives:
            if len(self.archives) > 1:
                console.print(printable(path), style="bold", soft_wrap=True)
            _show(console, comparison, self.passed.get(path, ()), with_gain=self.with_gain)


def _show(console: Console, comparison: Comparison, passed: Sequence[int], *, with_gain: bool) -> None:
    """Print a row a step, with the previous checkpoint's figures beside the archive's."""
    mark = ("≈",) if passed else ()
    rows = (
        (
            str(row.step),
            plain(row.original),
            plain(row.restored),
            percent(row.drop),
            nats(row.divergence),
            percent(row.stale_drop),
            nats(row.stale_divergence),
            *(sign if row.step in passed else "" for sign in mark),
        )
        for row in comparison.steps
    )
    headings = (
        "step",
        "original",
        "restored",
        "drop",
        "divergence",
        "previous drop",
        "previous div.",
    )
    show_table(console, (*headings, *("" for _ in mark)), rows, left=())
    if passed:
        console.print(
            "≈ the previous checkpoint, which stores nothing, does as well here: the step proves little"
        )
    if with_gain:
        gains = (
            (str(row.step), plain(row.restore_gain, 3), plain(row.restore_noise, 3))
            for row in comparison.steps
        )
        console.print()
        title = "After a restore at the step before"
        show_table(console, ("step", "gain", "noise"), gains, left=(), title=title)
    console.print()
    show_facts(
        console,
        [
            ("metric", f"{printable(comparison.metric)}, {comparison.direction} is better"),
            ("largest drop", percent(comparison.max_drop)),
            ("largest divergence", f"{nats(comparison.max_divergence)} nats"),
            ("mean divergence", f"{nats(comparison.mean_divergence)} nats"),
            ("largest restore cost", f"{percent(comparison.max_restore_cost)} of the loss"),
            known_fact(comparison.measured_at),
        ],
    )


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

    def _compared(self, archives: Sequence[ArchiveLike], against: Run | PathLike) -> _Compared:
        """Compare archives with their run, but for what is known; what is found is kept."""
        from inshrink_core.evaluate import Comparison, OriginalEvaluations, compare_steps
        from inshrink_core.metrics import Direction

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
            evaluator = EvaluatorId.of(judge)
            for one, common in zip(opened, chosen, strict=True):
                store = Measurements.of_archive(one, run.directory, make=True)
                question = question_of(evaluator, run, common, _before(one, run))
                reporting = _Reporting(self.progress, str(one.path), done, total)
                had = None if self.again else merged(tuple(store.rows("compare")), evaluator, question["run"])
                rows = {} if had is None else self._answers(had.comparison, common)
                if had is not None:
                    reporting.tell(had, rows.values())
                measured_at = had.comparison.measured_at if had is not None and rows else None
                missing = [step for step in common if step not in rows]
                device = one.device if missing or had is None else had.comparison.device
                if missing:
                    try:
                        compared = compare_steps(
                            run,
                            one.sequential(),
                            judge,
                            steps=missing,
                            known=originals if len(opened) > 1 else None,
                            progress=reporting.count,
                            on_step=reporting.take,
                        )
                        compared = _with_gains(compared, one, run) if self.gain else compared
                        reporting.rows = list(compared.steps)
                    finally:  # What was measured before an interruption is known to the next attempt.
                        if reporting.rows:
                            store.add("compare", question, reporting.document(one.device))
                    rows |= {row.step: row for row in compared.steps}
                metric, direction = reporting.about
                of_all = Comparison.over(
                    [rows[step] for step in common],
                    metric,
                    Direction(direction),
                    device=device,
                    unreadable=run.unreadable,
                    measured_at=measured_at,
                )
                found.append((str(one.path), of_all))
                done += len(common)
            originals.clear()
        return _Compared(Comparisons(archives=tuple(found)), run, asked)

    def _answers(self, known: Comparison, steps: Collection[int]) -> dict[int, EvaluatedStep]:
        """Return what is known of these steps, with its gain where that is asked for."""
        return {
            row.step: row
            for row in known.steps
            if row.step in steps and (not self.gain or row.restore_gain is not None or row.stale_drop is None)
        }


class _Compared(NamedTuple):
    """What was found, of what run, and the steps that were asked for."""

    comparisons: Comparisons
    run: Run
    asked: Sequence[int] | None


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
        return self._compared([self.archive], self.against).comparisons.archives[0][1]


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
class _Reporting:
    """Reports how far a comparison is, and what was found of a step of one archive among several."""

    progress: OnProgress | None
    archive: str
    before: int
    total: int
    found: dict[str, Any] = field(default_factory=dict)
    rows: list[EvaluatedStep] = field(default_factory=list)
    standard_errors: dict[int, float | None] = field(default_factory=dict)
    n_samples: int | None = None
    about: tuple[str, str] = ("", "")

    def take(self, row: EvaluatedStep, original: Evaluation) -> None:
        """Take in a step."""
        self.rows.append(row)
        self.standard_errors[row.step] = original.standard_errors.get(original.metric)
        self.n_samples = None if original.log_probs is None else len(original.log_probs)
        self.about = original.metric, original.direction.value
        self._take(row)

    def _take(self, row: EvaluatedStep) -> None:
        metric, direction = self.about
        self.found = {
            **asdict(row),
            "archive": self.archive,
            "metric": metric,
            "direction": direction,
            "standard_error": self.standard_errors.get(row.step),
            "n": self.n_samples,
        }

    def tell(self, known: Known, rows: Iterable[EvaluatedStep]) -> None:
        """Report what was known already."""
        self.about = known.comparison.metric, known.comparison.direction.value
        self.standard_errors, self.n_samples = dict(known.standard_errors), known.n_samples
        n_known = 0
        for done, row in enumerate(rows, start=1):
            self._take(row)
            self.count(done, 0, row.step)
            n_known = done
        self.before += n_known

    def document(self, device: str) -> dict[str, Any]:
        """Return what is kept of the steps that were measured."""
        errors = {row.step: self.standard_errors.get(row.step) for row in self.rows}
        return compared_document(self.rows, (*self.about, device), self.n_samples, errors)

    def count(self, done: int, _: int, step: int) -> None:
        """Report it."""
        if self.progress is not None:
            self.progress(Progress("compare", self.before + done, self.total, step, found=self.found))


def _with_gains(comparison: Comparison, archive: Archive, run: Run) -> Comparison:
    """Add gain and noise to every step that has a previous one."""
    from inshrink_core.analysis.gain import restore_gain

    measured = restore_gain(archive, run, steps=[row.step for row in comparison.steps], device=archive.device)
    gains = {one.step: one for one in measured.steps}
    rows = [
        replace(row, restore_gain=gains[row.step].gain, restore_noise=gains[row.step].noise)
        if row.step in gains
        else row
        for row in comparison.steps
    ]
    return replace(comparison, steps=tuple(rows))
