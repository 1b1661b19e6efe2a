"""Inshrinkerator and ExCP as published, rehearsed on the tasks that judge what a saver with a check does.

The same trainings as `benchmarks.controlled`: nine restores, the same seeds. Inshrinkerator stores optimizer
state exactly and is compared by the weights; ExCP has a rule for the moments and is compared by everything.
``results/published.csv`` has a row a task and codec: what it reaches, and what ours does at the same excess,
interpolated between the default and coarser settings: that known to be bad, and those of `COARSER`. Where the
codec ends worse than the worst of ours, ours is at least that; where it ends better than our default, ours is
the default, and the pairwise difference says whether that tells anything.

Finished trainings are stored in ``data/controlled``, beside those of `benchmarks.controlled`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import inshrink_lab
from benchmarks.controlled import FOLDER, TASKS, TUNED, known_bad, rehearsed
from benchmarks.results import write_each
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_lab.rehearsal import Rehearsal, half_width

CODECS = {"inshrinkerator": "weights", "excp": "everything"}
"""What each codec is compared by."""
SEEDS = 3
COARSER = {"denoise": (2.0,), "digits-vit": (2.0,), "regression": (1.0, 2.0, 8.0)}
"""More settings of coarseness, of tasks where Inshrinkerator ends worse than the setting known to be bad."""


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (excess, ratio) points that no other beats in both, by rising excess.

    Examples
    --------
    >>> frontier([(0.02, 30.0), (0.01, 20.0), (0.03, 25.0)])
    [(0.01, 20.0), (0.02, 30.0)]
    """
    best: list[tuple[float, float]] = []
    for excess, ratio in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or ratio > best[-1][1]:
            best.append((excess, ratio))
    return best


def ratio_at_excess(points: Iterable[tuple[float, float]], excess: float) -> float | None:
    """Return the ratio at a mean excess, which may be negative: linear in it, logarithmic in the ratio.

    Examples
    --------
    >>> ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001)
    20.0
    """
    for (e0, r0), (e1, r1) in pairwise(frontier(points)):
        if e0 <= excess <= e1:
            return round(float(r0 * (r1 / r0) ** ((excess - e0) / (e1 - e0))), 2)
    return None


def ratio_of(found: Rehearsal, what: str) -> float:
    """Return the ratio that a codec is compared by."""
    ratio = found.ratio_weights if what == "weights" else found.ratio_total
    if ratio is None:
        raise ValueError(f"{found.task} with {found.codec} has stored nothing")
    return ratio


def difference(theirs: Rehearsal, ours: Rehearsal) -> tuple[float, float | None]:
    """Return how much worse they end than ours, over the seeds that both have, and its half-width."""
    mine = {trial.seed: excess for trial, excess in zip(ours.restored, ours.excesses, strict=True)}
    pairs = [
        excess - mine[trial.seed]
        for trial, excess in zip(theirs.restored, theirs.excesses, strict=True)
        if excess is not None and mine.get(trial.seed) is not None
    ]
    return statistics.fmean(pairs), half_width(pairs)


def row_of(theirs: Rehearsal, ours: Rehearsal, coarser: Iterable[Rehearsal]) -> dict[str, object]:
    """Return the row of a codec on a task."""
    what = CODECS[theirs.codec]
    points = [(trial.excess, ratio_of(trial, what)) for trial in (ours, *coarser) if trial.excess is not None]
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


def rows_of(task: str, seeds: int) -> Iterator[dict[str, object]]:
    """Yield the row of each codec on a task."""
    ours = rehearsed(task, seeds, max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    settings = [{"codec": "lattice", "config": {"coarseness": value}} for value in COARSER.get(task, ())]
    coarser = [rehearsed(task, seeds, **trial) for trial in (known_bad(task), *settings)]
    for codec in CODECS:
        found = inshrink_lab.rehearse(task, FOLDER, codec=codec, optimizer="exact", seeds=seeds)
        yield row_of(found, ours, coarser)


def main(quick: bool = False) -> Path:
    """Train what is not stored, and write the table after each row; quick: one small task, one seed."""
    tasks, seeds = (("regression",), 1) if quick else (TASKS, SEEDS)
    rows = (row for task in tasks for row in rows_of(task, seeds))
    return write_each("published_quick" if quick else "published", rows)


if __name__ == "__main__":
    main()
