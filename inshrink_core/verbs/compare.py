"""Comparing what restores with what was trained: the task metric of every step, and the drop."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.analysis.gain import restore_gain
from inshrink_core.chain import Archive
from inshrink_core.errors import CheckFailedError, InputError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run, open_run
from inshrink_core.search.bounds import FIGURES, REMEDIES, option_of

if TYPE_CHECKING:
    import os

    from inshrink_core.evaluate import Comparison, EvaluatedStep, Evaluation

__all__ = ["CheckedBounds", "Comparisons", "compare", "compare_archives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBounds:
    """What every compared step should keep; None leaves a figure free.

    Parameters
    ----------
    max_drop
        Largest relative change of the metric for the worse: 0.01 is one percent.
    max_divergence
        Largest divergence of the predictions, nats.
    max_restore_cost
        Largest expected relative rise of the loss.

    Raises
    ------
    InputError
        A bound is no number.
    """

    max_drop: float | None = None
    max_divergence: float | None = None
    max_restore_cost: float | None = None

    def __post_init__(self) -> None:
        for name, bound in self._by_figure().items():
            if bound is not None and math.isnan(bound):
                raise InputError(f"{option_of(name)} nan bounds nothing", remedy="give a number")

    def _by_figure(self) -> dict[str, float | None]:
        return {name: getattr(self, f"max_{name}") for name in FIGURES}

    def failure(self, comparison: Comparison, where: str) -> CheckFailedError | InputError | None:
        """Return why the bounds are not kept; None if they are, or there are none."""
        for name, bound in self._by_figure().items():
            if bound is None:
                continue
            rows = comparison.steps
            for row in rows:
                if getattr(row, name) is None:
                    figure = name.replace("_", " ")
                    return InputError(
                        f"{option_of(name)} cannot be checked: step {row.step} has no {figure}",
                        where=where,
                        remedy=REMEDIES[name],
                    )
            worst = max(rows, key=lambda row: float(getattr(row, name)))
            if getattr(worst, name) > bound:
                return CheckFailedError(
                    f"step {worst.step} exceeds {option_of(name)}",
                    where=where,
                    expected=f"at most {bound:g}",
                    found=f"{getattr(worst, name):.4g}",
                )
        return None

    def passed_by_previous(self, comparison: Comparison) -> tuple[int, ...]:
        """Return the steps that prove little: the previous checkpoint keeps the bounds there, too.

        Without bounds, those where it does no worse than the archive.
        """
        return tuple(row.step for row in comparison.steps if self._is_passed(row))

    def _is_passed(self, row: EvaluatedStep) -> bool:
        bounds = self._by_figure()
        free = all(bound is None for bound in bounds.values())
        pairs = [
            (getattr(row, f"stale_{name}"), getattr(row, name) if bound is None else bound)
            for name, bound in bounds.items()
            if bound is not None or free
        ]
        known = [(stale, limit) for stale, limit in pairs if stale is not None and limit is not None]
        return bool(known) and all(stale <= limit for stale, limit in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """Several archives of a run, each compared with it.

    Parameters
    ----------
    archives
        Path and comparison of each.

    Examples
    --------
    >>> Comparisons(archives=()).to_json()
    {'archives': []}
    """

    archives: tuple[tuple[str, Comparison], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compare --json`` of several archives."""
        return {"archives": [{"archive": path, **found.to_json()} for path, found in self.archives]}


def compare(
    archive: Archive | str | os.PathLike[str],
    against: Run | str | os.PathLike[str],
    *,
    evaluator: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    steps: Iterable[int] | None = None,
    gain: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> Comparison:
    """Evaluate every step as trained, as restored, and with the previous checkpoint in its place.

    Parameters
    ----------
    archive
        The archive, or its path.
    against
        The original run, or its path.
    evaluator
        ``FILE.py:FUNCTION``, or the name of an installed one (``docs/evaluators.md``); by default the one the
        run names in ``inshrink.toml``.
    metric, direction
        Which of the evaluator's figures counts, and whether higher or lower is better.
    trust_run
        Execute the evaluator that the run names. Bundled samples need no consent.
    timeout
        Seconds one evaluation may take.
    steps
        Steps to compare; by default every step both hold.
    gain
        Measure restore gain and noise of each step too, which costs an encoding.
    device
        Where tensors are decoded and encoded: ``auto``, ``cpu`` or ``cuda``. An evaluator decides for itself.
    progress
        Called after each step, with what was found of it.

    Raises
    ------
    UntrustedCodeError
        The run's own evaluator would be executed without consent.
    EvaluatorError
        The evaluator failed.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[-2:])
    >>> inshrink_core.compare(target, run).metric
    'accuracy'
    """
    compared = compare_archives(
        [archive],
        against,
        evaluator=evaluator,
        metric=metric,
        direction=direction,
        trust_run=trust_run,
        timeout=timeout,
        steps=steps,
        gain=gain,
        device=device,
        progress=progress,
    )
    return compared.archives[0][1]


def compare_archives(
    archives: Sequence[Archive | str | os.PathLike[str]],
    against: Run | str | os.PathLike[str],
    *,
    evaluator: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    steps: Iterable[int] | None = None,
    gain: bool = False,
    device: str = "auto",
    progress: OnProgress | None = None,
) -> Comparisons:
    """Compare several archives of a run with it; each original step is evaluated once.

    Parameters
    ----------
    archives
        The archives, or their paths; at least one.
    against, evaluator, metric, direction, trust_run, timeout, gain, device, progress
        As `compare` takes them.
    steps
        Steps to compare; of several archives each is compared at those that it holds.

    Raises
    ------
    InputError
        There is no archive, or one that has no step in common with the run.
    UntrustedCodeError, EvaluatorError
        As `compare`.
    StorageError
        There is no room for the predictions of the originals, which several archives share in a temporary
        folder.

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
    from inshrink_core.evaluate import EvaluatorRequest, OriginalEvaluations, compare_steps

    opened = [(one if isinstance(one, Archive) else Archive.open(one)).on(device) for one in archives]
    run = against if isinstance(against, Run) else open_run(against)
    asked = None if steps is None else tuple(steps)
    chosen = [_common_steps(one, run, asked, alone=len(opened) == 1) for one in opened]
    if not opened:
        raise InputError("there is no archive to compare")
    request = EvaluatorRequest(
        evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
    )
    found, before, total = [], 0, sum(map(len, chosen))
    with (
        request.resolve(run.settings, run.directory) as judge,
        tempfile.TemporaryDirectory(prefix="inshrink-compare-") as folder,
    ):
        originals = OriginalEvaluations(lambda step: judge.evaluate(run[step]), Path(folder))
        known = originals if len(opened) > 1 else None
        for one, common in zip(opened, chosen, strict=True):
            tell = _Telling(progress, str(one.path), before, total)
            compared = compare_steps(
                run, one.sequential(), judge, steps=common, known=known, progress=tell.count, told=tell.take
            )
            compared = replace(compared, device=one.device)
            found.append((str(one.path), _with_gains(compared, one, run) if gain else compared))
            before += len(common)
        originals.clear()
    return Comparisons(archives=tuple(found))


def _common_steps(archive: Archive, run: Run, asked: Sequence[int] | None, *, alone: bool) -> tuple[int, ...]:
    """Return the steps at which an archive is compared.

    Raises
    ------
    InputError
        There are none.
    """
    listed = archive.listed_steps
    wanted = listed if asked is None else asked if alone else [step for step in asked if step in listed]
    common = tuple(step for step in wanted if step in run.steps)
    if not common:
        raise InputError(
            "the archive and the run have no step in common", where=f"{archive.path} and {run.path}"
        )
    return common


@dataclass(slots=True)
class _Telling:
    """Tells how far a comparison is, and what was found of a step of one archive among several."""

    progress: OnProgress | None
    archive: str
    before: int
    total: int
    found: dict[str, Any] = field(default_factory=dict)

    def take(self, row: EvaluatedStep, original: Evaluation) -> None:
        """Take in a step."""
        self.found = {
            **asdict(row),
            "archive": self.archive,
            "metric": original.metric,
            "direction": original.direction.value,
            "standard_error": original.standard_errors.get(original.metric),
            "n": None if original.log_probs is None else len(original.log_probs),
        }

    def count(self, done: int, _: int, step: int) -> None:
        """Tell of it."""
        if self.progress is not None:
            self.progress(Progress("compare", self.before + done, self.total, step, found=self.found))


def _with_gains(comparison: Comparison, archive: Archive, run: Run) -> Comparison:
    """Add gain and noise to every step that has a previous one."""
    measured = restore_gain(archive, run, steps=[row.step for row in comparison.steps], device=archive.device)
    gains = {one.step: one for one in measured.steps}
    rows = [
        replace(row, restore_gain=gains[row.step].gain, restore_noise=gains[row.step].noise)
        if row.step in gains
        else row
        for row in comparison.steps
    ]
    return replace(comparison, steps=tuple(rows))
