"""What a saver's check takes of a training that saves every 100 steps.

A task trains with two savers side by side, one with a check on a batch of the training's own size, one
without. All on one thread, nothing else in this process: a save takes the processor time that passes until it
is archived. ``results/check.csv`` has a row a task; `share` is what the check adds, over the processor time
of 100 steps. The first saves, which find their spacings, are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import inshrink_core
from benchmarks.results import write
from inshrink_core.training.failing import Schedule, Setup, Training, isolated
from inshrink_core.training.tasks import find_task

TASKS = ("char-gpt", "char-moe", "char-rnn", "denoise", "digits-vit")
SAVE_EVERY = 100
N_SAVES, N_WARM = 9, 4
BETWEEN = 20
"""Steps from one save to the next here; the time of a step is multiplied, and not waited for."""


def processor_seconds(work: Callable[[], Any]) -> float:
    """Return the processor time of this process while something runs."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(name: str, n_saves: int = N_SAVES, warm: int = N_WARM) -> dict[str, object]:
    """Return the row of a task."""
    task, _ = find_task(name)
    schedule = Schedule.of(task, n_restores=0)
    batch = task.batch(0, torch.Generator().manual_seed(1))

    def check(model: torch.nn.Module) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return task.loss(model, batch)

    with tempfile.TemporaryDirectory() as scratch, isolated(1):
        training = Training(Setup(task=task, schedule=schedule, device="cpu"), 0, 0)
        how: list[dict[str, Any]] = [{}, {"check": check}]
        savers = [
            inshrink_core.Saver(
                Path(scratch) / f"{i}", training.model, training.optimizer, device="cpu", **one
            )
            for i, one in enumerate(how)
        ]
        steps: list[float] = []
        saves: list[list[float]] = [[], []]
        for number in range(1, n_saves + 1):
            at = range((number - 1) * BETWEEN + 1, number * BETWEEN + 1)
            spent = processor_seconds(lambda at=at: training.advance(at, None, None))  # type: ignore[misc]
            steps.append(spent / BETWEEN)
            for saver, seconds in zip(savers, saves, strict=True):

                def save(saver: inshrink_core.Saver = saver, number: int = number) -> None:
                    saver.save(number * BETWEEN)
                    saver.flush()

                seconds.append(processor_seconds(save))
        for saver in savers:
            saver.close()
        n = sum(parameter.numel() for parameter in training.model.parameters())
    step = statistics.median(steps[warm:])
    plain, checked = (statistics.fmean(seconds[warm:]) for seconds in saves)
    return {
        "task": name,
        "parameters": n,
        "saves": n_saves - warm,
        "step_ms": 1e3 * step,
        "save_ms": 1e3 * plain,
        "checked_save_ms": 1e3 * checked,
        "share": (checked - plain) / (SAVE_EVERY * step),
    }


def main(quick: bool = False, tasks: Sequence[str] = TASKS) -> Path:
    """Write the table; quick: one task, two saves."""
    if quick:
        return write("check_quick", [measure("denoise", 2, 1)])
    return write("check", [measure(name) for name in tasks])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    main(**vars(parser.parse_args()))
