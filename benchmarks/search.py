"""The search under a bound: its ratio and its evaluations, beside one configuration for the whole run.

``python -m benchmarks.search [RUN ...]`` writes a run without a bound, then under a drop bound, where each
step gets its own configuration, and then finds the best single configuration in hindsight; with the lattice
and with Inshrinkerator. RUN is a folder whose settings name an evaluator, by default the bundled sample. Rows
of other runs stay in ``results/search.csv``. Searches begin at the settings of `START`, not at the defaults,
so that rows of different versions can be compared. ``target`` is what the search was built to reach.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks.results import renew

MAX_DROP = 0.01
START: dict[str, dict[str, Any]] = {"lattice": {"coarseness": 2.5}, "inshrinkerator": {}}
SAMPLE = "digits-cnn"


def measure(run: inshrink_core.Run, codec: str, folder: Path, **judge: Any) -> dict[str, tuple[Any, Any]]:
    """Return each figure of a run and a codec, with its target."""
    how: dict[str, Any] = {"codec": codec, "config": START[codec], "optimizer": "exact", "threads": 1}
    # The first call compiles kernels.
    inshrink_core.compress(run, folder / "warm.inshrink", steps=run.steps[:2], **how)
    begun = time.perf_counter()
    fixed = inshrink_core.compress(run, folder / "fixed.inshrink", **how)
    seconds = time.perf_counter() - begun
    report = inshrink_core.compress(run, folder / "bounded.inshrink", max_drop=MAX_DROP, **how, **judge)
    promise = report.bound_record
    if promise is None:
        raise RuntimeError("a chain written under a bound promises nothing")
    document = promise.to_json()
    hindsight = inshrink_core.search(run, max_drop=MAX_DROP, output=folder / "fixed.json", **how, **judge)
    best = hindsight.best.ratio_weights if hindsight.best else 0.0
    return {
        "start_ratio": (fixed.size.ratio_weights, None),
        "bounded_ratio": (report.size.ratio_weights, None),
        "fixed_in_hindsight_ratio": (best, None),
        "worst_drop": (document["max_drop"], document["bounds"]["drop"]),
        "worst_divergence": (document["max_divergence"], document["bounds"]["divergence"]),
        "evaluations_a_step": (promise.evaluations / len(run.steps), 8),
        "exact_steps": (sum(step.exact for step in promise.steps.values()), None),
        "uninformative_steps": (sum(not step.discriminative for step in promise.steps.values()), None),
        "compress_seconds": (seconds, None),
        "bounded_seconds": (report.seconds, None),
        "time_factor": (report.seconds / seconds, None),
        "time_factor_without_evaluator": ((report.seconds - promise.evaluator_seconds) / seconds, 10),
    }


def main(quick: bool = False, folders: Sequence[str] = ()) -> Path:
    """Write ``results/search.csv``, run by run; quick: the lattice alone."""
    path = Path()
    for folder in folders or (inshrink_core.sample(SAMPLE),):
        run = inshrink_core.open(folder)
        judge: dict[str, Any] = {"trust_run": True} if folders else {}
        for codec in list(START)[: 1 if quick else None]:
            with tempfile.TemporaryDirectory() as scratch:
                found = measure(run, codec, Path(scratch), **judge)
            rows = [
                {"run": Path(folder).name, "codec": codec, "figure": figure, "value": value, "target": target}
                for figure, (value, target) in found.items()
            ]
            path = renew("search_quick" if quick else "search", rows, ("run", "codec", "figure"))
            sys.stderr.write("".join(f"{row}\n" for row in rows))
    return path


if __name__ == "__main__":
    main(folders=sys.argv[1:])
