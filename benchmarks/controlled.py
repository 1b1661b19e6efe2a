"""Rehearsals of what a saver with a check does: eleven tasks, nine restores, the restore cost bounded.

Weights on the lattice under `DEFAULT_MAX_RESTORE_COST`, optimizer state compressed, as `Saver(check=…)`
writes them; each training is restored nine times from its own archive and ends beside the same seed
uninterrupted. Defaults were chosen on the tasks of `TUNED`; the others only judge. ``results/controlled.csv``
has a row a task. Finished trainings are kept in ``data/controlled``; more ``--seeds`` add to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import inshrink_core
from benchmarks.results import DATA, write
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_core.training.rehearsal import Rehearsal

FOLDER = DATA / "controlled"
TUNED = ("char-gpt", "char-conv", "char-rnn")
TASKS = (
    *("char-conv", "char-conv-adamw", "char-rnn", "digits-resnet", "digits-vit", "denoise"),
    *("char-finetune", "char-lora", "char-moe", "regression", "char-gpt"),
)
SEEDS = 5


def row_of(found: Rehearsal) -> dict[str, object]:
    """Return the row of a task."""
    frames = [frame for one in found.restored if one.promise is not None for frame in one.promise["frames"]]
    costs = [frame["restore_cost"] for frame in frames if frame["restore_cost"] is not None]
    return {
        "task": found.task,
        "tuned_on": found.task in TUNED,
        "max_restore_cost": DEFAULT_MAX_RESTORE_COST,
        "restores": len(found.restored_at),
        "seeds": len(found.restored),
        "ratio_total": found.ratio_total,
        "ratio_weights": found.ratio_weights,
        "excess": found.excess,
        "excess_half_width": found.excess_half_width,
        "noise": found.noise,
        "mean_cost": statistics.fmean(costs) if costs else None,
        "largest_cost": max(costs, default=None),
        "stored_exactly": sum(frame["exact"] for frame in frames),
        "excesses": json.dumps([round(value, 5) for value in found.excesses if value is not None]),
    }


def main(quick: bool = False, tasks: Sequence[str] = TASKS, seeds: int = SEEDS) -> Path:
    """Run what is not kept, task by task, and write the table after each; quick: one small task, one seed."""
    rows: list[dict[str, object]] = []
    path = Path()
    for task in ("regression",) if quick else tasks:
        found = inshrink_core.rehearse(
            task,
            FOLDER,
            seeds=1 if quick else seeds,
            optimizer="compressed",
            max_restore_cost=DEFAULT_MAX_RESTORE_COST,
        )
        rows.append(row_of(found))
        sys.stderr.write(f"{rows[-1]}\n")
        path = write("controlled_quick" if quick else "controlled", rows)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    main(**vars(parser.parse_args()))
