"""Peak memory of compressing checkpoints of 1 GB, above a process that has imported torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.results import write
from benchmarks.verbs import write_run

ROWS, COLUMNS, LAYERS = 2048, 2560, 16
"""16 matrices of 5.2 M float32 weights, with both moments of Adam: 1.007 GB a checkpoint."""
N_STEPS = 3

_PEAK = """
import sys
import torch

def peak_bytes():
    # The high-water mark of this program alone: resource.ru_maxrss would count its parent's.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

base = peak_bytes()
import inshrink_core
inshrink_core.compress(sys.argv[1], sys.argv[2], codec="lattice", config={"coarseness": 2.5},
                       optimizer="exact", threads=int(sys.argv[3]))
print(peak_bytes() - base)
"""


def memory(threads: int) -> dict[str, object]:
    """Measure the peak memory of compressing, above the interpreter with torch imported."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        generator = torch.Generator().manual_seed(0)
        weights = [0.02 * torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(LAYERS)]
        model = {f"layers.{i}.weight": weight for i, weight in enumerate(weights)}
        write_run(run, model, moments=True, n_steps=N_STEPS)
        checkpoint_bytes = next(run.iterdir()).stat().st_size
        command = [sys.executable, "-c", _PEAK, str(run), str(Path(scratch) / "out.inshrink"), str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {
        "measurement": f"compress {N_STEPS} checkpoints, {threads} threads: peak memory above torch",
        "value": int(done.stdout) / 1e9,
        "unit": "GB",
        "detail": f"checkpoint {checkpoint_bytes / 1e9:.3f} GB",
    }


def main(quick: bool = False) -> Path:
    """Write ``results/footprint.csv``; quick: one thread."""
    rows = [memory(threads) for threads in ((1,) if quick else (1, 2))]
    return write("footprint_quick" if quick else "footprint", rows)


if __name__ == "__main__":
    main()
