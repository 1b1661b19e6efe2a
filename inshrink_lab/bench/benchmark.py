"""Sweep of the codecs over a run; continues from stored measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec

from inshrink_core.chain.config import OPTIMIZER_CHOICES
from inshrink_core.codecs.variants import Variant, choose_variants
from inshrink_core.errors import InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.device import resolve_device
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.results import ResultStore
from inshrink_core.request import Option, Request, python_call
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.search import choose_steps
from inshrink_core.search.trials import BoundEvaluator
from inshrink_core.verbs.shared.groups import Computing, PathLike, Reading, RunLike, Stepping, steps_of
from inshrink_lab.bench.measure import Measurer
from inshrink_lab.bench.report import DEFAULT_BOUNDS, REPEAT, BenchReport, Bound, Point, parse_bounds

__all__ = ["Bench", "bench", "sweep"]

_PATIENCE: Final = 2
"""Consecutive values that break every bound before a sweep ends; the drop of a metric is not monotonic."""


@dataclass(frozen=True)
class Bench(Stepping, EvaluatorRequest, Computing, Reading, Request[BenchReport]):
    """Measure the largest ratio of each codec that keeps each bound.

    Parameters
    ----------
    run
        A run of at least two steps.
    codecs
        Codecs, each NAME or NAME:KEY=VALUE,… with fixed settings; by default all that store weights.
    bounds
        The bounds: drop of the worst step, or mean divergence. By default a drop of 0.005, 0.01 and 0.02 and,
        with predictions, a divergence of 0.003, 0.01 and 0.03.
    optimizer
        How to store optimizer state with codecs that do not take it; with drop, ratios cover only the
        weights.
    output
        Folder for the measured points; existing points are reused.
    refine
        How often to halve the gap of the tunable parameter below each bound.
    keyframe_every
        Frames from one keyframe to the next.

    Raises
    ------
    UntrustedCodeError, EvaluatorError
        As in `inshrink_core.compare`.
    InputError
        A codec, bound or step does not exist, or the evaluator cannot check a bound.

    Notes
    -----
    Nothing is interpolated: each ratio is measured on a chain whose steps are all restored and evaluated.
    Each original step is evaluated once, the first one twice to check that the evaluator is reproducible.
    Measurements are stored in `output`, even if `progress` raises.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = bench(run, codecs="uniform:bits=8", bounds="divergence=0.01", steps=run.steps[:3])
    >>> [(row.codec, row.kept) for row in report.rows]
    [('repeat', False), ('uniform:bits=8', True)]
    """

    run: RunLike
    _: KW_ONLY
    codecs: Annotated[str | None, Option(metavar="NAME,…")] = None
    bounds: Annotated[str | None, Option(metavar="KIND=LIMIT,…")] = None
    optimizer: Annotated[str, Option(metavar="exact|compressed|compact|drop")] = "drop"
    output: Annotated[PathLike | None, Option(("--output", "-o"), metavar="DIR")] = None
    refine: Annotated[int, Option(least=0)] = 2
    keyframe_every: Annotated[int, Option(least=1)] = 32

    EXAMPLES: ClassVar = (
        "inshrink bench runs/digits --trust-run -o bench",
        "inshrink bench runs/digits --trust-run --codecs inshrinkerator,excp:coder=rans --bounds drop=0.01",
    )
    INTERRUPTED: ClassVar = "with --output, measured points are kept, and the same command continues"
    UNIT: ClassVar = "steps"

    def perform(self) -> BenchReport:
        """Measure the codecs."""
        opened = self.opened_run(self.run).matched()
        variants = choose_variants(self.codecs)
        bounds = DEFAULT_BOUNDS if self.bounds is None else parse_bounds(self.bounds)
        chosen = choose_steps(opened, steps_of(opened, self.steps))
        if len(chosen) < 2:
            what, found = "a bench needs at least two steps", str(len(chosen))
            raise InputError(what, where=str(opened.path), expected="≥ 2", found=found)
        if self.optimizer not in OPTIMIZER_CHOICES:
            raise InputError(
                f"--optimizer {self.optimizer}", remedy=f"choose one of {', '.join(OPTIMIZER_CHOICES)}"
            )
        folder = Path(self.output) if self.output is not None else None
        with BoundEvaluator(self.resolve(opened), opened.__getitem__, Bounds()) as evaluator:
            session = _Session(
                request=self,
                measurer=Measurer(self, opened, chosen, evaluator, resolve_device(self.device)),
                store=ResultStore(
                    None if folder is None else folder / "points",
                    "point",
                    partial(msgspec.convert, type=Point),
                ),
                bounds=bounds,
            )
            return session.run_all(variants, folder)


bench = python_call(Bench)


@dataclass(kw_only=True)
class _Session:
    """State of a benchmark: measurements and progress."""

    request: Bench
    measurer: Measurer
    store: ResultStore[Point]
    bounds: tuple[Bound, ...]
    points: dict[str, list[Point]] = field(default_factory=dict)
    measured: int = 0
    resumed: int = 0
    begun: float = field(default_factory=time.perf_counter)
    _done: int = 0
    _total: int = 0

    def run_all(self, variants: Sequence[Variant], folder: Path | None) -> BenchReport:
        """Measure the previous checkpoint, then each codec; write the results even after an interruption."""
        n_values = sum(len(variant.configs()) for variant in variants)
        self._total = len(self.measurer.steps) * (1 + n_values)
        try:
            baseline = self._point(REPEAT, self.measurer.key(None, None), self.measurer.repeat)
            self.bounds = self._usable_bounds(baseline)
            for variant in variants:
                measure = partial(self._measured, variant)
                self.points[variant.label] = sweep(variant, self.bounds, measure, self.request.refine)
        except KeyboardInterrupt:
            if folder is not None and self.points:
                self._report(variants).write(folder)
            raise
        report = self._report(variants)
        return report if folder is None else report.write(folder)

    def _measured(self, variant: Variant, value: float | None) -> Point:
        """Return a point of a codec."""
        measure = partial(self.measurer.measure, variant, value)
        return self._point(variant.label, self.measurer.key(variant, value), measure)

    def _point(
        self, label: str, key: dict[str, Any], measure: Callable[[Callable[[int], None]], Point]
    ) -> Point:
        """Return a stored point, or measure and store it."""
        begun, point = self._done, self.store.load(label, key)
        self.resumed += point is not None
        self.measured += point is None
        if point is None:
            point = measure(lambda done: self._advance(begun + done, label))
            self.store.keep(label, key, point.to_json())
        self._advance(begun + len(self.measurer.steps), label, point)
        # Also stored here, because an interruption may cut off the sweep.
        self.points.setdefault(label, []).append(point)
        return point

    def _advance(self, done: int, label: str, point: Point | None = None) -> None:
        """Report progress and a measured point; refinement is unpredictable and moves the end."""
        self._done = done
        self._total = max(self._total, done)
        if self.request.progress is not None:
            found = None if point is None else point.to_json()
            self.request.progress(Progress("bench", done, self._total, self.measurer.steps[-1], label, found))

    def _usable_bounds(self, baseline: Point) -> tuple[Bound, ...]:
        """Return the bounds that the evaluator can check; it must be able to check requested ones."""
        cannot = {}
        if baseline.failure:
            cannot["drop"] = f"{baseline.failure}, and a metric of zero has no relative change"
        if baseline.mean_divergence is None:
            cannot["divergence"] = "the evaluator returns no 'log_probs'"
        for bound in self.bounds:
            if bound.kind in cannot and self.request.bounds is not None:
                raise InputError(
                    f"the bound {bound.kind}={bound.limit:g} cannot be checked: {cannot[bound.kind]}",
                    remedy="choose another with --bounds or --eval-metric",
                )
        return tuple(bound for bound in self.bounds if bound.kind not in cannot)

    def _report(self, variants: Sequence[Variant]) -> BenchReport:
        """Return the report of the measurements so far."""
        baseline = self.points[REPEAT][0]
        return BenchReport(
            run=self.measurer.run.address,
            metric=baseline.metric,
            direction=baseline.direction,
            steps=self.measurer.steps,
            optimizer=self.request.optimizer,
            bounds=self.bounds,
            points={label: tuple(points) for label, points in self.points.items()},
            seconds=time.perf_counter() - self.begun,
            measured=self.measured,
            resumed=self.resumed,
            notes=self._notes(variants),
            device=self.measurer.device,
        )

    def _notes(self, variants: Sequence[Variant]) -> tuple[str, ...]:
        """Return notes that help to read the table correctly."""
        notes, optimizer = [], self.request.optimizer
        if optimizer == "drop":
            notes.append("the optimizer's state is left out (--optimizer drop), which makes sweeps fast")
        separate = [item.label for item in variants if item.optimizer(optimizer) != optimizer]
        if separate:
            notes.append(
                f"{', '.join(separate)}: moments are stored by the codec's own rule and are part of its total"
            )
        if self.points[REPEAT][0].failure and self.request.bounds is None:
            notes.append(f"no bounds on the drop: {self.points[REPEAT][0].failure}")
        for label, points in self.points.items():
            failed = [point for point in points if point.failure and label != REPEAT]
            if failed:
                notes.append(f"{label}: {len(failed)} could not be evaluated ({failed[0].failure})")
        return tuple(notes)


def sweep(
    variant: Variant, bounds: Sequence[Bound], measure: Callable[[float | None], Point], refine: int
) -> list[Point]:
    """Measure a codec over its tunable parameter from fine to coarse, then closer to each bound.

    Parameters
    ----------
    variant
        The codec and its fixed settings.
    bounds
        The bounds.
    measure
        Function that returns the point at a value of the parameter; None without a parameter.
    refine
        Number of times that, for each bound, the gap between the best value that keeps it and the next
        coarser one is halved.

    Returns
    -------
    list of Point
        All measured points, from the most faithful to the smallest.
    """
    tunable = variant.tunable
    if tunable is None:
        return [measure(None)]
    found: dict[float, Point] = {}
    misses = 0
    for value in tunable.values:
        found[value] = measure(value)
        misses = 0 if any(bound.holds(found[value]) for bound in bounds) else misses + 1
        if misses == _PATIENCE:
            break
    for bound in bounds:
        for _ in range(refine):
            ratios = {value: item.ratio_weights or 0.0 for value, item in found.items() if bound.holds(item)}
            best = max(ratios, key=ratios.__getitem__, default=None)
            gaps = {
                abs(value - best): value
                for value in found
                if best is not None and tunable.is_coarser(value, best)
            }
            if best is None or not gaps or (middle := tunable.between(best, gaps[min(gaps)])) in found:
                break
            found[middle] = measure(middle)
    return [found[value] for value in sorted(found, reverse=tunable.values[0] > tunable.values[-1])]
