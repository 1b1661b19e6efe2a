"""Precision by how critical a stretch of training is, against the same precision throughout.

Accordion (Agarwal et al., MLSys 2021) detects critical stretches by how fast the norm of the gradient changes
and compresses less in them. Here the norm is that of the movement since the last save, or after a failure
since the restore: a save is critical where it differs from that of the save before by more than the share
`THRESHOLD` (the published value), or is one of the first two; critical saves take the finer of two
coarsenesses. *reversed* swaps the two, which tells what the detection is worth. Each training is restored
nine times, its optimizer's state exact; its excess is over the same seed uninterrupted.

``results/accordion.csv`` has a row a task and plan: bits of the weights, excess with its standard error over
the seeds, and how many saves were critical. Nothing was tuned: threshold and factor are the paper's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import renew
from inshrink_core.chain import ChainConfig
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import Checkpoint, TensorRole
from inshrink_core.codec import make_codec
from inshrink_core.lab.failing import Schedule, Setup, isolated, train_restored, train_uninterrupted
from inshrink_core.lab.results import TrainingResult
from inshrink_core.lab.tasks import find_task
from inshrink_core.metrics import Direction, drop

THRESHOLD = 0.5
TASKS = ("regression", "digits-vit", "char-rnn")
CONSTANT = (1.0, 2.0, 4.0, 8.0)
PLANS = {"accordion": ((1.0, 4.0), (2.0, 8.0)), "reversed": ((4.0, 1.0), (8.0, 2.0))}
"""Coarseness of critical saves, and of the others."""


class Accordion:
    """Writes each save at one of two coarsenesses.

    Parameters
    ----------
    base
        How frames are written otherwise.
    critical, other
        The two.
    """

    def __init__(self, base: ChainConfig, critical: float, other: float) -> None:
        self._base, self._coarseness = base, {True: critical, False: other}
        self._before: Checkpoint | None = None
        self._weights: dict[str, Tensor] = {}
        self._norm = 0.0
        self.n_critical = 0

    def append(self, chain: Any, checkpoint: Checkpoint, done: Any = None) -> Any:
        """Append a save."""
        weights = {
            spec.key: checkpoint[spec.key].double()
            for spec in checkpoint.specs
            if spec.role is TensorRole.WEIGHT
        }
        norm = self._moved(weights)
        critical = self._norm == 0 or abs(norm - self._norm) >= THRESHOLD * self._norm
        self.n_critical += critical
        self._weights, self._norm = weights, norm
        codec = make_codec("lattice", {"coarseness": self._coarseness[critical]})
        chain.config = replace(self._base, config=codec)
        appended = chain.append(checkpoint, done=done)
        self._before = chain.archive[checkpoint.step]
        return appended

    def _moved(self, weights: Mapping[str, Tensor]) -> float:
        """Return the norm of the movement from what training went on with: the last save, or it restored."""
        if self._before is None:
            return 0.0
        restored = {key: self._before[key].double() for key in weights}
        return min(
            float(torch.stack([(weights[key] - one[key]).square().sum() for key in weights]).sum().sqrt())
            for one in (self._weights, restored)
        )


def measured(
    task: str, plan: tuple[float, float], seeds: int, alone: dict[int, TrainingResult]
) -> dict[str, Any]:
    """Train a task with failures, and compare each seed with itself uninterrupted."""
    shipped, _ = find_task(task)
    setup = Setup(task=shipped, schedule=Schedule.of(shipped, n_restores=9), device="cpu")
    excesses, bits, critical = [], [], []
    for seed in range(seeds):
        chain = make_chain_config("", "lattice", {"coarseness": plan[0]}, "exact", 32, "cpu", 1)
        writer = Accordion(chain, *plan)
        with isolated(1), tempfile.TemporaryDirectory() as folder:
            if seed not in alone:
                alone[seed] = train_uninterrupted(setup, seed)
            found = train_restored(setup, seed, Path(folder) / "a.inshrink", chain, writer=writer)
        excesses.append(drop(alone[seed].metrics[-1], found.metrics[-1], Direction(shipped.direction)))
        bits.append(32 * found.weights_nbytes / found.raw_weights)
        critical.append(writer.n_critical)
    error = statistics.stdev(excesses) / seeds**0.5 if seeds > 1 else None
    return {
        "seeds": seeds,
        "saves": setup.schedule.n_saves,
        "critical": statistics.mean(critical),
        "bits_per_weight": statistics.mean(bits),
        "excess": statistics.mean(excesses),
        "standard_error": error,
    }


def main() -> None:
    """Measure the tasks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for task in arguments.tasks:
        alone: dict[int, TrainingResult] = {}
        plans = [("constant", (one, one)) for one in CONSTANT]
        plans += [(name, one) for name, pairs in PLANS.items() for one in pairs]
        rows = []
        for name, plan in plans:
            row = {"task": task, "plan": name, "critical_at": plan[0], "others_at": plan[1]}
            rows.append(row | measured(task, plan, arguments.seeds, alone))
            print(rows[-1], flush=True)
        renew("accordion", rows, ("task", "plan", "critical_at", "others_at"))


if __name__ == "__main__":
    main()
