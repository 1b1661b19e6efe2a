"""The search: how close to the truth, in how many evaluations, and what one configuration a step is worth.

Per step, guided exhaustive search against the whole grid, and the delta neighbourhood after it; per run, one
configuration for each checkpoint against the best fixed one in hindsight; what bit allocation is worth; what
an estimate without trials can go by; and what ending hopeless evaluations early saves.
``python -m benchmarks.search [--part PART] [--codec CODEC] [RUN ...]`` measures runs of `benchmarks.runs`, by
default the bundled sample in every part, and leaves rows of other runs, parts and codecs as they are.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks import results, runs, train_char_gpt
from inshrink_core.chain import FrameEncoder
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.judge import Judge
from inshrink_core.search.measure import RatioEstimate, encode_chain
from inshrink_core.search.quadratic import damage_of, sensitivities
from inshrink_core.search.space import CubePoint, space_of
from inshrink_core.search.strategies import DeltaNeighbourhood, Everything, GuidedExhaustive, Outcome, explore
from inshrink_core.search.trials import Position, TrialLog, TrialRunner

MAX_DROP = 0.01
GRID_STEPS = 6
"""Steps of the run at which the whole grid is measured: 198 evaluations each."""

PARTS = ("grid", "chains", "allocation", "priors", "early")
QUICK_PARTS = ("grid", "priors")
PRIORS_AT = (1.5, 4.0)
"""Steps of the lattice, on both sides of its default, at which rules of thumb are measured."""

PRIOR_STEPS = 4
"""Steps of the run at which they are, spread evenly, the last among them."""

EARLY_RUN, EARLY_STEPS = "char-gpt", 2
"""The run whose evaluator can say what it knows so far, and how many of its steps are searched."""

CODECS = ("lattice", "inshrinkerator")
START: dict[str, dict[str, Any]] = {"lattice": {"coarseness": 2.5}}
"""Where searches begin, as they did when the rows were measured; not the codec's default of today."""

OPTIMIZER = "exact"
SAMPLE = "digits-cnn"


def runner_of(run: Any, codec: str, judge: Judge, settings: dict[str, Any] | None = None) -> TrialRunner:
    """Return what measures trials of a codec on a run."""
    settings = {**START.get(codec, {}), **(settings or {})}
    base = make_chain_config("", codec, settings, OPTIMIZER, 32, "cpu", 1)
    return TrialRunner(
        checkpoints=run.__getitem__, steps=run.steps, base=base, judge=judge, log=TrialLog(None, "")
    )


def per_step(run: Any, judge: Judge, n_steps: int) -> list[dict[str, object]]:
    """Compare guided search with the whole grid, and count the neighbourhood's evaluations."""
    runner = runner_of(run, "inshrinkerator", judge)
    cube = space_of("inshrinkerator", frozenset(spec.layer for spec in run[run.steps[0]].specs))
    bounds, position = judge.bounds(run.steps[0]), Position(runner)
    last: CubePoint | None = None
    rows: list[dict[str, object]] = []
    every = max(1, len(run.steps) // n_steps)
    for number, step in enumerate(run.steps):
        estimate = RatioEstimate(runner.base, run[step], *position.state())

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
            truth = explore(Everything(space=cube), measure)
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


def grid(name: str, n_steps: int) -> list[dict[str, object]]:
    """Return medians over the steps: the guided search against the whole grid, and the neighbourhood."""
    run = runs.open_run(name)
    evaluator = EvaluatorRequest(**_judge_options(name)).resolve(run)
    with Judge([evaluator], run.__getitem__, Bounds(max_drop=MAX_DROP)) as asked:
        rows = per_step(run, asked, n_steps)
    found: list[dict[str, object]] = []
    for figure, target in (
        ("guided_evaluations", 0.15 * 216),
        ("guided_ratio_of_best", 0.95),
        ("neighbourhood_evaluations", 8),
    ):
        values = [float(str(row[figure])) for row in rows if figure in row]
        if values:
            found.append(_result(name, "inshrinkerator", figure, statistics.median(values), target))
    return found


def chains(name: str, codec: str, folder: Path) -> list[dict[str, object]]:
    """Write a run under the bound, step by step, and find the best fixed configuration in hindsight."""
    run, judge = runs.open_run(name), _judge_options(name)
    how: dict[str, Any] = {"codec": codec, "config": START.get(codec), "optimizer": OPTIMIZER, "threads": 1}
    # What is compiled at first use is compiled then.
    inshrink_core.compress(run, folder / "warm.inshrink", steps=run.steps[:2], **how)
    begun = time.perf_counter()
    fixed = inshrink_core.compress(run, folder / "fixed.inshrink", **how)
    plain_seconds = time.perf_counter() - begun
    report = inshrink_core.compress(run, folder / "bounded.inshrink", max_drop=MAX_DROP, **how, **judge)
    promise = report.promise
    if promise is None:
        raise RuntimeError("a chain written under a bound promises nothing")
    kept = promise.to_json()
    hindsight = inshrink_core.search(
        run, max_drop=MAX_DROP, gain=False, output=folder / "fixed.json", **how, **judge
    )
    best = hindsight.best.ratio_weights if hindsight.best else 0.0
    ratio = report.size.ratio_weights or 0.0
    without = report.seconds - promise.evaluator_seconds
    figures: list[tuple[str, float | None, float | None]] = [
        ("start_ratio", fixed.size.ratio_weights, None),
        ("bounded_ratio", ratio, None),
        ("fixed_in_hindsight_ratio", best, None),
        ("bounded_over_fixed", ratio / best if best else 0.0, 0.9),
        ("worst_drop", kept["max_drop"], kept["bounds"]["drop"]),
        ("worst_divergence", kept["max_divergence"], kept["bounds"]["divergence"]),
        ("evaluations_a_step", promise.evaluations / len(run.steps), 8),
        ("exact_steps", sum(step.exact for step in promise.steps.values()), None),
        ("uninformative_steps", sum(not step.informative for step in promise.steps.values()), None),
        ("compress_seconds", plain_seconds, None),
        ("bounded_seconds", report.seconds, None),
        ("time_factor", report.seconds / plain_seconds, None),
        ("time_factor_without_evaluator", without / plain_seconds, 10),
        ("rank_correlation", hindsight.rank_correlation, None),
    ]
    return [_result(name, codec, *figure) for figure in figures]


def allocation(name: str, folder: Path) -> list[dict[str, object]]:
    """Find the best fixed configuration with one step for all tensors, with the rule, and with factors."""
    run, judge = runs.open_run(name), _judge_options(name)
    rows = []
    for figure, settings, strategy in (
        ("one_step", {"sensitivity": 0.0}, "bracket"),
        ("rule", {}, "bracket"),
        ("allocation", {}, "allocation"),
    ):
        found = inshrink_core.search(
            run,
            config=START["lattice"] | settings,
            optimizer=OPTIMIZER,
            strategy=strategy,
            max_drop=MAX_DROP,
            gain=False,
            output=folder / "fixed.json",
            threads=1,
            **judge,
        )
        best = found.best.ratio_weights if found.best else 0.0
        rows.append(_result(name, "lattice", f"fixed_ratio_{figure}", best, None))
    return rows


def priors(name: str) -> list[dict[str, object]]:
    """Return what estimates without trials could go by: how far each rule of thumb is off on this run.

    Quotients of divergence and ½ Σ h·e², step by step; and the worst divergence over the square of the
    lattice's step.
    """
    run = runs.open_run(name)
    n = min(PRIOR_STEPS, len(run.steps))
    asked = {run.steps[len(run.steps) * (k + 1) // n - 1] for k in range(n)}
    quotients: list[float] = []
    curve: list[float] = []
    evaluator = EvaluatorRequest(**_judge_options(name)).resolve(run)
    with Judge([evaluator], run.__getitem__, Bounds()) as judge:
        for coarseness in PRIORS_AT:
            chain = make_chain_config("", "lattice", {"coarseness": coarseness}, OPTIMIZER, 32, "cpu", 1)
            worst = 0.0
            foreseen = FrameEncoder(chain).look_ahead(run.steps, run.__getitem__)
            encoded_steps = encode_chain(chain, map(run.__getitem__, run.steps), foreseen=foreseen)
            for step, encoded in zip(run.steps, encoded_steps, strict=True):
                if step not in asked:
                    continue
                divergence = judge.figures(step, encoded.restored()).divergence or 0.0
                damage = damage_of(encoded.squared_errors, sensitivities(run[step], None))
                quotients += [divergence / damage] if damage else []
                worst = max(worst, divergence)
            curve.append(worst / coarseness**2)
    rows = []
    for figure, values in (("divergence_over_damage", quotients), ("divergence_over_squared_step", curve)):
        if values:
            rows.append(_result(name, "lattice", f"{figure}_least", min(values), None))
            rows.append(_result(name, "lattice", f"{figure}_most", max(values), None))
    return rows


def early(folder: Path) -> list[dict[str, object]]:
    """Search the published grid twice, with an evaluator that streams and with the same one that does not."""
    run, figures = runs.open_run(EARLY_RUN), {}
    for function in ("evaluate", "evaluate_streamed"):
        report = inshrink_core.compress(
            run,
            folder / f"{function}.inshrink",
            codec="inshrinkerator",
            optimizer=OPTIMIZER,
            steps=run.steps[:EARLY_STEPS],
            max_drop=MAX_DROP,
            evaluator=f"{train_char_gpt.__file__}:{function}",
            threads=1,
        )
        if report.promise is None:
            raise RuntimeError("a chain written under a bound promises nothing")
        figures[function] = report.promise.evaluator_seconds, report.size.ratio_weights
    (whole, ratio), (streamed, same) = figures.values()
    if ratio != same:
        raise RuntimeError("ending evaluations early changed what was found")
    return [
        _result(EARLY_RUN, "inshrinkerator", "evaluator_seconds_streamed_over_whole", streamed / whole, None)
    ]


def _judge_options(name: str) -> dict[str, Any]:
    """Return what names the evaluator of a run: its own, which these benchmarks wrote, or another."""
    evaluator = runs.evaluator_of(name)
    if evaluator is not None:
        return {"evaluator": evaluator}
    return {} if name == SAMPLE else {"trust_run": True}


def _result(
    run: str, codec: str, figure: str, value: float | None, target: float | None
) -> dict[str, object]:
    known = None if value is None else float(value)
    row = {"run": run, "codec": codec, "figure": figure, "value": known, "target": target}
    sys.stderr.write(f"{row}\n")
    return row


def keep(name: str, rows: Sequence[dict[str, object]]) -> Path:
    """Write rows in the place of those they measure anew; others stay, with the date of their own."""
    path = results.RESULTS / f"{name}.csv"
    measured = {_what(row) for row in rows}
    others: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            others = [dict(row) for row in csv.DictReader(file)]
    return results.write(name, [*(row for row in others if _what(row) not in measured), *rows])


def _what(row: dict[str, object]) -> tuple[object, ...]:
    return row["run"], row["codec"], row["figure"]


def measure(name: str, parts: Sequence[str], codecs: Sequence[str], n_steps: int) -> list[dict[str, object]]:
    """Return the rows of a run."""
    rows = grid(name, n_steps) if "grid" in parts else []
    for codec in codecs:
        if "chains" in parts:
            with tempfile.TemporaryDirectory() as scratch:
                rows += chains(name, codec, Path(scratch))
    if "allocation" in parts and "lattice" in codecs:
        with tempfile.TemporaryDirectory() as scratch:
            rows += allocation(name, Path(scratch))
    if "priors" in parts and "lattice" in codecs:
        rows += priors(name)
    if "early" in parts and name == EARLY_RUN:
        with tempfile.TemporaryDirectory() as scratch:
            rows += early(Path(scratch))
    return rows


def main(
    quick: bool = False,
    names: Sequence[str] = (SAMPLE,),
    parts: Sequence[str] = (),
    codecs: Sequence[str] = CODECS,
) -> Path:
    """Write ``results/search.csv``, run by run as they end; quick: one step of the grid, and the priors."""
    target = "search_quick" if quick else "search"
    parts = parts or (QUICK_PARTS if quick else PARTS)
    for name in names:
        path = keep(target, measure(name, parts, codecs, 1 if quick else GRID_STEPS))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *runs.RUNS], help="by default the bundled sample")
    parser.add_argument("--part", action="append", choices=PARTS, help="by default all; may be repeated")
    parser.add_argument("--codec", action="append", choices=CODECS, help="by default both")
    parser.add_argument("--quick", action="store_true", help="one step of the grid, and the priors")
    asked = parser.parse_args()
    main(asked.quick, asked.names or (SAMPLE,), asked.part or (), asked.codec or CODECS)
