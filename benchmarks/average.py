"""What averages of steps are worth on held-out data: uniform, exponential, searched for; from two codecs.

The task digits-vit, five seeds, at its peak learning rate throughout, where averaging is known to help, or
(``--schedules own``) at its own schedule. Of twenty saves the last ten are averaged. Coefficients are
searched for on half of the validation digits and judged on the other half. In ``results/average.csv``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import inshrink_core
from benchmarks.evaluators.averaged import TASK
from benchmarks.results import renew
from inshrink_core.lab import average
from inshrink_core.lab.tasks import find_task

SEEDS = range(5)
SCHEDULES = ("constant", "own")
CODECS = ("lossless", "lattice")
N_AVERAGED = 10
BUDGET = 120
DECAY = 0.7
"""Of the exponential average: with the default of 0.9 the first of ten saves would have 0.39."""

EVALUATOR = Path(__file__).parent / "evaluators" / "averaged.py"


def train(folder: Path, seed: int, schedule: str) -> None:
    """Train the task once, and save it twenty times."""
    task, _ = find_task(TASK)
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.optimizer(model)
    every = task.n_steps // task.n_saves
    for step in range(1, task.n_steps + 1):
        factor = task.learning_rate_factor(step, task.n_steps)
        if schedule == "constant":
            factor = min(1.0, step / task.warmup)
        for group in optimizer.param_groups:
            group["lr"] = task.peak_learning_rate * factor
        batch = task.batch(step, torch.Generator().manual_seed(seed * task.n_steps + step))
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        if task.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_gradient_norm)
        optimizer.step()
        if step % every == 0:
            torch.save({"model": model.state_dict(), "step": step}, folder / f"step_{step}.pt")


def rows(seed: int, schedule: str) -> Iterator[dict[str, object]]:
    """Yield what averages of one training are worth, from either chain."""
    with tempfile.TemporaryDirectory() as work:
        run, folder = Path(work) / "run", Path(work)
        run.mkdir()
        train(run, seed, schedule)
        judges = {"evaluator": f"{EVALUATOR}:search", "held_out": f"{EVALUATOR}:held_out"}
        for codec in CODECS:
            compressed = inshrink_core.compress(run, folder / codec, codec=codec)
            steps = inshrink_core.open(folder / codec).steps[-N_AVERAGED:]
            made = average(
                folder / codec,
                folder / f"{codec}-searched",
                steps=steps,
                search=True,
                decay=DECAY,
                budget=BUDGET,
                seed=seed,
                **judges,
            )
            judged = {row.name: row for row in made.judged}
            yield {
                "task": TASK,
                "schedule": schedule,
                "seed": seed,
                "codec": codec,
                "ratio": compressed.size.ratio_weights,
                **{f"held_out_{name}": row.held_out for name, row in judged.items()},
                **{f"searched_on_{name}": row.value for name, row in judged.items()},
                "n_candidates": made.n_candidates,
                "seconds": made.seconds,
            }


def summarise(found: list[dict[str, object]]) -> None:
    """Print in how many seeds the search beats every baseline, and what the lattice costs."""
    for schedule in dict.fromkeys(row["schedule"] for row in found):
        of = {(row["codec"], row["seed"]): row for row in found if row["schedule"] == schedule}
        for codec in CODECS:
            held = [row for (name, _), row in of.items() if name == codec]
            baselines = ("uniform", "ema")
            wins = sum(
                all(row["held_out_search"] < row[f"held_out_{name}"] for name in baselines) for row in held
            )
            means = {
                name: sum(row[f"held_out_{name}"] for row in held) / max(1, len(held))
                for name in ("last", *baselines, "search")
            }
            shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            print(f"{schedule}, {codec}: beats all in {wins} of {len(held)}; {shown}")
        apart = [
            of["lattice", seed]["held_out_search"] / of["lossless", seed]["held_out_search"] - 1
            for seed in SEEDS
            if {("lattice", seed), ("lossless", seed)} <= of.keys()
        ]
        print(f"{schedule}: lattice against lossless, " + ", ".join(f"{one:+.2%}" for one in apart))


def main() -> None:
    """Measure, write, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="these alone")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES[:1])
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    for schedule in options.schedules:
        for seed in options.seeds:
            found += rows(seed, schedule)
            renew("average", found, ("task", "schedule", "seed", "codec"))
    summarise(found)


if __name__ == "__main__":
    main()
