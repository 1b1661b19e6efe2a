"""What rounded first moments cost a restore, in the unit of the weights: by fixed units, and by spacings.

Momentum that is off by some error goes on to move its weight by ``lr * beta1 / (1 - beta1)`` times that error
(over the root of the second moment). A model displaced by as much, every first moment rounded at once, is
judged as a restored one is, and its restore cost stands beside that of weights rounded to a lattice whose
spacing is chosen for half of the default bound. Uninterrupted trainings, seed 0, the tasks that defaults were
chosen on; ``results/momentum.csv``. Bits are entropies of the integers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import write
from inshrink_core.codecs.moments.block import Form, MomentsReference
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated, task_evaluator
from inshrink_core.lab.tasks import find_task
from inshrink_core.ops.flat import as_float32, sides
from inshrink_core.ops.moments import round_first
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

TASKS = ("char-rnn", "char-conv", "char-conv-adamw")
FIXED = (1.0, 2.0, 4.0)
"""Root mean squares."""
SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of the weights' spacing."""
SENSITIVITY = 0.33
PLACES = (1, 5, 9, 13, 17)
"""Saves that are looked at, of twenty."""


def entropy(values: np.ndarray) -> float:
    """Return the empirical entropy of integers, in bits, of all together."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


class Save:
    """A training at one of its saves: its weights, its moments, and what judges them."""

    def __init__(self, training: Training, evaluator) -> None:
        group = training.optimizer.param_groups[0]
        self.lr = group["lr"]
        is_sgd = "betas" not in group
        beta = group["momentum"] if is_sgd else group["betas"][0]
        self.reach = self.lr * beta / (1 - beta)
        self._evaluator = evaluator
        self._state = {name: value.clone() for name, value in training.model.state_dict().items()}
        self._original = evaluator.evaluate(self._state)
        names = {parameter: name for name, parameter in training.model.named_parameters()}
        self._moments: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._scales: dict[str, Tensor] = {}
        for parameter, state in training.optimizer.state.items():
            if parameter.dim() < 2:
                continue
            name = names[parameter]
            if is_sgd:
                self._moments[name] = (state["momentum_buffer"], None)
                self._scales[name] = torch.ones(())
            else:
                second = state["exp_avg_sq"]
                self._moments[name] = (state["exp_avg"], second)
                self._scales[name] = (second / (1 - group["betas"][1] ** int(state["step"]))).sqrt() + 1e-8
        squares = {
            name: float((first.square() if second is None else second).mean())
            for name, (first, second) in self._moments.items()
        }
        middle = math.exp(sum(map(math.log, squares.values())) / len(squares))
        self._factors = {name: (one / middle) ** (-SENSITIVITY / 2) for name, one in squares.items()}

    def cost(self, moved: dict[str, Tensor]) -> float:
        """Return the restore cost of weights that are displaced."""
        state = self._state | {name: self._state[name] + off for name, off in moved.items()}
        return float(self._original.restore_cost(self._evaluator.evaluate(state)) or 0.0)

    def spacing(self, bound: float) -> float:
        """Return the spacing at which errors spread evenly over it cost the bound."""
        generator = torch.Generator().manual_seed(0)
        errors = {
            name: (torch.rand(self._state[name].shape, generator=generator) - 0.5) * factor
            for name, factor in self._factors.items()
        }
        low, high = 1e-6, 1.0
        for _ in range(16):
            middle = math.sqrt(low * high)
            above = self.cost({name: middle * error for name, error in errors.items()}) > bound
            low, high = (low, middle) if above else (middle, high)
        return low

    def rounded(self, unit: float, spacing: float | None = None) -> tuple[float, float]:
        """Return cost and bits a weight of first moments, in fixed units or in shares of a spacing."""
        moved, bits, n = {}, 0.0, 0
        for name, (first, second) in self._moments.items():
            shape, squares = tuple(first.shape), None if second is None else as_float32(second)
            allowed = None if spacing is None else unit * spacing * self._factors[name] / self.reach
            n_rows, fixed = sides(shape)[0], unit if spacing is None else 2.0
            codes = round_first(as_float32(first), squares, n_rows, fixed, allowed)
            if codes is None:
                raise ValueError(f"'{name}' is not finite")
            form = Form.SCALED if codes.rows.numel() else Form.ZEROS
            made = MomentsReference("float32", shape, form, codes)
            moved[name] = -self.reach * (made.decoded() - first) / self._scales[name]
            bits, n = bits + entropy(codes.elements.numpy()), n + first.numel()
        return self.cost(moved), bits / n


def saves(task: str) -> Iterator[tuple[int, Save]]:
    """Train a task, and yield some of its saves."""
    found, _ = find_task(task)
    schedule = Schedule.of(found, n_restores=0)
    setup, at = Setup(task=found, schedule=schedule, device="cpu"), 0
    with isolated(1):
        evaluator = task_evaluator(found)
        training = Training(setup, 0, 0)
        for place, step in enumerate(schedule.saved_at):
            training.advance(range(at + 1, step + 1), None, None)
            at = step
            if place in PLACES:
                yield step, Save(training, evaluator)


def main(quick: bool = False, tasks: Sequence[str] = TASKS) -> Path:
    """Write the table; quick: one task."""
    rows: list[dict[str, object]] = []
    for task in tasks[:1] if quick else tasks:
        for step, save in saves(task):
            bound = DEFAULT_MAX_RESTORE_COST / 2
            width = save.spacing(bound)
            rules = [("root mean squares", unit, None) for unit in FIXED]
            rules += [("spacings", share, width) for share in SHARES]
            for unit_of, unit, spacing in rules:
                cost, bits = save.rounded(unit, spacing)
                row = {"task": task, "step": step, "lr": save.lr, "spacing": width, "cost_of_weights": bound}
                rows.append(row | {"unit": unit, "unit_in": unit_of, "cost": cost, "bits": bits})
    return write("momentum_quick" if quick else "momentum", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    main(**vars(parser.parse_args()))
