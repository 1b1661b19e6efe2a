"""The search: how close to the truth, in how many evaluations, and what one configuration a step is worth.

Per step, guided exhaustive search against the whole grid, and the delta neighbourhood after it; per run, one
configuration for each checkpoint against the best fixed one in hindsight, with and without bit allocation.
The evaluator is the bundled sample's.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks.results import write
from inshrink_core.evaluate import resolve_evaluator
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.guided import GuidedExhaustive
from inshrink_core.search.judge import Judge
from inshrink_core.search.neighbourhood import DeltaNeighbourhood, Grid
from inshrink_core.search.quadratic import calibrate
from inshrink_core.search.sampling import RatioEstimate
from inshrink_core.search.space import CubePoint, space_of
from inshrink_core.search.strategies import Outcome, explore
from inshrink_core.search.trials import Trial, TrialLog
from inshrink_core.search.walk import Position, TrialRunner
from inshrink_core.session.config import make_chain_config

MAX_DROP = 0.01
GRID_STEPS = 6
"""Steps of the run at which the whole grid is measured: 198 evaluations each."""


def runner_of(run: Any, codec: str, judge: Judge, settings: dict[str, Any] | None = None) -> TrialRunner:
    """Return what measures trials of a codec on a run."""
    base = make_chain_config("", codec, settings, None, 32, "cpu", 1)
    return TrialRunner(
        checkpoints=run.__getitem__, steps=run.steps, base=base, judge=judge, log=TrialLog(None, "")
    )


def per_step(run: Any, judge: Judge, n_steps: int) -> list[dict[str, object]]:
    """Compare guided search with the whole grid, and count the neighbourhood's evaluations."""
    cube = space_of("inshrinkerator", frozenset())
    runner = runner_of(run, "inshrinkerator", judge)
    bounds, position = judge.bounds(run.steps[0]), Position(runner)
    last: CubePoint | None = None
    rows: list[dict[str, object]] = []
    every = max(1, len(run.steps) // n_steps)
    for number, step in enumerate(run.steps):
        estimate = RatioEstimate(runner.base, run[step], *position.standing(run[step]))

        def ratio_of(point: CubePoint, estimate: RatioEstimate = estimate) -> float:
            return estimate(cube.candidate(point))

        def measure(
            points: Sequence[CubePoint], step: int = step, position: Position = position
        ) -> list[Outcome[CubePoint]]:
            trials = [runner.trial(step, cube.candidate(point), position) for point in points]
            verdicts = [bounds.judge(trial.figures) for trial in trials]
            return [
                Outcome(p, v.kept, t.ratio_weights, v.usage)
                for p, v, t in zip(points, verdicts, trials, strict=True)
            ]

        row: dict[str, object] = {"step": step}
        if number % every == every - 1:
            guided = explore(GuidedExhaustive(cube=cube, ratio_of=ratio_of), measure)
            truth = explore(Grid(space=cube), measure)
            if truth.best is not None:
                row["guided_evaluations"] = len(guided.outcomes)
                row["guided_ratio_of_best"] = (guided.best.ratio if guided.best else 0.0) / truth.best.ratio
        strategy = (
            GuidedExhaustive(cube=cube, ratio_of=ratio_of)
            if last is None
            else DeltaNeighbourhood(cube=cube, last=last, ratio_of=ratio_of)
        )
        explored = explore(strategy, measure)
        if last is not None:
            row["neighbourhood_evaluations"] = len(explored.outcomes)
        if explored.best is not None:
            last = explored.best.point
            position = position.after(step, cube.candidate(last))
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    return rows


def medians(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return one result a figure, over the steps that have it."""
    results: list[dict[str, object]] = []
    for name, target in (
        ("guided_evaluations", 0.15 * 216),
        ("guided_ratio_of_best", 0.95),
        ("neighbourhood_evaluations", 8),
    ):
        values = [float(str(row[name])) for row in rows if name in row]
        if values:
            results.append(_result("digits-cnn", "inshrinkerator", name, statistics.median(values), target))
    return results


def per_run(run: Any, folder: Path, codec: str) -> list[dict[str, object]]:
    """Write the run under the bound, step by step, and find the best fixed configuration in hindsight."""
    begun = time.perf_counter()
    fixed = inshrink_core.compress(run, folder / f"fixed-{codec}.inshrink", codec=codec, threads=1)
    plain_seconds = time.perf_counter() - begun
    report = inshrink_core.compress(
        run, folder / f"{codec}.inshrink", codec=codec, max_drop=MAX_DROP, threads=1
    )
    promise = report.promise
    kept = promise.to_json()
    hindsight = inshrink_core.search(
        run, codec=codec, max_drop=MAX_DROP, gain=False, output=folder / f"{codec}.json", threads=1
    )
    best = hindsight.best.ratio_weights if hindsight.best else 0.0
    ratio = report.size.ratio_weights or 0.0
    rows = [
        _result("digits-cnn", codec, "default_ratio", fixed.size.ratio_weights or 0.0, None),
        _result("digits-cnn", codec, "bounded_ratio", ratio, None),
        _result("digits-cnn", codec, "fixed_in_hindsight_ratio", best, None),
        _result("digits-cnn", codec, "bounded_over_fixed", ratio / best if best else 0.0, 0.9),
        _result("digits-cnn", codec, "worst_drop", kept["max_drop"], kept["bounds"]["drop"]),
        _result(
            "digits-cnn", codec, "worst_divergence", kept["max_divergence"], kept["bounds"]["divergence"]
        ),
        _result("digits-cnn", codec, "evaluations_a_step", promise.evaluations / len(run.steps), 8),
        _result("digits-cnn", codec, "compress_seconds", plain_seconds, None),
        _result("digits-cnn", codec, "bounded_seconds", report.seconds, None),
    ]
    trials: tuple[Trial, ...] = hindsight.trials
    rows.append(
        _result("digits-cnn", codec, "rank_correlation", calibrate(trials).rank_correlation or 0.0, None)
    )
    return rows


def allocation(run: Any, folder: Path) -> list[dict[str, object]]:
    """Find the best fixed configuration with one step for all tensors, with the rule, and with factors."""
    rows = []
    for name, settings, strategy in (
        ("one_step", {"sensitivity": 0.0}, "bracket"),
        ("rule", {}, "bracket"),
        ("allocation", {}, "allocation"),
    ):
        found = inshrink_core.search(
            run,
            config=settings,
            strategy=strategy,
            max_drop=MAX_DROP,
            gain=False,
            output=folder / "allocation.json",
            threads=1,
        )
        best = found.best.ratio_weights if found.best else 0.0
        rows.append(_result("digits-cnn", "lattice", f"fixed_ratio_{name}", best, None))
    return rows


def _result(run: str, codec: str, figure: str, value: float, target: float | None) -> dict[str, object]:
    row = {"run": run, "codec": codec, "figure": figure, "value": float(value), "target": target}
    sys.stderr.write(f"{row}\n")
    return row


def main(quick: bool = False) -> Path:
    """Write ``results/search.csv``; quick: fewer steps of the grid."""
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    evaluator = resolve_evaluator(run.settings, run.directory)
    with Judge([evaluator], run.__getitem__, Bounds(max_drop=MAX_DROP)) as judge:
        rows = medians(per_step(run, judge, 2 if quick else GRID_STEPS))
    with tempfile.TemporaryDirectory() as scratch:
        for codec in ("lattice", "inshrinkerator"):
            rows += per_run(run, Path(scratch), codec)
        rows += allocation(run, Path(scratch))
    return write("search_quick" if quick else "search", rows)


if __name__ == "__main__":
    main()
