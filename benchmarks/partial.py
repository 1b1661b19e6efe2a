"""What losing a quarter of a model's tensors costs, in steps: all restored, or the lost ones alone.

`inshrink rehearse --lose 0.25` on three tasks with five seeds. ``results/partial.csv`` has a row a task,
codec and budget: mean steps lost each way, those counted where nothing was lost, and the share that a partial
restore saves, over all failures and seed by seed. A lossless chain tells what the method costs, the default's
what its precision adds. Trainings are short: in the long ones of the tasks much of what is counted is chance,
as the first row shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence

import inshrink_core
from benchmarks.results import RESULTS, renew, write

TASKS = {"regression": (200, 10, 9), "digits-cnn": (240, 12, 4), "digits-resnet": (120, 8, 2)}
"""Steps, whole saves and failures of a short training."""
LONG = (2000, 20, 4)
BUDGETS = {"regression": 0.5, "digits-resnet": 0.25}
"""Shares that the largest tensor fits in; of digits-cnn one tensor is nearly all."""
CODECS = ("lossless", "lattice")
LOSE, SEEDS = 0.25, 5
_COLUMNS = ("task", "codec", "budget", "steps")
"""What a row is about."""


def measure(
    task: str, codec: str, budget: float | None, schedule: tuple[int, int, int], seeds: int = SEEDS
) -> dict[str, object]:
    """Return the row of a task, a codec and a budget."""
    steps, saves, failures = schedule
    with tempfile.TemporaryDirectory() as scratch:
        found = inshrink_core.rehearse(
            task,
            scratch,
            lose=LOSE,
            budget=budget,
            codec=codec,
            restores=failures,
            seeds=seeds,
            steps=steps,
            saves=saves,
        )
    row = {
        "task": task,
        "codec": codec,
        "budget": "" if budget is None else budget,
        "steps": steps,
        "saves": saves,
        "lose": LOSE,
        "seeds": seeds,
        "failures": len(found.failures),
        "not_reached": sum(not one.reached for one in found.failures),
        "steps_whole": found.whole,
        "steps_partial": found.partial,
        "steps_chance": found.chance,
        "fewer": found.fewer,
        "fewer_beyond_chance": found.fewer_beyond_chance,
        "archive_bytes": found.archive_bytes,
        "fewer_by_seed": json.dumps([round(share, 3) for share in found.fewer_by_seed]),
    }
    sys.stderr.write(f"{row}\n")
    return row


def main(quick: bool = False, tasks: Sequence[str] = tuple(TASKS)) -> object:
    """Write the table; quick: one seed of one task."""
    if quick:
        return write("partial_quick", [measure("regression", "lossless", None, (40, 10, 2), 1)])
    renew("partial", [measure("regression", "lossless", None, LONG)], _COLUMNS)
    for task in tasks:
        for codec in CODECS:
            for budget in dict.fromkeys((None, BUDGETS.get(task))):
                renew("partial", [measure(task, codec, budget, TASKS[task])], _COLUMNS)
    return RESULTS / "partial.csv"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=tuple(TASKS))
    main(**vars(parser.parse_args()))
