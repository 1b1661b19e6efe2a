"""How right the remaining time of a search is: real searches, what each told on the way, and what came of it.

``python -m benchmarks.remaining [CASE ...]`` runs searches of the bundled sample with several codecs,
strategies and bounds, compares what was said after the third and every later evaluation but the last with the
time that was really left, and leaves the rows of other cases as they are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks import results, runs
from inshrink_core.search.search import SearchProgress

FIRST = 3
"""The evaluation from which on what is said should be right."""

FACTOR = 2.0

CASES: dict[str, dict[str, Any]] = {
    "allocation, drop .01": {"max_drop": 0.01},
    "allocation, divergence .01": {"max_divergence": 0.01, "n_steps": 12},
    "allocation, divergence .0005": {"max_divergence": 0.0005, "n_steps": 6},
    "bracket, divergence .003": {"max_divergence": 0.003, "strategy": "bracket"},
    "bracket, divergence .02": {"max_divergence": 0.02, "strategy": "bracket", "n_steps": 8},
    "bracket, without gain": {"max_drop": 0.02, "strategy": "bracket", "gain": False},
    "lattice, ratio 20": {"target_ratio": 20, "n_steps": 12},
    "lattice, grid": {"max_drop": 0.01, "strategy": "grid", "n_steps": 6},
    "uniform, guided": {"max_drop": 0.01, "codec": "uniform", "n_steps": 8},
    "qd, guided": {"max_divergence": 0.05, "codec": "qd", "n_steps": 12},
    "excp, guided": {"max_divergence": 0.01, "codec": "excp", "n_steps": 6},
    "context, guided": {"max_divergence": 0.02, "codec": "context", "n_steps": 6},
    "inshrinkerator, guided, drop .01": {"max_drop": 0.01, "codec": "inshrinkerator", "n_steps": 6},
    "inshrinkerator, guided, divergence .01": {
        "max_divergence": 0.01,
        "codec": "inshrinkerator",
        "n_steps": 12,
    },
    "inshrinkerator, random": {
        "max_divergence": 0.01,
        "codec": "inshrinkerator",
        "strategy": "random",
        "budget": 20,
        "n_steps": 6,
    },
    "inshrinkerator, ratio 12": {"target_ratio": 12, "codec": "inshrinkerator", "n_steps": 6},
}


def measure(case: str) -> dict[str, object]:
    """Search once; return the share of what was said that was right within the factor."""
    options = dict(CASES[case])
    run = runs.open_run("digits-cnn")
    n_steps = options.pop("n_steps", len(run.steps))
    chosen = [run.steps[len(run.steps) * (k + 1) // n_steps - 1] for k in range(n_steps)]
    said: list[tuple[float, float]] = []

    def progress(now: SearchProgress) -> None:
        said.append((time.perf_counter(), now.seconds_left or 0.0))

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        inshrink_core.search(
            run, steps=chosen, output=Path(scratch) / "found.json", progress=progress, **options
        )
    ended = time.perf_counter()
    judged = [(left, ended - at) for at, left in said[FIRST - 1 : -1]]
    right = [1 / FACTOR <= left / really <= FACTOR for left, really in judged]
    row: dict[str, object] = {
        "case": case,
        "evaluations": len(said),
        "judged": len(judged),
        "right": sum(right),
        "share": sum(right) / len(right) if right else None,
        "at_third": judged[0][0] / judged[0][1] if judged else None,
        "seconds": ended - begun,
    }
    sys.stderr.write(f"{row}\n")
    return row


def main(quick: bool = False, cases: Sequence[str] = ()) -> Path:
    """Write ``results/remaining.csv``; quick: three cases, into a file of their own."""
    chosen = list(cases) or list(CASES)[: 3 if quick else None]
    return results.renew("remaining_quick" if quick else "remaining", list(map(measure, chosen)), ["case"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="by default all")
    main(cases=parser.parse_args().cases)
