"""Does the promise hold where nobody looked, and what does following it gain over one constant setting?

Each task trains once, uninterrupted, and savers save it side by side: one that checks every save and bounds
its restore cost, as ``Saver(check=…)`` does by default, and others with one coarseness from first to last.
Every restored step is then judged twice: by the task's own held-out data, which the check saw, and by new
batches, which neither the training nor the check has seen. ``results/promise.csv`` has a row a saver.
`above` and `above_twice` are how many steps cost more on the new batches than the bound, and than twice it.
`constant_at_mean` and `constant_at_largest` are the ratio of everything that one coarseness reaches at the
same mean, or the same largest, cost on the held-out data: interpolated between those that were tried.
Optimizer state is compressed by the same rule in all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import inshrink_core
from benchmarks.controlled import TASKS, TUNED
from benchmarks.interpolation import ratio_at
from benchmarks.results import write
from inshrink_core.chain import archive_size
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.evaluate import Evaluation
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.training.check import CheckedWriter, ModelEvaluator
from inshrink_core.training.failing import Schedule, Setup, _Training, isolated, task_evaluator
from inshrink_core.training.tasks import Task, find_task

COARSENESS = (0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
SEED = 0
N_BATCHES = 16
_UNSEEN = 10**12
"""Seeds of the new batches begin here, beyond those of every step of every training."""


def unseen(task: Task) -> Callable[[nn.Module], Tensor]:
    """Return what gives a model's loss on new batches, the same ones always."""
    batches = [task.batch(i, torch.Generator().manual_seed(_UNSEEN + i)) for i in range(N_BATCHES)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        # Huber's loss has no predictions to tell a restore cost from; the task's metric is a squared error.
        if task.metric == "val_mse":
            return functional.mse_loss(model(batch[0]), batch[1])
        return task.loss(model, batch)

    def check(model: nn.Module) -> Tensor:
        model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(_UNSEEN)
            return torch.stack([loss(model, batch) for batch in batches]).mean()

    return check


def train(task: Task, folder: Path, coarseness: Sequence[float]) -> dict[int, dict[str, Tensor]]:
    """Train with savers beside each other, into ``folder``; return the weights of every save."""
    schedule = Schedule(n_steps=task.n_steps, n_saves=task.n_saves, n_restores=0)
    base = make_chain_config("", None, None, "compressed", 32, "cpu", 1)
    bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    states: dict[int, dict[str, Tensor]] = {}
    with ExitStack() as stack:
        stack.enter_context(isolated(1))
        checked = stack.enter_context(CheckedWriter(base, task_evaluator(task), bounds, follows=True))
        training, at = _Training(Setup(task=task, schedule=schedule, device="cpu"), SEED, SEED), 0

        def saver(name: str, **how: Any) -> inshrink_core.Saver:
            args = (folder / f"{name}.inshrink", training.model, training.optimizer)
            return stack.enter_context(
                inshrink_core.Saver(*args, optimizer_state="compressed", device="cpu", **how)
            )

        savers = [saver("checked", step_writer=checked)]
        savers += [saver(str(one), config={"coarseness": one}) for one in coarseness]
        for step in schedule.saved_at:
            training.advance(range(at + 1, step + 1), lambda: [one.record() for one in savers], None)
            states[step] = {name: value.clone() for name, value in training.model.state_dict().items()}
            for one in savers:
                one.save(step)
            at = step
    return states


def costs(
    archive: inshrink_core.Archive, evaluator: ModelEvaluator, originals: dict[int, Evaluation]
) -> list[float]:
    """Return what restoring each step costs by an evaluator."""
    found = [originals[step].restore_cost(evaluator.evaluate(archive[step])) for step in originals]
    return [cost for cost in found if cost is not None]


def measure(name: str, coarseness: Sequence[float] = COARSENESS) -> list[dict[str, object]]:
    """Return the rows of a task."""
    task, _ = find_task(name)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, isolated(1):
        states = train(task, Path(scratch), coarseness)
        held = task_evaluator(task)
        new = ModelEvaluator(task.build(), unseen(task), spec=f"new batches of '{name}'")
        of_held = {step: held.evaluate(state) for step, state in states.items()}
        of_new = {step: new.evaluate(state) for step, state in states.items()}
        for saver in ("checked", *map(str, coarseness)):
            archive = inshrink_core.open(Path(scratch) / f"{saver}.inshrink")
            seen, fresh = costs(archive, held, of_held), costs(archive, new, of_new)
            row = {
                "task": name,
                "tuned_on": name in TUNED,
                "saver": "checked" if saver == "checked" else "constant",
                "coarseness": None if saver == "checked" else float(saver),
                "max_restore_cost": DEFAULT_MAX_RESTORE_COST if saver == "checked" else None,
                "ratio_total": archive_size(archive).ratio_total,
                "steps": len(fresh),
                "mean_cost": statistics.fmean(seen),
                "largest_cost": max(seen),
                "mean_cost_new": statistics.fmean(fresh),
                "largest_cost_new": max(fresh),
                "above": sum(cost > DEFAULT_MAX_RESTORE_COST for cost in fresh),
                "above_twice": sum(cost > 2 * DEFAULT_MAX_RESTORE_COST for cost in fresh),
            }
            rows.append(row)
    for key in ("mean", "largest"):
        points = [(float(str(row[f"{key}_cost"])), float(str(row["ratio_total"]))) for row in rows[1:]]
        rows[0][f"constant_at_{key}"] = ratio_at(points, float(str(rows[0][f"{key}_cost"])))
    return rows


def main(quick: bool = False, tasks: Sequence[str] = TASKS) -> Path:
    """Write the table; quick: one small task, one constant setting."""
    rows: list[dict[str, object]] = []
    path = Path()
    for name in ("regression",) if quick else tasks:
        rows += measure(name, COARSENESS[2:3] if quick else COARSENESS)
        sys.stderr.write("".join(f"{row}\n" for row in rows[-1 - len(COARSENESS) :]))
        path = write("promise_quick" if quick else "promise", rows)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    main(**vars(parser.parse_args()))
