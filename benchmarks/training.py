"""Training a benchmark run: checkpoints with optimizer state, a log, and the run's evaluator.

The runs themselves are in `benchmarks.runs`. They are written to ``benchmarks/data``, which is not
committed; one that stands there whole is kept.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LOG = "metrics.jsonl"
"""Written last: a run that has it is whole."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one run is trained.

    Parameters
    ----------
    seed
        Of the initialisation and the batches.
    build
        Makes the model, trained already where the run is a fine-tune.
    optimizer
        Makes the optimizer; its groups hold the peak learning rate.
    batch
        Draws inputs and targets.
    loss
        Of the model's output and the targets.
    saved_at
        The steps that are saved; the last ends the training.
    warmup, floor
        Steps of linear warm-up; the share of the peak rate at which the cosine ends.
    evaluator, metric, direction
        The file that is copied into the run, and which of its figures counts.
    files
        Arrays the evaluator reads, by file name.
    """

    seed: int
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    saved_at: tuple[int, ...]
    warmup: int
    floor: float
    evaluator: Path
    metric: str
    direction: str
    files: Mapping[str, Mapping[str, NDArray[np.generic] | int]] = field(default_factory=dict)

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of the peak rate at a step from 1: linear warm-up, then a cosine."""
        if step < self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / max(1, self.saved_at[-1] - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def train(recipe: Recipe, directory: Path) -> Path:
    """Train a run on one thread, unless it stands there already, and return its folder."""
    if (directory / LOG).exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    _write_evaluator(recipe, directory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same operations in the same order, whatever the machine
    try:
        rows = _train(recipe, directory)
    finally:
        torch.set_num_threads(threads)
    (directory / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _write_evaluator(recipe: Recipe, directory: Path) -> None:
    """Put the evaluator, what it reads and the settings that name it into a run's folder."""
    shutil.copyfile(recipe.evaluator, directory / "evaluator.py")
    for name, arrays in recipe.files.items():
        np.savez_compressed(directory / name, **{key: np.asarray(value) for key, value in arrays.items()})
    (directory / "inshrink.toml").write_text(
        '[evaluator]\nfile = "evaluator.py"\nfunction = "evaluate"\n'
        f'metric = "{recipe.metric}"\ndirection = "{recipe.direction}"\n'
    )


def _train(recipe: Recipe, directory: Path) -> list[dict[str, float]]:
    """Train, save at the steps asked for, and return a row a save."""
    torch.manual_seed(recipe.seed)
    model = recipe.build()
    optimizer = recipe.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(recipe.seed)
    rows: list[dict[str, float]] = []
    losses: list[float] = []
    for step in range(1, recipe.saved_at[-1] + 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * recipe.learning_rate_factor(step)
        inputs, targets = recipe.batch(generator)
        loss = recipe.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step in recipe.saved_at:
            rows.append({"step": step, "train_loss": sum(losses) / len(losses)})
            losses.clear()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, directory / f"step_{step:06d}.pt")
            sys.stderr.write(f"{directory.name}: {rows[-1]}\n")
    return rows
