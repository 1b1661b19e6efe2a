"""Failure rehearsal: training restored nine times from its archive, against training without.

Trainings that are finished are kept in ``data/rehearsal`` and not run again. The Inshrinkerator codec's
ratio with rANS in the place of its published coder follows from the same trainings: what is decoded, and
so the excess, is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import inshrink_core
from benchmarks.results import DATA, write

SETTINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("lattice", {"coarseness": 4}, "lossless"),
    ("inshrinkerator", {}, "lossless"),
)
SEEDS = 3


def measure(
    task: str, codec: str, config: dict[str, Any], optimizer: str, seeds: int, restores: int | None
) -> dict[str, object]:
    """Rehearse one task under one setting."""
    result = inshrink_core.rehearse(
        task,
        DATA / "rehearsal",
        codec=codec,
        config=config,
        optimizer=optimizer,
        seeds=seeds,
        restores=restores,
    )
    row = {
        "task": task,
        "codec": codec,
        "setting": ", ".join(f"{key}={value}" for key, value in config.items()) or "default",
        "optimizer": optimizer,
        "restores": len(result.restored_at),
        "seeds": seeds,
        "ratio_weights": result.ratio_weights,
        "ratio_total": result.ratio_total,
        "excess": result.excess,
        "excess_half_width": result.excess_half_width,
        "noise": result.noise,
    }
    sys.stderr.write(f"{row}\n")
    return row


def main(quick: bool = False) -> Path:
    """Write ``results/rehearsal.csv``; quick: one seed of the small task, four restores."""
    if quick:
        rows = [measure("digits-cnn", *setting, 1, 4) for setting in SETTINGS]
        return write("rehearsal_quick", rows)
    return write("rehearsal", [measure("char-gpt", *setting, SEEDS, None) for setting in SETTINGS])


if __name__ == "__main__":
    main()
