"""Whether a search finds at least what an archive has that nobody searched for, under the same bound.

``python -m benchmarks.explorer_search FOLDER [RUN…]`` does, for each run of a folder as
`benchmarks.explorer_runs` writes them, what the explorer's *Shrink it* and its *Search* do: ``inshrink
compress`` and ``inshrink search`` with the evaluator that lies beside the checkpoints, else ``auto``, both
under the default restore cost. It renews their rows of ``results/explorer_search.csv``; where no evaluator
runs, the row has what the command line says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import renew


def told(*words: str) -> tuple[dict[str, Any], float]:
    """Return the document of a command and its seconds; of one that fails, what it says."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "inshrink_core.cli", *words, "--json"], capture_output=True, text=True
    )
    seconds = time.perf_counter() - begun
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    return document, seconds


def searched(run: Path) -> dict[str, object]:
    """Return the row of a run."""
    beside = run / "evaluator.py"
    judge = ("--evaluator", f"{beside}:evaluate" if beside.exists() else "auto")
    with tempfile.TemporaryDirectory() as folder:
        archive, _ = told("compress", str(run), "-o", f"{folder}/default.inshrink", *judge)
        found, seconds = told("search", str(run), "-o", f"{folder}/search.json", *judge)
    failed = next((one["error"] for one in (archive, found) if "error" in one), None)
    if failed is not None:
        return {"run": run.name, "said": str(failed["message"]).removeprefix(f"{beside}:evaluate: ")}
    best, by_step = found["best"] or {}, found.get("by_step") or {}
    return {
        "run": run.name,
        "ratio_default_archive": archive["ratio_weights"],
        "ratio_search": max(one.get("ratio_weights") or 0.0 for one in (best, by_step)),
        "ratio_one_configuration": best.get("ratio_weights"),
        "ratio_by_step": by_step.get("ratio_weights"),
        "ratio_codec_alone": found["default"]["ratio_weights"],
        "codec_alone_keeps": found["default"]["keeps"],
        "restore_cost": best.get("restore_cost"),
        "evaluations": found["evaluations"],
        "seconds": seconds,
        "load": os.getloadavg()[0],
        "said": "; ".join(found["notes"]),
    }


def main(folder: Path, names: list[str]) -> None:
    """Renew the rows of the runs of a folder, all of them or those that are named."""
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not names or run.name in names:
            row = searched(run)
            renew("explorer_search", [row], ["run"])
            sys.stderr.write(f"{row}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
