"""What README begins with: the bundled sample, compressed as by default, and what a restore of it costs.

One row in ``results/sample.csv``: bytes before and after, the largest drop of the metric of any restored
step, and the largest restore cost. The sample was in view when the defaults were chosen.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import inshrink_core
from benchmarks.results import write


def main(quick: bool = False) -> Path:
    """Compress and compare; the quick version is the whole one."""
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "sample.inshrink"
        written = inshrink_core.compress(run, archive)
        compared = inshrink_core.compare(archive, run)
    row = {
        "run": "digits-cnn",
        "tuned_on": True,
        "checkpoints": len(run.steps),
        "raw_bytes": written.size.raw_total,
        "archive_bytes": written.size.nbytes,
        "ratio_total": written.size.ratio_total,
        "ratio_weights": written.size.ratio_weights,
        "metric": compared.metric,
        "max_drop": compared.max_drop,
        "max_drop_step": max(compared.steps, key=lambda compared_step: compared_step.drop or 0.0).step,
        "max_restore_cost": compared.max_restore_cost,
    }
    return write("sample", [row])


if __name__ == "__main__":
    sys.stderr.write(f"{main()}\n")
