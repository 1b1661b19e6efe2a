"""Does a predicted restore cost keep the promise where nothing measures it, and what is gained?

Each task trains once, uninterrupted, and its run is compressed twice, as ``inshrink compress`` does without
an evaluator: at the coarseness that the predicted restore cost allows, and at that of .5. Some restored steps
of both are then judged on the task's held-out data. ``results/predicted.csv`` has a row for each task and way
of writing: the largest and the mean cost, the largest that was predicted, and the ratios. `cost_of_error`
is the largest cost over the largest relative squared error of the matrices, which the prediction takes to be
a constant, with a margin; `left_out` is what the largest cost would be, were that constant the largest of all
*other* tasks of the table, with the same margin. Rows of a coarseness of .5 have the largest cost over the
largest of other candidates, too: errors over weights of all matrices (`of_error`), summed over matrices
(`of_sum`), weighted with second moments, or squared momentum (`of_moments`), and with the roots of these
(`of_roots`). Tasks that the constant was chosen on say so. Runs and finished tasks are kept in
``data/predicted``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import inshrink_core
from benchmarks.controlled import TASKS
from benchmarks.results import DATA, RESULTS, renew
from inshrink_core.chain import QUALITY, archive_size
from inshrink_core.checkpoint import Checkpoint, TensorRole
from inshrink_core.codecs.lattice.plan import COST_OF_SHAPED
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated, task_evaluator
from inshrink_core.lab.tasks import find_task

FOLDER = DATA / "predicted"
CHOSEN_ON: Final = ("char-rnn", "denoise", "digits-cnn", "digits-resnet", "digits-vit", "regression")
"""Tasks that were looked at before the constant was chosen."""

MARGIN: Final = 1.5
"""What the constant has above the largest that was seen."""

BOUND: Final = 0.003
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "predicted": {"predicted_cost": BOUND},
    "coarseness .5": {"coarseness": 0.5},
}


def train(name: str, seed: int) -> Path:
    """Train a task and keep its checkpoints as torch files; return their folder."""
    folder = FOLDER / f"{name}-{seed}"
    if (folder / "losses.json").exists():
        return folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    task, _ = find_task(name)
    schedule = Schedule.of(task, n_restores=0)
    losses, at = {}, 0
    training = Training(Setup(task=task, schedule=schedule, device="cpu"), seed, seed)
    for step in schedule.saved_at:
        training.advance(range(at + 1, step + 1), None, None)
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save({**state, "step": step}, folder / "run" / f"step_{step:06}.pt")
        losses[step] = training.take_loss()
        at = step
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder / "run"


def measured(name: str, seed: int, n_judged: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way of writing one training's run."""
    run = inshrink_core.open(train(name, seed))
    judge = task_evaluator(find_task(name)[0])
    steps = judged_steps(run.steps, n_judged)
    originals = {step: judge.evaluate(run[step]) for step in steps}
    for way, settings in WAYS.items():
        archive = FOLDER / f"{name}-{seed}" / f"{way.replace(' ', '-')}.inshrink"
        shutil.rmtree(archive, ignore_errors=True)
        inshrink_core.compress(run, archive, config=dict(settings) or None, threads=1)
        opened = inshrink_core.open(archive)
        metas = [opened.frame(info).meta for info in opened.frames]
        foreseen = [meta[QUALITY]["restore_cost"] for meta in metas if QUALITY in meta]
        found = [originals[step].restore_cost(judge.evaluate(opened[step])) for step in steps]
        costs = [cost for cost in found if cost is not None]
        size = archive_size(opened)
        yield {
            "task": name,
            "chosen_on": name in CHOSEN_ON,
            "seed": seed,
            "way": way,
            "coarseness": metas[-1]["memory"].get("coarseness", metas[-1]["config"]["coarseness"]),
            "judged": len(costs),
            "ratio_total": size.ratio_total,
            "ratio_weights": size.ratio_weights,
            "mean_cost": statistics.fmean(costs),
            "largest_cost": max(costs),
            "predicted": max(foreseen) if foreseen else None,
            "cost_of_error": max(costs) / max(foreseen) * COST_OF_SHAPED if foreseen else None,
            "above": sum(cost > BOUND for cost in costs),
        }


def relative_errors(original: Checkpoint, restored: Checkpoint) -> dict[str, float]:
    """Return candidates for what a cost may be in proportion to, of the matrices of a checkpoint."""
    rows = []
    for spec in original.specs:
        if spec.role is TensorRole.WEIGHT and len(spec.shape) > 1 and original[spec.key].any():
            now, then = original[spec.key].double(), restored[spec.key].double()
            moment = original.companion_spec(spec, TensorRole.EXP_AVG_SQ, TensorRole.MOMENTUM)
            square = torch.ones_like(now) if moment is None else original[moment.key].double()
            square = square**2 if moment is not None and moment.role is TensorRole.MOMENTUM else square
            rows.append(((now - then) ** 2, now**2, square))
    return {
        "error": float(sum(e.sum() for e, _, _ in rows) / sum(w.sum() for _, w, _ in rows)),
        "sum": float(sum(e.sum() / w.sum() for e, w, _ in rows)),
        "moments": _weighted(rows, 1.0),
        "roots": _weighted(rows, 0.5),
    }


def _weighted(rows: Sequence[tuple[Tensor, Tensor, Tensor]], power: float) -> float:
    errors = sum((error * moment**power).sum() for error, _, moment in rows)
    return float(errors / sum((square * moment**power).sum() for _, square, moment in rows))


def candidates(name: str, seed: int, largest_cost: float, n_judged: int) -> dict[str, float]:
    """Return the largest cost at a coarseness of .5 over the largest of each candidate, measured or kept."""
    kept = FOLDER / f"{name}-{seed}" / "candidates.json"
    if not kept.exists():
        run = inshrink_core.open(train(name, seed))
        opened = inshrink_core.open(FOLDER / f"{name}-{seed}" / "coarseness-.5.inshrink")
        found = [relative_errors(run[step], opened[step]) for step in judged_steps(run.steps, n_judged)]
        largest = {key: max(one[key] for one in found) for key in found[0]}
        kept.write_text(json.dumps({f"of_{key}": largest_cost / value for key, value in largest.items()}))
    read: dict[str, float] = json.loads(kept.read_text())
    return read


def judged_steps(steps: Sequence[int], n: int) -> Sequence[int]:
    """Return the steps that are judged: evenly spread, the last among them."""
    every = max(1, len(steps) // n)
    return steps[every - 1 :: every]


def rows_of(name: str, seed: int, n_judged: int) -> list[dict[str, Any]]:
    """Return the rows of a task, measured or kept."""
    kept = FOLDER / f"{name}-{seed}" / "rows.json"
    if not kept.exists():
        with isolated(1):
            rows = list(measured(name, seed, n_judged))
        kept.write_text(json.dumps(rows))
    found: list[dict[str, Any]] = json.loads(kept.read_text())
    found[1] |= candidates(name, seed, found[1]["largest_cost"], n_judged)
    for row in found:
        sys.stderr.write(f"{row}\n")
    return found


def left_out(rows: Sequence[dict[str, Any]]) -> None:
    """Say of each predicted row what it would cost, were the constant that of all other tasks."""
    predicted = [row for row in rows if row["cost_of_error"]]
    for row in predicted:
        others = [one["cost_of_error"] for one in predicted if one["task"] != row["task"]]
        if others:
            row["left_out"] = row["cost_of_error"] / (MARGIN * max(others)) * BOUND


def main(tasks: Sequence[str], seed: int, judged: int) -> Path:
    """Write the table of tasks, each as soon as it is measured."""
    rows: list[dict[str, Any]] = []
    for name in tasks:
        rows += rows_of(name, seed, judged)
        left_out(rows)
        renew("predicted", rows, ("task", "seed", "way"))
    return RESULTS / "predicted.csv"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=(*TASKS, "digits-cnn"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judged", type=int, default=5, help="restored steps that are judged")
    main(**vars(parser.parse_args()))
