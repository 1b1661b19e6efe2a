"""Sweeping the codecs over a run, going on from what has been measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.bench.measure import Bench
from inshrink_core.bench.report import DEFAULT_BOUNDS, REPEAT, BenchReport, Bound, Point, parse_bounds
from inshrink_core.bench.variants import Variant, choose_variants
from inshrink_core.chain import OPTIMIZER_CHOICES
from inshrink_core.errors import InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution import ResultStore, parse_record, resolve_device
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run, open_run
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.search import choose_steps
from inshrink_core.search.strategies import Outcome, Sweep, explore

if TYPE_CHECKING:
    import os

__all__ = ["bench", "kept_points", "sweep"]

_POINTS_FOLDER = "points"
_MOST_POINTS = 10_000


def bench(
    run: Run | str | os.PathLike[str],
    *,
    codecs: Sequence[Variant | str] | str | None = None,
    bounds: Sequence[Bound] | str | None = None,
    optimizer: str = "drop",
    evaluator: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    steps: Iterable[int] | None = None,
    output: str | os.PathLike[str] | None = None,
    refine: int = 2,
    keyframe_every: int = 32,
    device: str = "auto",
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> BenchReport:
    """Measure, for every codec and bound, the largest ratio of a chain that keeps the bound.

    Parameters
    ----------
    run
        The run, or its path; at least two steps.
    codecs
        Names, or ``NAME:KEY=VALUE,…`` with settings that are held; by default every codec for weights
        that is installed.
    bounds
        What has to be kept, or a text as `parse_bounds` reads it; by default a drop of .005, .01 and .02
        and, where the evaluator returns predictions, a mean divergence of .003, .01 and .03.
    optimizer
        How the optimizer's state is stored by codecs that leave it to others; ``drop`` makes sweeps
        fast, and its ratios speak of the weights alone.
    evaluator, metric, direction, trust_run, timeout
        As `inshrink_core.compare` takes them.
    steps
        Steps to measure; by default all.
    output
        Folder for tables, plots and measured points; with the same folder, what was measured is not
        measured again.
    refine
        How often the knob's gap below each bound is halved.
    keyframe_every, device, threads
        As `inshrink_core.compress` takes them.
    progress
        Called after each evaluated step; raising from it keeps what was measured in `output`.

    Raises
    ------
    UntrustedCodeError, EvaluatorError
        As `inshrink_core.compare` raises them.
    InputError
        A codec, bound or step that does not exist; a bound that this evaluator cannot judge.

    Notes
    -----
    Nothing is interpolated: every ratio was measured, on a chain whose every step was restored and
    evaluated. Each original step is evaluated once, the first one twice, to see that the evaluator is
    steady.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = bench(run, codecs="uniform:bits=8", bounds="divergence=0.01", steps=run.steps[:3])
    >>> [(row.codec, row.kept) for row in report.rows]
    [('repeat', False), ('uniform:bits=8', True)]
    """
    opened = run if isinstance(run, Run) else open_run(run)
    variants = choose_variants(codecs)
    asked = parse_bounds(bounds) if isinstance(bounds, str) else bounds
    chosen = choose_steps(opened, steps)
    if len(chosen) < 2:
        raise InputError(
            "a bench needs at least two steps",
            where=str(opened.path),
            expected="≥ 2",
            found=str(len(chosen)),
        )
    if optimizer not in OPTIMIZER_CHOICES:
        raise InputError(f"--optimizer {optimizer}", remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}")
    if refine < 0 or keyframe_every < 1:
        raise InputError("--refine is at least 0, --keyframe-every at least 1")
    folder = Path(output) if output is not None else None
    request = EvaluatorRequest(
        evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
    )
    resolved = request.resolve(opened.settings, opened.directory)
    with Judge([resolved], opened.__getitem__, Bounds()) as judge:
        common = Bench(
            run=opened,
            steps=chosen,
            judge=judge,
            optimizer=optimizer,
            keyframe_every=keyframe_every,
            device=resolve_device(device),
            threads=threads,
        )
        session = _Session(
            bench=common,
            store=_store(folder),
            bounds=tuple(DEFAULT_BOUNDS if asked is None else asked),
            strict=asked is not None,
            refine=refine,
            progress=progress,
        )
        return session.run_all(variants, folder)


def kept_points(folder: Path) -> tuple[Point, ...]:
    """Return what a bench has measured so far in its folder; what cannot be read there is passed over."""
    return tuple(point for _, point in _store(folder).kept(_MOST_POINTS))


def _store(folder: Path | None) -> ResultStore[Point]:
    place = None if folder is None else folder / _POINTS_FOLDER
    return ResultStore(place, "point", partial(parse_record, Point))


@dataclass(kw_only=True)
class _Session:
    """One bench: what is measured already, and how far it is."""

    bench: Bench
    store: ResultStore[Point]
    bounds: tuple[Bound, ...]
    strict: bool
    refine: int
    progress: OnProgress | None
    points: dict[str, list[Point]] = field(default_factory=dict)
    measured: int = 0
    resumed: int = 0
    _warm: set[str] = field(default_factory=set)
    _done: int = 0
    _total: int = 0
    _begun: float = field(default_factory=time.perf_counter)

    def run_all(self, variants: Sequence[Variant], folder: Path | None) -> BenchReport:
        """Measure the previous checkpoint, then each codec; what was measured is written even if cut off."""
        n_values = sum(len(variant.configs()) for variant in variants)
        self._total = len(self.bench.steps) * (1 + n_values)
        try:
            stale = self._point(REPEAT, self.bench.key(None, None), self.bench.repeat)
            self.bounds = self._judgeable(stale)
            for variant in variants:
                measure = partial(self._measured, variant)
                self.points[variant.label] = sweep(variant, self.bounds, measure, self.refine)
        except KeyboardInterrupt:
            if folder is not None and self.points:
                self._report(variants).write(folder)
            raise
        report = self._report(variants)
        return report if folder is None else report.write(folder)

    def _measured(self, variant: Variant, value: float | None) -> Point:
        """Return a point of a codec, compiling what it needs before its first measurement."""

        def fresh(evaluated: Callable[[int], None]) -> Point:
            if variant.label not in self._warm:
                self.bench.warm_up(variant, value)
                self._warm.add(variant.label)
            return self.bench.measure(variant, value, evaluated)

        return self._point(variant.label, self.bench.key(variant, value), fresh)

    def _point(
        self, label: str, key: dict[str, Any], measure: Callable[[Callable[[int], None]], Point]
    ) -> Point:
        """Return a point that was measured before, or measure and keep it."""
        begun = self._done
        point = self.store.load(label, key)
        if point is None:
            point = measure(lambda done: self._advance(begun + done, label))
            self.store.keep(label, key, point.to_json())
            self.measured += 1
        else:
            self.resumed += 1
        self._advance(begun + len(self.bench.steps), label)
        # Kept here as well as by the sweep, which an interruption may cut off.
        self.points.setdefault(label, []).append(point)
        return point

    def _advance(self, done: int, label: str) -> None:
        """Say how far it is; refinement, which nobody can foresee, moves the end."""
        self._done = done
        self._total = max(self._total, done)
        if self.progress is not None:
            self.progress(Progress("bench", done, self._total, self.bench.steps[-1], label))

    def _judgeable(self, stale: Point) -> tuple[Bound, ...]:
        """Return the bounds this evaluator can judge; one that was asked for must be."""
        cannot = {}
        if stale.failure:
            cannot["drop"] = f"{stale.failure}, and a metric of zero has no relative change"
        if stale.mean_divergence is None:
            cannot["divergence"] = "the evaluator returns no 'log_probs'"
        for bound in self.bounds:
            if bound.kind in cannot and self.strict:
                raise InputError(
                    f"the bound {bound.kind}={bound.limit:g} cannot be judged: {cannot[bound.kind]}",
                    remedy="choose another with --bounds or --eval-metric",
                )
        return tuple(bound for bound in self.bounds if bound.kind not in cannot)

    def _report(self, variants: Sequence[Variant]) -> BenchReport:
        """Put together what was measured so far."""
        stale = self.points[REPEAT][0]
        return BenchReport(
            run=str(self.bench.run.path),
            metric=stale.metric,
            direction=stale.direction,
            steps=self.bench.steps,
            optimizer=self.bench.optimizer,
            bounds=self.bounds,
            points={label: tuple(points) for label, points in self.points.items()},
            seconds=time.perf_counter() - self._begun,
            measured=self.measured,
            resumed=self.resumed,
            notes=self._notes(variants),
            device=self.bench.device,
        )

    def _notes(self, variants: Sequence[Variant]) -> tuple[str, ...]:
        """Say what a reader of the table would otherwise get wrong."""
        notes = []
        if self.bench.optimizer == "drop":
            notes.append("the optimizer's state is left out (--optimizer drop), which makes sweeps fast")
        own = [one.label for one in variants if one.optimizer(self.bench.optimizer) != self.bench.optimizer]
        if own:
            notes.append(
                f"{', '.join(own)}: moments are stored by the codec's own rule and are part of its total"
            )
        if self.points[REPEAT][0].failure and not self.strict:
            notes.append(f"no bounds on the drop: {self.points[REPEAT][0].failure}")
        for label, points in self.points.items():
            failed = [point for point in points if point.failure and label != REPEAT]
            if failed:
                notes.append(f"{label}: {len(failed)} could not be evaluated ({failed[0].failure})")
        return tuple(notes)


def sweep(
    variant: Variant, bounds: Sequence[Bound], measure: Callable[[float | None], Point], refine: int
) -> list[Point]:
    """Measure a codec over its knob, then closer to each bound (`inshrink_core.search.strategies.Sweep`).

    Parameters
    ----------
    variant
        The codec and what of it is held.
    bounds
        What is asked for.
    measure
        Returns the point at a value of the knob; None where nothing is swept.
    refine
        For each bound, how often the gap between the best value that keeps it and the next coarser one
        is halved.

    Returns
    -------
    list of Point
        Every point measured, from the most faithful to the smallest.
    """

    def outcomes(values: Sequence[float | None]) -> list[Outcome[float | None]]:
        points = [measure(value) for value in values]
        return [
            Outcome(value, any(bound.holds(one) for bound in bounds), one.ratio_weights or 0.0, 0.0, one)
            for value, one in zip(values, points, strict=True)
        ]

    knob = variant.knob
    holds = [partial(_holds, bound) for bound in bounds]
    found = {
        one.point: one.result
        for one in explore(Sweep(knob=knob, holds=holds, refine=refine), outcomes).outcomes
    }
    from_coarse = knob is not None and knob.values[0] > knob.values[-1]
    return [found[value] for value in sorted(found, key=lambda value: value or 0.0, reverse=from_coarse)]


def _holds(bound: Bound, outcome: Outcome[float | None]) -> bool:
    return bound.holds(outcome.result)
