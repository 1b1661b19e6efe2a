"""Rehearsals of what a saver with a check does: eleven tasks, nine restores, the restore cost bounded.

Weights on the lattice under `DEFAULT_MAX_RESTORE_COST`, optimizer state compressed, as `Saver(check=…)`
writes them; each training is restored nine times from its own archive and ends beside the same seed
uninterrupted. Defaults were chosen on the tasks of `TUNED`; the others only judge. ``results/controlled.csv``
has a row a task: what a restored training loses, what chance alone costs where ``--control`` trained each
seed a third time, and a setting known to be bad, which the task has to tell from nothing: ten times the
bound, or, where that takes far more than half of the bits or does no harm, one coarse spacing for all of it.
Finished trainings are kept in ``data/controlled``; more ``--seeds`` add to them.

``--scale large`` trains the same tasks with models for a GPU, a GPT of 114 M parameters among them, and
writes ``results/controlled_large.csv``. Nothing of either scale is taken for the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_lab
from benchmarks.results import DATA, write
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_lab.rehearsal import Rehearsal, kept_rehearsals
from inshrink_lab.tasks.task import LARGE

FOLDER = DATA / "controlled"
TUNED = ("char-gpt", "char-conv", "char-conv-adamw", "char-rnn")
TASKS = (
    *("char-conv", "char-conv-adamw", "char-rnn", "digits-resnet", "digits-vit", "denoise"),
    *("char-finetune", "char-lora", "char-moe", "regression", "char-gpt"),
)
SEEDS, BAD_SEEDS = 5, 3
KNOWN_BAD = 10 * DEFAULT_MAX_RESTORE_COST
BAD_SPACING = {
    **{"char-finetune": 8.0, "char-lora": 8.0, "char-gpt": 8.0},
    **{"digits-resnet": 1.0, "regression": 4.0},
}
"""Coarseness, of tasks where ten times the bound takes far more than half of the bits, or does no harm."""


def verdict(found: Rehearsal, bad: Rehearsal | None) -> str:
    """Return what the trainings say: a task counts only if it tells the bad setting from nothing.

    The excess is compared with the control where there is one, else with 0, by its 95 % interval.
    """
    excess, width = found.beyond_chance, found.beyond_chance_half_width
    if excess is None:
        excess, width = found.excess, found.excess_half_width
    if excess is None or width is None:
        return "undecided"
    if bad is None or bad.excess is None or bad.excess <= excess + width:
        return "undecided"
    return "worse than chance" if excess > width else "not worse than chance"


def row_of(found: Rehearsal, bad: Rehearsal | None) -> dict[str, object]:
    """Return the row of a task."""
    frames = [frame for one in found.restored if one.promise is not None for frame in one.promise["frames"]]
    costs = [frame["restore_cost"] for frame in frames if frame["restore_cost"] is not None]
    return {
        "task": found.task,
        "tuned_on": found.task.partition("@")[0] in TUNED,
        "max_restore_cost": DEFAULT_MAX_RESTORE_COST,
        "restores": len(found.restored_at),
        "seeds": len(found.restored),
        "ratio_total": found.ratio_total,
        "ratio_weights": found.ratio_weights,
        "excess": found.excess,
        "excess_half_width": found.excess_half_width,
        "chance": found.chance,
        "noise": found.noise,
        "bad_seeds": 0 if bad is None else len(bad.restored),
        "bad_ratio_total": None if bad is None else bad.ratio_total,
        "bad_excess": None if bad is None else bad.excess,
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
    spacing = BAD_SPACING.get(task.partition("@")[0])
    if spacing is None:
        return {"max_restore_cost": KNOWN_BAD}
    return {"codec": "lattice", "config": {"coarseness": spacing}}


def kept_pairs(scale: str | None = None) -> dict[str, tuple[Rehearsal, Rehearsal | None]]:
    """Return what is kept of each task: under the bound, and written as is known to be bad."""
    found: dict[tuple[str, object], Rehearsal] = {}
    for one in kept_rehearsals(FOLDER):
        if one.codec == "lattice":
            promise = one.restored[0].promise
            at = one.config.get("coarseness") if promise is None else promise["bounds"].get("restore_cost")
            found[one.task, at] = one
    names = {f"{task}@{scale}" if scale else task: BAD_SPACING.get(task, KNOWN_BAD) for task in TASKS}
    return {
        name: (found[name, DEFAULT_MAX_RESTORE_COST], found.get((name, bad)))
        for name, bad in names.items()
        if (name, DEFAULT_MAX_RESTORE_COST) in found
    }


def kept_rows(scale: str | None = None) -> list[dict[str, object]]:
    """Return the rows of the trainings that are there already."""
    return [row_of(*pair) for pair in kept_pairs(scale).values()]


def main(
    quick: bool = False,
    tasks: Sequence[str] = TASKS,
    seeds: int = SEEDS,
    control: bool = False,
    kept: bool = False,
    scale: str | None = None,
    device: str = "auto",
) -> Path:
    """Run what is not kept, task by task, and write the table after each; quick: one small task, one seed."""
    table = f"controlled_{scale}" if scale else "controlled"
    if kept:
        return write(table, kept_rows(scale))
    where = {"scale": scale, "device": device}
    rows: list[dict[str, object]] = []
    path = Path()
    for task in ("regression",) if quick else tasks:
        bound = {"max_restore_cost": DEFAULT_MAX_RESTORE_COST}
        found = rehearsed(task, 1 if quick else seeds, control=control, **bound, **where)
        bad = rehearsed(task, 1 if quick else BAD_SEEDS, **known_bad(task), **where)
        rows.append(row_of(found, bad))
        sys.stderr.write(f"{rows[-1]}\n")
        path = write(f"{table}_quick" if quick else table, rows)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--scale", choices=[LARGE], help="models for a GPU")
    parser.add_argument("--device", default="auto", help="where training happens: auto, cpu or cuda")
    parser.add_argument("--kept", action="store_true", help="write the table of what is there, train nothing")
    main(**vars(parser.parse_args()))
