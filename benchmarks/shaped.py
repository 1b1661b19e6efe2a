"""Whether shaped rounding costs trainings no more than is promised: plain against shaped, on the same seeds.

Each task is trained, and restored nine times, under the same bound on the restore cost as in
`benchmarks.controlled`: with plain rounding, with weights shaped (``shaping=auto``), with first moments
shaped (``optimizer=shaped``), and with both. ``results/shaped.csv`` has a row a task and arm, and one of the
differences to plain rounding seed by seed. The constants of shaping were chosen on the tasks of `TUNED`,
those of first moments on `denoise`, too; the others only judge. Finished trainings are kept in ``--folder``,
by default ``data/controlled``; the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import inshrink_core
from benchmarks.controlled import FOLDER, row_of
from benchmarks.results import renew
from benchmarks.shaping import TUNED
from inshrink_core.lab.rehearsal import Rehearsal, half_width
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

TASKS: Final = (
    *("regression", "char-conv", "char-conv-adamw", "digits-resnet", "denoise", "digits-vit"),
    *("char-finetune", "char-lora", "char-moe", "char-rnn"),
)

PLAIN: Final = "plain"
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {"config": {"shaping": "off"}, "optimizer": "compressed"},
    "auto": {"optimizer": "compressed"},
    "moments": {"config": {"shaping": "off"}, "optimizer": "shaped"},
    "auto, moments": {"optimizer": "shaped"},
}
TUNED_MOMENTS: Final = frozenset({*TUNED, "denoise"})

SEEDS: Final = 5
COLUMNS: Final = ("seeds", "ratio_total", "ratio_weights", "excess", "excess_half_width", "mean_cost")


def rehearsed(task: str, arm: str, seeds: int, folder: Path) -> Rehearsal:
    """Return the trainings of an arm."""
    return inshrink_core.rehearse(
        task,
        folder,
        seeds=seeds,
        codec="lattice",
        max_restore_cost=DEFAULT_MAX_RESTORE_COST,
        **{"config": {}, **ARMS[arm]},
    )


def rows_of(arm: str, found: Rehearsal, plain: Rehearsal) -> list[dict[str, object]]:
    """Return the row of an arm, and of its differences to plain rounding."""
    row, tuned = row_of(found, None), TUNED_MOMENTS if "moments" in arm else TUNED
    named = {"task": found.task, "tuned_on": found.task in tuned}
    rows: list[dict[str, object]] = [
        named | {"arm": arm} | {name: row[name] for name in COLUMNS} | {"excesses": row["excesses"]}
    ]
    if arm == PLAIN:
        return rows
    differences = [
        one - other
        for one, other in zip(found.excesses, plain.excesses, strict=True)
        if one is not None and other is not None
    ]
    more: dict[str, Any] = {
        "seeds": len(differences),
        "excess": statistics.fmean(differences),
        "excess_half_width": half_width(differences),
        "excesses": json.dumps([round(one, 5) for one in differences]),
    }
    return [*rows, named | {"arm": f"{arm} over {PLAIN}"} | more]


def main(
    tasks: Sequence[str] = TASKS,
    seeds: int = SEEDS,
    folder: Path = FOLDER,
    arms: Sequence[str] = tuple(ARMS),
) -> Path:
    """Run what is not kept, task by task, and write the table after each."""
    path = Path()
    for task in tasks:
        plain = rehearsed(task, PLAIN, seeds, folder)
        for arm in (PLAIN, *(one for one in arms if one != PLAIN)):
            found = plain if arm == PLAIN else rehearsed(task, arm, seeds, folder)
            rows = rows_of(arm, found, plain)
            sys.stderr.write(f"{rows}\n")
            path = renew("shaped", rows, ("task", "arm"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=tuple(ARMS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where finished trainings are kept")
    main(**vars(parser.parse_args()))
