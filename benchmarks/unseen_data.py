"""Measure the restore cost on unseen data: of a bounded saver, and of other settings and codecs beside it.

Each task trains once, uninterrupted, and several savers save it side by side: one checks every save and
bounds its restore cost, as ``Saver(check=…)`` does by default; the others use one setting throughout. Every
restored step is evaluated twice: on the task's held-out data, which the check used, and on new batches, which
neither the training nor the check has used. ``results/unseen_data.csv`` has a row per saver. `above` and
`above_twice` count the steps whose cost on the new batches exceeds the bound, and twice the bound. ExCP
stores optimizer state by its own rule, all others by that of `--optimizer compressed`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import inshrink_core
from benchmarks.controlled import TASKS, TUNED
from benchmarks.results import RESULTS, renew, write
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.sizes import archive_size
from inshrink_core.evaluate import Evaluation
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.training.check import CheckedWriter, ModelEvaluator
from inshrink_lab.failing import Setup, Training, isolated, task_evaluator
from inshrink_lab.tasks.task import Task, find_task

CONSTANT: Sequence[tuple[str, Mapping[str, Any]]] = (
    *(("lattice", {"coarseness": value}) for value in (0.09, 0.18, 0.25, 0.35, 0.5)),
    *(("inshrinkerator", {"bins": bins, "embedding_bins": bins}) for bins in (16, 32, 64)),
    *(("excp", {"bits": bits}) for bits in (4, 6)),
)
"""Codecs and settings; Inshrinkerator beyond 32 bins, and ExCP beyond 4 bits, are finer than published."""
SEED = 0
N_BATCHES = 16
_UNSEEN = 10**12
"""Seeds of the new batches begin here, beyond those of every step of every training."""


def unseen(task: Task) -> Callable[[nn.Module], Tensor]:
    """Return a function of a model: its loss on new batches, the same at each call."""
    batches = [task.batch(i, torch.Generator().manual_seed(_UNSEEN + i)) for i in range(N_BATCHES)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        # Huber's loss has no predictions that define a restore cost; the task's metric is a squared error.
        if task.name == "regression":
            return functional.mse_loss(model(batch[0]), batch[1])
        return task.loss(model, batch)

    def check(model: nn.Module) -> Tensor:
        model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(_UNSEEN)
            return torch.stack([loss(model, batch) for batch in batches]).mean()

    return check


def train(
    task: Task, folder: Path, constant: Sequence[tuple[str, Mapping[str, Any]]]
) -> dict[int, dict[str, Tensor]]:
    """Train with savers beside each other, into ``folder``, by number; return the weights of every save."""
    setup = Setup.of(task, n_restores=0)
    base = make_chain_config("", None, None, "compressed", 32, "cpu", 1)
    bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    states: dict[int, dict[str, Tensor]] = {}
    with ExitStack() as stack:
        checked = stack.enter_context(CheckedWriter(base, task_evaluator(task), bounds, follows=True))
        training, at = Training(setup, SEED, SEED), 0
        how: list[dict[str, Any]] = [{"step_writer": checked}]
        how += [{"codec": codec, "config": config} for codec, config in constant]
        savers = [
            stack.enter_context(
                inshrink_core.Saver(
                    folder / f"{number}.inshrink",
                    training.model,
                    training.optimizer,
                    optimizer_state="compressed",
                    device="cpu",
                    **saver,
                )
            )
            for number, saver in enumerate(how)
        ]

        def record() -> None:
            for saver in savers:
                saver.record()

        for step in setup.saved_at:
            training.advance(range(at + 1, step + 1), record, None)
            states[step] = {name: value.clone() for name, value in training.model.state_dict().items()}
            for saver in savers:
                saver.save(step)
            at = step
    return states


def costs(
    archive: inshrink_core.Archive, evaluator: ModelEvaluator, originals: dict[int, Evaluation]
) -> list[float]:
    """Return the cost of restoring each step, by an evaluator."""
    found = [originals[step].restore_cost(evaluator.evaluate(archive[step])) for step in originals]
    return [cost for cost in found if cost is not None]


def measure(name: str, constant: Sequence[tuple[str, Mapping[str, Any]]] = CONSTANT) -> list[dict[str, Any]]:
    """Return the rows of a task, the checked saver's first."""
    task, _ = find_task(name)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, isolated(1):
        states = train(task, Path(scratch), constant)
        seen_data = task_evaluator(task)
        new = ModelEvaluator(task.build(), unseen(task), spec=f"new batches of '{name}'")
        of_seen = {step: seen_data.evaluate(state) for step, state in states.items()}
        of_new = {step: new.evaluate(state) for step, state in states.items()}
        for number, (codec, setting) in enumerate((("lattice", {"checked": True}), *constant)):
            archive = inshrink_core.open(Path(scratch) / f"{number}.inshrink")
            size = archive_size(archive)
            seen, fresh = costs(archive, seen_data, of_seen), costs(archive, new, of_new)
            row = {
                "task": name,
                "tuned_on": name in TUNED,
                "codec": codec,
                "setting": ", ".join(f"{key} {value}" for key, value in setting.items()),
                "steps": len(fresh),
                "ratio_total": size.ratio_total,
                "ratio_weights": size.ratio_weights,
                "mean_cost": statistics.fmean(seen),
                "largest_cost": max(seen),
                "mean_cost_new": statistics.fmean(fresh),
                "largest_cost_new": max(fresh),
                "above": sum(cost > DEFAULT_MAX_RESTORE_COST for cost in fresh),
                "above_twice": sum(cost > 2 * DEFAULT_MAX_RESTORE_COST for cost in fresh),
            }
            rows.append(row)
            sys.stderr.write(f"{row}\n")
    return rows


def main(quick: bool = False, tasks: Sequence[str] = TASKS) -> Path:
    """Write the tables after each task; quick: one small task, one constant setting."""
    if quick:
        return write("unseen_data_quick", measure("regression", CONSTANT[:1]))
    for name in tasks:
        renew("unseen_data", measure(name), ("task", "codec", "setting"))
    return RESULTS / "unseen_data.csv"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    main(**vars(parser.parse_args()))
