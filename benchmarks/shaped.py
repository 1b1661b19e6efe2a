"""Whether shaped rounding costs trainings no more than is promised: plain against ``shaping=auto``.

Each task is trained, and restored nine times, under the same bound on the restore cost as in
`benchmarks.controlled`, but with shaped rounding. The plain arm is that benchmark's, on the same seeds
(its row in ``results/controlled.csv``): trainings on one thread are deterministic. ``results/shaped.csv``
has a row a task and arm, and one of the differences seed by seed. The constants of shaping were chosen on
the tasks of `TUNED`; the others only judge. Finished trainings are kept in ``--folder``, by default
``data/controlled``; the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import inshrink_core
from benchmarks.controlled import FOLDER, row_of
from benchmarks.results import RESULTS, renew
from benchmarks.shaping import TUNED
from inshrink_core.lab.rehearsal import Rehearsal, half_width
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

TASKS: Final = ("regression", "char-conv", "denoise", "digits-vit", "digits-resnet")
"""The smallest trainings first."""

SEEDS: Final = 5
COLUMNS: Final = ("seeds", "ratio_total", "ratio_weights", "excess", "excess_half_width", "mean_cost")


def rehearsed(task: str, seeds: int, folder: Path) -> Rehearsal:
    """Return the trainings of a task whose matrices are shaped."""
    return inshrink_core.rehearse(
        task,
        folder,
        seeds=seeds,
        codec="lattice",
        config={"shaping": "auto"},
        optimizer="compressed",
        max_restore_cost=DEFAULT_MAX_RESTORE_COST,
    )


def plain_rows() -> dict[str, Mapping[str, str]]:
    """Return the plain arm, by task."""
    with (RESULTS / "controlled.csv").open(newline="") as file:
        return {row["task"]: row for row in csv.DictReader(file)}


def pair_of(found: Rehearsal, plain: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the rows of both arms, and of their differences on the seeds that both have."""
    shaped = row_of(found, None)
    tuned = {"task": found.task, "tuned_on": found.task in TUNED}
    rows: list[dict[str, object]] = [
        tuned | {"arm": arm} | {name: row[name] for name in COLUMNS} | {"excesses": row["excesses"]}
        for arm, row in (("plain", plain), ("auto", shaped))
    ]
    differences = [
        one - other
        for one, other in zip(found.excesses, json.loads(plain["excesses"]), strict=False)
        if one is not None
    ]
    more: dict[str, Any] = {
        "seeds": len(differences),
        "excess": statistics.fmean(differences),
        "excess_half_width": half_width(differences),
        "excesses": json.dumps([round(one, 5) for one in differences]),
    }
    return [*rows, tuned | {"arm": "auto over plain"} | more]


def main(tasks: Sequence[str] = TASKS, seeds: int = SEEDS, folder: Path = FOLDER) -> Path:
    """Run what is not kept, task by task, and write the table after each."""
    plain, path = plain_rows(), Path()
    for task in tasks:
        found = rehearsed(task, seeds, folder)
        rows = pair_of(found, plain[task])
        sys.stderr.write(f"{rows}\n")
        path = renew("shaped", rows, ("task", "arm"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where finished trainings are kept")
    main(**vars(parser.parse_args()))
