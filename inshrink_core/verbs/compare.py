"""Comparing what restores with what was trained: the task metric of every step, and the drop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from inshrink_core.analysis.gain import restore_gain
from inshrink_core.chain import Archive
from inshrink_core.errors import CheckFailedError, InputError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run, open_run

if TYPE_CHECKING:
    import os

    from inshrink_core.checkpoint import Checkpoint
    from inshrink_core.evaluate import Comparison, EvaluatedStep, Evaluation

__all__ = ["CheckedBounds", "compare"]

_REMEDIES = {
    "drop": "a metric of zero has no relative change; choose another with --eval-metric",
    "divergence": "the evaluator must return 'log_probs'",
    "restore_cost": "the evaluator must return a loss above 0, or 'log_probs'",
}


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
                raise InputError(f"--max-{_dashed(name)} nan bounds nothing", remedy="give a number")

    def _by_figure(self) -> dict[str, float | None]:
        return {
            "drop": self.max_drop,
            "divergence": self.max_divergence,
            "restore_cost": self.max_restore_cost,
        }

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
                        f"--max-{_dashed(name)} cannot be checked: step {row.step} has no {figure}",
                        where=where,
                        remedy=_REMEDIES[name],
                    )
            worst = max(rows, key=lambda row: float(getattr(row, name)))
            if getattr(worst, name) > bound:
                return CheckFailedError(
                    f"step {worst.step} exceeds --max-{_dashed(name)}",
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


def _dashed(name: str) -> str:
    return name.replace("_", "-")


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
    from inshrink_core.evaluate import EvaluatorRequest, compare_steps

    opened = (archive if isinstance(archive, Archive) else Archive.open(archive)).on(device)
    run = against if isinstance(against, Run) else open_run(against)
    common = tuple(
        step for step in (steps if steps is not None else opened.listed_steps) if step in run.steps
    )
    if not common:
        raise InputError(
            "the archive and the run have no step in common", where=f"{opened.path} and {run.path}"
        )
    restored: Mapping[int, Checkpoint] = opened.sequential()

    found: dict[str, Any] = {}

    def told(row: EvaluatedStep, original: Evaluation) -> None:
        found.update(
            asdict(row),
            metric=original.metric,
            direction=original.direction.value,
            standard_error=original.standard_errors.get(original.metric),
            n=None if original.log_probs is None else len(original.log_probs),
        )

    def report(done: int, total: int, step: int) -> None:
        if progress is not None:
            progress(Progress("compare", done, total, step, found=dict(found)))

    asked = EvaluatorRequest(
        evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
    )
    with asked.resolve(run.settings, run.directory) as judge:
        comparison = compare_steps(run, restored, judge, steps=common, progress=report, told=told)
    comparison = replace(comparison, device=opened.device)
    return _with_gains(comparison, opened, run) if gain else comparison


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
