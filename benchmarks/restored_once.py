"""What one restore does to the next 100 steps, by what of the restored state comes out of the archive.

Trainings that are restored several times drift apart from uninterrupted ones by chance, too, and much further
than a restore moves them (`benchmarks.restored_parts`). Here a training goes on uninterrupted and is saved
with the defaults; at each restore of its schedule, past the steps where it is unstable, copies of it go on
for 100 steps on the same batches: one exact, the others with some parts out of the archive. The rise is the
mean loss of the training batches over that of the exact copy, less 1. ``moved`` is the control: weights moved
by at most 2⁻⁹ of themselves, less than a last bit of bfloat16.

``results/restored_once.csv`` has a row for each part: mean and half-width of the 95 % interval over the
restores of all seeds, for steps 1 to 10, 11 to 50 and 51 to 100. Restores of one seed share a training, not
their batches. Finished seeds are kept in ``--folder``.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks import gpt_sizes
from benchmarks.restored_parts import OTHER_SEED, mixed
from benchmarks.results import DATA, renew
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated, open_saver
from inshrink_core.lab.rehearsal import Rehearse, half_width
from inshrink_core.lab.tasks import find_task

FOLDER = DATA / "restored_once"
ARMS: Final = ("moved", "weights", "first", "second", "weights+first+second")
_UNSTABLE: Final = 0.45
"""Share of the steps in which the loss still jumps up and down by chance."""


def losses(setup: Setup, seed: int, state: dict[str, Any], step: int, marks: Sequence[int]) -> list[float]:
    """Return the mean training loss between marks, in steps after a state."""
    training = Training(setup, seed, OTHER_SEED)
    training.set_state(copy.deepcopy(state))
    found = []
    for before, after in pairwise((0, *marks)):
        training.advance(range(step + before + 1, step + after + 1), None, None)
        found.append(training.take_loss())
    return found


def rises(setup: Setup, seed: int, marks: Sequence[int], archive: Path) -> dict[str, list[list[float]]]:
    """Train one seed, and return for each arm what the loss rises by after each restore."""
    schedule, chain = setup.schedule, Rehearse(task="char-gpt").chain_config(device="cpu", threads=1)
    found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    copied = archive.with_name(f"copy-of-{archive.name}")
    shutil.rmtree(archive, ignore_errors=True)
    training, at = Training(setup, seed, seed), 0
    saver = open_saver(archive, training, chain)
    for step in schedule.saved_at:
        training.advance(range(at + 1, step + 1), saver.record, None)
        at = step
        saver.save(step)
        if step not in schedule.restored_at or step < _UNSTABLE * schedule.n_steps:
            continue
        saver.flush()
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(archive, copied)
        restored = Training(setup, seed, OTHER_SEED)
        with open_saver(copied, restored, chain) as other:
            other.restore(step)
        exact, decoded = training.state(), restored.state()
        as_it_was = losses(setup, seed, exact, step, marks)
        for arm in ARMS:
            gone_on = losses(setup, seed, mixed(exact, decoded, arm.split("+"), seed, step), step, marks)
            found[arm].append([after / was - 1 for after, was in zip(gone_on, as_it_was, strict=True)])
    saver.close()
    for folder in (archive, copied):
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main(task: str, seeds: Sequence[int], folder: Path, *, quick: bool = False) -> Path:
    """Write ``results/restored_once.csv``, the rows of one task beside what is there."""
    found, _ = find_task(f"{gpt_sizes.__file__}:{task}" if hasattr(gpt_sizes, task) else task)
    schedule = Schedule.of(found, *((40, 4, 1) if quick else ()))
    setup = Setup(task=found, schedule=schedule, device="cpu")
    marks = (2, 4, 8) if quick else (10, 50, 100)
    folder.mkdir(parents=True, exist_ok=True)
    all_rises: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        path = folder / f"{found.name}-{seed}.json"
        if not path.exists():
            with isolated(1):
                of_seed = rises(setup, seed, marks, folder / f"{found.name}-{seed}.inshrink")
            path.write_text(json.dumps(of_seed))
            sys.stderr.write(f"{path.stem}: done\n")
        for arm, more in json.loads(path.read_text()).items():
            all_rises[arm] += more
    rows: list[dict[str, object]] = []
    for arm, each in all_rises.items():
        row: dict[str, object] = {
            "task": found.name,
            "decoded": arm,
            "seeds": len(seeds),
            "restores": len(each),
        }
        for mark, column in zip(marks, zip(*each, strict=True), strict=True):
            row |= {f"rise_to_{mark}": statistics.fmean(column), f"half_width_to_{mark}": half_width(column)}
        rows.append(row)
    return renew("restored_once_quick" if quick else "restored_once", rows, ("task", "decoded"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", default="GPT63", help="of benchmarks/gpt_sizes.py, or a shipped one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--quick", action="store_true", help="a few steps of one small seed")
    given = parser.parse_args()
    if given.quick:
        main("GPT05", [0], given.folder / "quick", quick=True)
    else:
        main(given.task, given.seeds, given.folder)
