"""Compare restored steps with the originals: the task metric of every step, and its drop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.evaluate.comparison import (
    Compared,
    Comparison,
    EvaluatedStep,
    OriginalEvaluations,
    compared_steps,
)
from inshrink_core.evaluate.evaluator import Evaluator
from inshrink_core.execution.progress import Counter
from inshrink_core.metrics import Direction
from inshrink_core.report import Part, Report, parts_of, plain_value
from inshrink_core.request import Option, Request, python_call
from inshrink_core.verbs.shared.groups import (
    AnyArchive,
    AnyRun,
    ArchiveLike,
    Bounding,
    Opening,
    RunLike,
    Sparing,
    Stepping,
    steps_of,
)
from inshrink_core.verbs.shared.measured import (
    Asking,
    EvaluatorId,
    Measurements,
    merged,
    question_of,
)

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.formats import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons(Report):
    """Comparisons of several archives with their run.

    Parameters
    ----------
    archives
        Path and comparison of each.
    failed
        By path of an archive that could not be compared, beside others that could, the reason.
    failure
        The error of the exit code: a bound that is not kept, or originals that cannot be read; None without.

    Examples
    --------
    >>> Comparisons(archives=()).to_json()
    {'archives': []}
    """

    archives: tuple[tuple[str, Comparison], ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    failure: InshrinkError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compare --json``; for a single archive, its comparison.

        Returns
        -------
        archives : [object]
            For each of several archives its ``archive`` and the keys of a single comparison.
        failed : {str}
            Reason for each archive left out; absent without any.
        """
        rows = [{"archive": path, **found.to_json()} for path, found in self.archives]
        if self.failed:
            return {"archives": rows, "failed": dict(self.failed)}
        return self.archives[0][1].to_json() if len(rows) == 1 else {"archives": rows}

    def shown(self) -> Iterator[Part]:
        """Yield one row per step of each archive, and the largest figures."""
        for path, comparison in self.archives:
            yield "archive", path
            yield from comparison.shown()
        yield from parts_of("failed", dict(self.failed))


@dataclass(frozen=True)
class CompareArchives(Sparing, Bounding, Stepping, Asking, EvaluatorRequest, Opening, Request[Comparisons]):
    """Evaluate every step as trained, as restored, and with the previous checkpoint in its place.

    Parameters
    ----------
    archives
        One or more archives of the run; each original step is evaluated once.
    against
        The original run.

    Raises
    ------
    InputError
        No archive is given, or one has no step in common with the run.
    UntrustedCodeError
        The run's own evaluator needs consent before it is executed; bundled samples need none.
    EvaluatorError
        The evaluator failed.
    StorageError
        The disk has no room for the predictions of the originals, which a temporary folder holds.

    Notes
    -----
    Results are stored with the run. The next comparison of the same archive with the same originals by the
    same evaluator reuses them, with their time in `measured_at`. A bound that is not kept is the report's
    `failure`. Unreadable steps of the run are not compared, and listed in a comparison's `unreadable`. To
    find them, every original is read once first.

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
    _: KW_ONLY

    COMMAND: ClassVar = "compare"
    UNIT: ClassVar = "steps"
    EXAMPLES: ClassVar = (
        "inshrink compare digits.inshrink --against runs/digits --evaluator judge.py:evaluate",
        "inshrink compare digits.inshrink --against runs/digits --trust-run --max-drop 0.01",
        "inshrink compare lattice.inshrink uniform.inshrink --against runs/digits --trust-run",
    )

    def perform(self) -> Comparisons:
        """Compare the archives, and check the bounds."""
        from inshrink_core.formats import unreadable_error
        from inshrink_core.search.bounds import failure_of

        opened = [self.opened_archive(archive) for archive in self.archives]
        if not opened:
            raise InputError("there is no archive to compare", remedy="name one, or several of the run")
        run = self.opened_run(self.against)
        asked = steps_of(opened[0] if len(opened) == 1 else run, self.steps)
        pairs = [pair for archive in opened for pair in _previous(archive, run).items()]
        looked_at = [item for pair in pairs if asked is None or pair[0] in asked for item in pair]
        run = run.readable({item for item in looked_at if item is not None})
        chosen = [_common_steps(archive, run, asked, alone=len(opened) == 1) for archive in opened]
        found: list[tuple[str, Comparison]] = []
        errors: dict[str, InshrinkError] = {}
        count = Counter(self.progress, "compare", sum(map(len, chosen)))

        def tell(row: EvaluatedStep, about: Mapping[str, Any]) -> None:
            count.add(1, row.step, found={**asdict(row), **about})

        with (
            self.resolve(run) as evaluator,
            tempfile.TemporaryDirectory(prefix="inshrink-compare-") as folder,
        ):
            originals = OriginalEvaluations(lambda step: evaluator.evaluate(run[step]), Path(folder))
            for archive, common in zip(opened, chosen, strict=True):
                path = str(archive.path)
                try:
                    found.append((path, self._compared(archive, run, common, evaluator, originals, tell)))
                except InshrinkError as error:
                    errors[path] = error
            originals.clear()
        if not found:
            raise next(iter(errors.values()))
        limits, unreadable = self.bounds.limits, () if self.skip_damaged else run.unreadable
        failures = [
            unreadable_error(unreadable, run.address, asked),
            *errors.values(),
            *(failure_of(limits, comparison, path) for path, comparison in found),
        ]
        return Comparisons(
            archives=tuple(found),
            failed={path: str(error) for path, error in errors.items()},
            failure=next((failure for failure in failures if failure is not None), None),
        )

    def _compared(
        self,
        archive: Archive,
        run: Run,
        steps: Sequence[int],
        evaluator: Evaluator,
        originals: OriginalEvaluations,
        tell: Callable[[EvaluatedStep, Mapping[str, Any]], None],
    ) -> Comparison:
        """Compare an archive at some steps; reuse stored results, and store new ones."""
        store = Measurements.of_archive(archive)
        measured_by = EvaluatorId.of(evaluator)
        before = _previous(archive, run)
        question = question_of(measured_by, run, steps, before)
        had = None if self.again else merged(tuple(store.rows("compare")), measured_by, question["run"])
        there: dict[int, EvaluatedStep] = {}
        about: dict[str, Any] = {"archive": str(archive.path)}
        if had is not None:
            found = had.comparison
            about |= {"metric": found.metric, "direction": found.direction.value, "n": had.n_samples}
            there = {row.step: row for row in found.steps if row.step in steps}
            for row in there.values():
                tell(row, about | {"standard_error": had.standard_errors.get(row.step)})
        device, measured_at = archive.device, had.comparison.measured_at if had and there else None
        missing = {step: before[step] for step in steps if step not in there}
        if had is not None and not missing:
            device = had.comparison.device
        view, fresh, errors = archive.sequential(), list[EvaluatedStep](), dict[int, float]()
        rows = compared_steps(originals, lambda step: evaluator.evaluate(view[step]), missing, evaluator.spec)
        try:
            for row, original in rows:
                fresh.append(row)
                n = None if original.log_probs is None else len(original.log_probs)
                about |= {"metric": original.metric, "direction": original.direction.value, "n": n}
                error = original.standard_errors.get(original.metric)
                if error is not None:
                    errors[row.step] = error
                tell(row, about | {"standard_error": error})
        finally:  # Store results measured before an interruption, too.
            if fresh:
                compared = Compared(
                    metric=about["metric"],
                    direction=about["direction"],
                    device=device,
                    n_samples=about["n"],
                    standard_errors=errors,
                    steps=tuple(fresh),
                )
                store.add("compare", question, plain_value(compared))
        there |= {row.step: row for row in fresh}
        return Comparison.over(
            [there[step] for step in steps],
            about["metric"],
            Direction(about["direction"]),
            device=device,
            unreadable=run.unreadable,
            measured_at=measured_at,
        )


compare_archives = python_call(CompareArchives)


def compare(archive: ArchiveLike, against: RunLike, **options: Any) -> Comparison:
    """Compare one archive with its run.

    Parameters
    ----------
    archive, against
        The archive, and the original run.
    **options
        Options of `compare_archives`; bounds are not checked.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[-2:])
    >>> inshrink_core.compare(target, run).metric
    'accuracy'
    """
    return CompareArchives([archive], against, **options).perform().archives[0][1]


def _previous(archive: Archive, run: Run) -> dict[int, int | None]:
    """Return, for each step that an archive and its run share, the shared step before it."""
    common = [step for step in run.steps if step in archive.listed_steps]
    return dict(zip(common, [None, *common], strict=False))


def _common_steps(archive: Archive, run: Run, asked: Sequence[int] | None, *, alone: bool) -> tuple[int, ...]:
    """Return the steps at which an archive is compared.

    Raises
    ------
    InputError
        No step is left.
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
