"""Ratio, drop and divergence per codec and setting: digits-cnn, and a GPT of 5 M parameters.

Every row is one chain over the whole run, keyframe included, restored step by step and evaluated; how
optimizer state is stored stands beside the codec's setting. ``lattice, default`` is what `compress` does
where nothing is asked for. The
stale copy (the previous original checkpoint in the place of each step) is the last row of each run: a
drop means nothing where the stale copy's is as small.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks import train_char_gpt
from benchmarks.results import DATA, write
from inshrink_core.evaluate import Comparison
from inshrink_core.formats import Run

RIVAL_OPTIMIZER = "exact"
"""Of the published codec, which says nothing of optimizer state."""

_OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}),
    ("coarseness 2.5", {"coarseness": 2.5}),
    ("coarseness 4", {"coarseness": 4.0}),
    ("coarseness 6", {"coarseness": 6.0}),
)
_RIVALS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}),
    ("8 bins", {"bins": 8}),
    ("12 bins", {"bins": 12}),
    ("16 bins", {"bins": 16}),
    ("64 bins", {"bins": 64, "embedding_bins": 64}),
    ("16 bins, codebook refitted", {"bins": 16, "codebook": "refit"}),
    ("32 bins, codebook refitted", {"bins": 32, "codebook": "refit"}),
    ("16 bins, published fit", {"bins": 16, "fit": "published"}),
    ("16 bins, prune 20 %", {"bins": 16, "prune": 0.2}),
    ("16 bins, rANS", {"bins": 16, "entropy": "rans"}),
    ("32 bins, rANS", {"entropy": "rans"}),
)
SETTINGS: tuple[tuple[str, str, dict[str, Any], str | None], ...] = (
    *((label, "inshrinkerator", config, RIVAL_OPTIMIZER) for label, config in _RIVALS),
    *((label, "lattice", config, None) for label, config in _OURS),
    ("lossless", "lossless", {}, "exact"),
)
"""Label, codec, its settings, and how optimizer state is stored (None: as by default)."""

INFORMATIVE_DIVERGENCE = 0.001
"""Below this the stale copy itself is as good as the checkpoint, and a divergence says nothing."""


def measure(run: Run, name: str, evaluator: str | None) -> list[dict[str, object]]:
    """Compress, restore and evaluate a run under every setting."""
    rows: list[dict[str, object]] = []
    for label, codec, config, optimizer in SETTINGS:
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "run.inshrink"
            report = inshrink_core.compress(
                run, target, codec=codec, config=config, optimizer=optimizer, threads=1
            )
            comparison = inshrink_core.compare(
                target, run, evaluator=evaluator, metric="loss" if evaluator else None
            )
        rows.append(
            {
                "run": name,
                "setting": label,
                "codec": codec,
                "optimizer": report.optimizer,
                "ratio_total": report.size.ratio_total,
                "ratio_weights": report.size.ratio_weights,
                "bits_per_weight": report.size.bits_per_weight,
                "metric": comparison.metric,
                "max_drop": comparison.max_drop,
                "mean_divergence": comparison.mean_divergence,
                "max_divergence": comparison.max_divergence,
                "steps": len(comparison.steps),
                "steps_above_stale": _above_stale(comparison),
                "relative_error": report.relative_error,
            }
        )
        sys.stderr.write(f"{rows[-1]}\n")
    return [*rows, _stale_row(name, comparison)]


def _above_stale(comparison: Comparison) -> int:
    """Count the informative steps at which the archive is no better than a codec that stores nothing."""
    return sum(
        step.stale_divergence is not None
        and step.divergence is not None
        and step.stale_divergence > INFORMATIVE_DIVERGENCE
        and step.divergence >= step.stale_divergence
        for step in comparison.steps
    )


def _stale_row(name: str, comparison: Comparison) -> dict[str, object]:
    """Return the row of the stale copy, which stores nothing and so has no ratio."""
    drops = [step.stale_drop for step in comparison.steps if step.stale_drop is not None]
    divergences = [step.stale_divergence for step in comparison.steps if step.stale_divergence is not None]
    return {
        "run": name,
        "setting": "stale copy",
        "codec": "repeat",
        "metric": comparison.metric,
        "max_drop": max(drops),
        "mean_divergence": sum(divergences) / len(divergences),
        "max_divergence": max(divergences),
        "steps": len(comparison.steps),
    }


def main(quick: bool = False) -> Path:
    """Write ``results/ratio.csv``."""
    rows = measure(inshrink_core.open(inshrink_core.sample("digits-cnn")), "digits-cnn", None)
    if not quick:
        directory = train_char_gpt.train(DATA / "char-gpt")
        run = inshrink_core.open(directory)
        rows += measure(run, "char-gpt-5m", f"{train_char_gpt.__file__}:evaluate")
    return write("ratio_quick" if quick else "ratio", rows)


if __name__ == "__main__":
    main()
