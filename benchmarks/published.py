"""Inshrinkerator and ExCP as published, rehearsed on the tasks that judge what a saver with a check does.

The same trainings as `benchmarks.controlled`: nine restores, the same seeds. Inshrinkerator stores optimizer
state exactly and is compared by the weights; ExCP has a rule for the moments and is compared by everything.
``results/published.csv`` has a row a task and codec: what it reaches, and what ours does at the same excess,
interpolated between the default and coarser settings: that known to be bad, and those of `COARSER`. Where the
codec ends worse than the worst of ours, ours is at least that; where it ends better than our default, ours is
the default, and the pairwise difference says whether that tells anything.

Finished trainings are kept in ``data/controlled``. ``--kept`` writes rows of what is there, trains nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import inshrink_lab
from benchmarks.controlled import FOLDER, TASKS, TUNED, kept_pairs, rehearsed
from benchmarks.interpolation import frontier, ratio_at_excess
from benchmarks.results import write
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_lab.rehearsal import Rehearsal, half_width, kept_rehearsals

CODECS = {"inshrinkerator": "weights", "excp": "everything"}
"""What each codec is compared by."""
SEEDS = 3
COARSER = {"denoise": 2.0, "digits-vit": 2.0}
"""Coarseness, of tasks where Inshrinkerator ends worse than the setting known to be bad."""


def ratio_of(found: Rehearsal, what: str) -> float:
    """Return the ratio that a codec is compared by."""
    ratio = found.ratio_weights if what == "weights" else found.ratio_total
    if ratio is None:
        raise ValueError(f"{found.task} with {found.codec} has stored nothing")
    return ratio


def difference(theirs: Rehearsal, ours: Rehearsal) -> tuple[float, float | None]:
    """Return how much worse they end than ours, over the seeds that both have, and its half-width."""
    mine = {one.seed: excess for one, excess in zip(ours.restored, ours.excesses, strict=True)}
    pairs = [
        excess - mine[one.seed]
        for one, excess in zip(theirs.restored, theirs.excesses, strict=True)
        if excess is not None and mine.get(one.seed) is not None
    ]
    return statistics.fmean(pairs), half_width(pairs)


def row_of(theirs: Rehearsal, ours: Rehearsal, coarser: Iterable[Rehearsal]) -> dict[str, object]:
    """Return the row of a codec on a task."""
    what = CODECS[theirs.codec]
    points = [(one.excess, ratio_of(one, what)) for one in (ours, *coarser) if one.excess is not None]
    excess, known = theirs.excess, frontier(points)
    if excess is None or not known:
        raise ValueError(f"{theirs.task} with {theirs.codec} has no excess")
    against, how = ratio_at_excess(known, excess), "interpolated"
    if against is None:
        worse = excess > known[-1][0]
        against, how = (known[-1][1], "at least") if worse else (ratio_of(ours, what), "default")
    worse_by, width = difference(theirs, ours)
    return {
        "task": theirs.task,
        "tuned_on": theirs.task in TUNED,
        "codec": theirs.codec,
        "compared_by": what,
        "seeds": len(theirs.restored),
        "ratio_weights": theirs.ratio_weights,
        "ratio_total": theirs.ratio_total,
        "excess": excess,
        "excess_half_width": theirs.excess_half_width,
        "ours_excess": ours.excess,
        "worse_by": worse_by,
        "worse_by_half_width": width,
        "ours": against,
        "how": how,
        "lead": against / ratio_of(theirs, what),
    }


def kept_rows() -> list[dict[str, object]]:
    """Return the rows of the trainings that are there."""
    kept = kept_rehearsals(FOLDER)
    found = {(one.task, one.codec): one for one in kept if one.codec in CODECS}
    coarser = [one for one in kept if one.codec == "lattice" and len(one.restored) >= SEEDS]
    return [
        row_of(found[task, codec], ours, [one for one in coarser if one.task == task])
        for codec in CODECS
        for task, (ours, _) in kept_pairs().items()
        if (task, codec) in found
    ]


def main(quick: bool = False, kept: bool = False) -> Path:
    """Train what is not kept, and write the table; quick: one small task, one seed."""
    tasks, seeds = (("regression",), 1) if quick else (TASKS, SEEDS)
    for task in () if kept else tasks:
        rehearsed(task, seeds, max_restore_cost=DEFAULT_MAX_RESTORE_COST)
        if task in COARSER:
            rehearsed(task, seeds, codec="lattice", config={"coarseness": COARSER[task]})
        for codec in CODECS:
            found = inshrink_lab.rehearse(task, FOLDER, codec=codec, optimizer="exact", seeds=seeds)
            sys.stderr.write(f"{task}, {codec}: {found.ratio_total}, excess {found.excess}\n")
    return write("published_quick" if quick else "published", kept_rows())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="write what is kept, train nothing")
    main(kept=parser.parse_args().kept)
