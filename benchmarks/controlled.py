"""Rehearsals of what a saver with a check does: eight tasks, nine restores, the restore cost bounded.

Weights on the lattice under `DEFAULT_MAX_RESTORE_COST`, optimizer state compressed, as `Saver(check=…)`
writes them; each training is restored nine times from its own archive and ends beside the same seed
uninterrupted. Defaults were chosen on the tasks of `TUNED`; the others only judge. ``results/controlled.csv``
has a row a task: what a restored training loses, what chance alone costs where ``--control`` trained each
seed a third time, and a setting known to be bad, which the task has to tell from nothing: ten times the
bound, or, where that takes far more than half of the bits or does no harm, one coarse step size for all.
Finished trainings are stored in ``data/controlled`` and not trained again; more ``--seeds`` add to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_lab
from benchmarks.results import DATA, write_each
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_lab.rehearsal import Rehearsal

FOLDER = DATA / "controlled"
TUNED = ("char-gpt",)
TASKS = (
    *("digits-resnet", "digits-vit", "denoise", "char-finetune", "char-lora", "char-moe", "regression"),
    "char-gpt",
)
SEEDS, BAD_SEEDS = 5, 3
KNOWN_BAD = 10 * DEFAULT_MAX_RESTORE_COST
BAD_STEP_SIZE = {
    **{"char-finetune": 8.0, "char-lora": 8.0, "char-gpt": 8.0},
    **{"digits-resnet": 1.0, "regression": 4.0},
}
"""Coarseness, of tasks where ten times the bound takes far more than half of the bits, or does no harm."""


def verdict(found: Rehearsal, bad: Rehearsal) -> str:
    """Return what the trainings say: a task counts only if it tells the bad setting from nothing.

    The excess is compared with the control where there is one, else with 0, by its 95 % interval.
    """
    excess, width = found.beyond_chance, found.beyond_chance_half_width
    if excess is None:
        excess, width = found.excess, found.excess_half_width
    if excess is None or width is None:
        return "undecided"
    if bad.excess is None or bad.excess <= excess + width:
        return "undecided"
    return "worse than chance" if excess > width else "not worse than chance"


def row_of(found: Rehearsal, bad: Rehearsal) -> dict[str, object]:
    """Return the row of a task."""
    frames = [
        frame
        for run in found.restored
        if run.bound_record is not None
        for frame in run.bound_record["frames"]
    ]
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
        "chance": found.chance,
        "noise": found.noise,
        "bad_seeds": len(bad.restored),
        "bad_ratio_total": bad.ratio_total,
        "bad_excess": bad.excess,
        "verdict": verdict(found, bad),
        "mean_cost": statistics.fmean(costs) if costs else None,
        "largest_cost": max(costs, default=None),
        "stored_exactly": sum(frame["exact"] for frame in frames),
        "excesses": json.dumps([round(value, 5) for value in found.excesses if value is not None]),
    }


def rehearsed(task: str, seeds: int, **options: Any) -> Rehearsal:
    """Return the trainings of a task."""
    return inshrink_lab.rehearse(task, FOLDER, seeds=seeds, optimizer="compressed", **options)


def known_bad(task: str) -> dict[str, Any]:
    """Return how a task is written that is to end worse."""
    step_size = BAD_STEP_SIZE.get(task)
    if step_size is None:
        return {"max_restore_cost": KNOWN_BAD}
    return {"codec": "lattice", "config": {"coarseness": step_size}}


def main(
    quick: bool = False, tasks: Sequence[str] = TASKS, seeds: int = SEEDS, control: bool = False
) -> Path:
    """Train what is not stored, and write the table after each task; quick: one small task, one seed."""
    tasks, seeds, bad_seeds = (("regression",), 1, 1) if quick else (tasks, seeds, BAD_SEEDS)
    rows = (
        row_of(
            rehearsed(task, seeds, control=control, max_restore_cost=DEFAULT_MAX_RESTORE_COST),
            rehearsed(task, bad_seeds, **known_bad(task)),
        )
        for task in tasks
    )
    return write_each("controlled_quick" if quick else "controlled", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--control", action="store_true")
    main(**vars(parser.parse_args()))
