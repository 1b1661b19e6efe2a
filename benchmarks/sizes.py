"""Ratio, excess and speed against the size of the model, from 0.5 to 25 million parameters.

One GPT over characters in four sizes, AdamW, 512 characters a step, 1,000 steps, 20 saves; two seeds, each
uninterrupted, restored nine times, and moved by last bits where the other is restored (the control). The
defaults, optimizer state included. The task had a part in the defaults at 0.8 M parameters (*tuned on*);
these sizes, steps and learning rates had none. The largest takes a quarter of an hour a training on one core,
six of them: the benchmark goes on after the trainings that are finished.

``results/sizes.csv`` has a row a size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import inshrink_lab
from benchmarks.results import DATA, write_each
from inshrink_lab.tasks.char_gpt import CharGPTTask
from inshrink_lab.tasks.task import find_task

FOLDER = DATA / "sizes"
SEEDS = 2
TASKS = tuple(f"{__file__}:{name}" for name in ("GPT05", "GPT18", "GPT63", "GPT254"))
QUICK = {"steps": 40, "saves": 4, "restores": 1, "seeds": 1}


class GPT05(CharGPTTask):
    """0.5 M parameters."""

    name = "char-gpt-0.5m"
    context, batch_size, n_steps, n_validation_windows = 128, 4, 1000, 64
    width, depth, heads, peak_learning_rate = 96, 4, 3, 2e-3


class GPT18(GPT05):
    """1.8 M parameters."""

    name = "char-gpt-1.8m"
    width, depth, heads, peak_learning_rate = 192, 4, 4, 1.5e-3


class GPT63(GPT05):
    """6.3 M parameters."""

    name = "char-gpt-6.3m"
    width, depth, heads, peak_learning_rate = 320, 5, 5, 1e-3


class GPT254(GPT05):
    """25.4 M parameters: a training of a quarter of an hour on one core."""

    name = "char-gpt-25.4m"
    width, depth, heads, peak_learning_rate = 512, 8, 8, 6e-4


def n_parameters(task: str) -> int:
    """Return how many numbers a task trains."""
    with torch.device("meta"):
        network = find_task(task)[0].build()
    return sum(weight.numel() for weight in network.parameters())


def measure(task: str, trainings: Path, options: dict[str, Any]) -> dict[str, object]:
    """Return the row of a size."""
    found = inshrink_lab.rehearse(task, trainings, **options)
    return {
        "task": found.task,
        "parameters": n_parameters(task),
        "seeds": len(found.restored),
        "restores": len(found.restored_at),
        "raw_bytes": found.raw_bytes,
        "archive_bytes": found.archive_bytes,
        "ratio_total": found.ratio_total,
        "ratio_weights": found.ratio_weights,
        "excess": found.excess,
        "chance": found.chance,
        "beyond_chance": found.beyond_chance,
        "excesses": [None if value is None else round(value, 5) for value in found.excesses],
    }


def main(quick: bool = False) -> Path:
    """Write ``results/sizes.csv`` after each size; quick: a few steps of the smallest."""
    name, tasks = ("sizes_quick", TASKS[:1]) if quick else ("sizes", TASKS)
    options: dict[str, Any] = {"seeds": SEEDS, "control": True} | (QUICK if quick else {})
    rows = (measure(task, FOLDER / name / task.rpartition(":")[2], options) for task in tasks)
    return write_each(name, rows)


if __name__ == "__main__":
    main()
