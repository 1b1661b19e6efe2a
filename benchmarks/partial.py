"""What losing a quarter of a model's tensors costs, in steps: all restored, or the lost ones alone.

`inshrink rehearse --lose 0.25` on two tasks, five seeds, four failures each. ``results/partial.csv`` has a
row a task and codec: mean steps lost each way, and the share that a partial restore saves, over all failures
and seed by seed. A lossless chain tells what the method costs, the default's what its precision adds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.results import RESULTS, renew, write
from inshrink_core.training import rehearse_partial

TASKS = ("regression", "digits-vit")
CODECS = ("lossless", "lattice")
LOSE = 0.25
SEEDS, FAILURES = 5, 4


def measure(task: str, codec: str, seeds: int = SEEDS) -> dict[str, object]:
    """Return the row of a task and a codec."""
    with tempfile.TemporaryDirectory() as scratch:
        found = rehearse_partial(task, scratch, lose=LOSE, codec=codec, restores=FAILURES, seeds=seeds)
    row = {
        "task": task,
        "codec": codec,
        "lose": LOSE,
        "seeds": seeds,
        "failures": len(found.failures),
        "not_reached": sum(not one.reached for one in found.failures),
        "steps_whole": found.whole,
        "steps_partial": found.partial,
        "fewer": found.fewer,
        "fewer_by_seed": json.dumps([round(share, 3) for share in found.fewer_by_seed]),
    }
    sys.stderr.write(f"{row}\n")
    return row


def main(quick: bool = False, tasks: Sequence[str] = TASKS) -> object:
    """Write the table; quick: one seed of one task."""
    if quick:
        return write("partial_quick", [measure("regression", "lossless", 1)])
    for task in tasks:
        for codec in CODECS:
            renew("partial", [measure(task, codec)], ("task", "codec"))
    return RESULTS / "partial.csv"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    main(**vars(parser.parse_args()))
