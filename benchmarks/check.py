"""What a saver's check takes of a training that saves every 100 steps.

A task trains with a saver whose check has a batch of the training's own size, and beside it with one that
has no check. All on one thread, nothing else in this process. ``results/check.csv`` has a row a task, of
times of the processor: a training step, a save without the check and with it until it is archived
(medians), and what the check adds to a save (means), told apart: `forward_ms` is within the function that
was given, two passes forward mostly, and `own_ms` all else that a save without it does not do: an attempt
that was not written, loading two states, comparing what comes of them, reading the frame back. `share` is
both over the time of 100 steps, `own_share` that of the second alone; `attempts` is how often a save was
encoded, in the mean. The first saves, which find their spacings, are not counted.

`save_ms` and `checked_save_ms` are of frames of different coarseness; their difference is not what is added.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import inshrink_core
from benchmarks.results import write
from inshrink_core.chain import ChainWriter
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated
from inshrink_core.lab.tasks import find_task
from inshrink_core.search import trials
from inshrink_core.training.check import CheckedWriter

TASKS = ("char-gpt", "char-moe", "char-rnn", "denoise", "digits-vit")
SAVE_EVERY = 100
N_SAVES, N_WARM = 24, 4
BETWEEN = 20
"""Steps from one save to the next here; the time of a step is multiplied, and not waited for."""


def processor_seconds(work: Callable[[], Any]) -> float:
    """Return the processor time of this process while something runs."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


class _Spent:
    """Adds up the processor time that a thread spends in some functions, and how often they are called."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is counted under a name."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - begun
                self.calls[name] += 1

        return counted

    def added(self) -> tuple[float, float, int]:
        """Return what a check added to one save, in its function and beside that, and the attempts.

        A save without it encodes once what was tried, and writes.
        """
        needed = self.seconds["write"] + self.seconds["encode"] / max(self.calls["encode"], 1)
        own = self.seconds["save"] - needed - self.seconds["forward"]
        return self.seconds["forward"], own, self.calls["encode"]

    def clear(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.calls.clear()


def measure(name: str, n_saves: int = N_SAVES, warm: int = N_WARM) -> dict[str, object]:
    """Return the row of a task."""
    task, _ = find_task(name)
    schedule = Schedule.of(task, n_restores=0)
    batch = task.batch(0, torch.Generator().manual_seed(1))
    spent = _Spent()

    def check(model: torch.nn.Module) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return task.loss(model, batch)

    with (
        tempfile.TemporaryDirectory() as scratch,
        isolated(1),
        patch.object(CheckedWriter, "append", spent.timed("save", CheckedWriter.append)),
        patch.object(ChainWriter, "append", spent.timed("write", ChainWriter.append)),
        patch.object(trials, "encode_step", spent.timed("encode", trials.encode_step)),
    ):
        training = Training(Setup(task=task, schedule=schedule, device="cpu"), 0, 0)
        how: list[dict[str, Any]] = [{}, {"check": spent.timed("forward", check)}]
        savers = [
            inshrink_core.Saver(
                Path(scratch) / f"{i}", training.model, training.optimizer, device="cpu", **one
            )
            for i, one in enumerate(how)
        ]
        steps: list[float] = []
        saves: list[list[float]] = [[], []]
        added: list[tuple[float, float, int]] = []
        for number in range(1, n_saves + 1):
            at = range((number - 1) * BETWEEN + 1, number * BETWEEN + 1)
            taken = processor_seconds(lambda at=at: training.advance(at, None, None))  # type: ignore[misc]
            steps.append(taken / BETWEEN)
            for saver, seconds in zip(savers, saves, strict=True):

                def save(saver: inshrink_core.Saver = saver, number: int = number) -> None:
                    saver.save(number * BETWEEN)
                    saver.flush()

                spent.clear()
                seconds.append(processor_seconds(save))
            added.append(spent.added())
        for saver in savers:
            saver.close()
        n = sum(parameter.numel() for parameter in training.model.parameters())
    step = statistics.median(steps[warm:])
    plain, checked = (statistics.median(seconds[warm:]) for seconds in saves)
    forward, own, attempts = (statistics.fmean(column) for column in zip(*added[warm:], strict=True))
    return {
        "task": name,
        "parameters": n,
        "saves": n_saves - warm,
        "step_ms": 1e3 * step,
        "save_ms": 1e3 * plain,
        "checked_save_ms": 1e3 * checked,
        "forward_ms": 1e3 * forward,
        "own_ms": 1e3 * own,
        "attempts": attempts,
        "own_share": own / (SAVE_EVERY * step),
        "share": (forward + own) / (SAVE_EVERY * step),
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
