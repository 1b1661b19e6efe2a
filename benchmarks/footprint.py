"""Memory of compressing a run of 1 GB checkpoints, and the time of the commands that read headers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from benchmarks.two_threads import gradient

ROWS, COLUMNS, LAYERS = 2048, 2560, 16
"""16 matrices of 5.2 M float32 weights, with both moments of Adam: 1.007 GB a checkpoint."""
N_STEPS = 3
N_SMALL_STEPS, N_SMALL_TENSORS = 50, 40
REPETITIONS = 7

_PEAK = """
import json, sys, time
import torch

def peak_bytes():
    # The high-water mark of this program alone: resource.ru_maxrss would count its parent's.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

base = peak_bytes()
import inshrink_core
begun = time.perf_counter()
report = inshrink_core.compress(sys.argv[1], sys.argv[2], codec="lattice", config={"coarseness": 2.5},
                                optimizer="exact", threads=int(sys.argv[3]))
print(json.dumps({"base": base, "peak": peak_bytes(), "seconds": time.perf_counter() - begun,
                  "ratio_total": report.size.ratio_total}))
"""


def _big_run(directory: Path) -> None:
    """Write a run of large checkpoints whose weights move a little from step to step."""
    generator = torch.Generator().manual_seed(0)
    model = {
        f"layers.{i}.weight": 0.02 * torch.randn(ROWS, COLUMNS, generator=generator) for i in range(LAYERS)
    }
    for step in range(1, N_STEPS + 1):
        state = {}
        for i, weight in enumerate(model.values()):
            weight += 2e-4 * torch.randn(ROWS, COLUMNS, generator=generator)
            moment = 1e-4 * gradient(torch.randn(ROWS, COLUMNS, generator=generator), generator)
            state[i] = {"step": torch.tensor(float(step)), "exp_avg": moment, "exp_avg_sq": moment * moment}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(LAYERS))}]
        torch.save(
            {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": step},
            directory / f"step_{step}.pt",
        )


def memory(threads: int) -> dict[str, object]:
    """Measure the peak memory of compressing, above the interpreter with torch imported."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        run.mkdir()
        _big_run(run)
        checkpoint_bytes = (run / "step_1.pt").stat().st_size
        command = [sys.executable, "-c", _PEAK, str(run), str(Path(scratch) / "out.inshrink"), str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return {
        "measurement": f"compress {N_STEPS} checkpoints, {threads} threads: peak memory above torch",
        "value": (figures["peak"] - figures["base"]) / 1e9,
        "unit": "GB",
        "detail": f"checkpoint {checkpoint_bytes / 1e9:.3f} GB, {figures['seconds']:.1f} s, "
        f"ratio in total {figures['ratio_total']:.2f}",
    }


def startup() -> list[dict[str, object]]:
    """Time `inshrink --help`, and `inspect` on a run of 50 checkpoints with optimizer state."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        run.mkdir()
        write_small_run(run)
        inshrink = Path(sys.executable).with_name("inshrink")
        return [
            _time("inshrink --help", [str(inshrink), "--help"]),
            _time(f"inshrink inspect, {N_SMALL_STEPS} checkpoints", [str(inshrink), "inspect", str(run)]),
        ]


def write_small_run(directory: Path) -> None:
    """Write 50 checkpoints of 40 small tensors with the moments of Adam."""
    model = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(N_SMALL_TENSORS)}
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(16, 16), "exp_avg_sq": torch.zeros(16, 16)}
        for i in range(N_SMALL_TENSORS)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(N_SMALL_TENSORS))}]
    for step in range(1, N_SMALL_STEPS + 1):
        state = {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": step}
        torch.save(state, directory / f"step_{step}.pt")


def _time(label: str, command: list[str]) -> dict[str, object]:
    """Return the median wall time of a command over several runs, after one to warm the cache."""
    seconds = []
    for _ in range(REPETITIONS + 1):
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - begun)
    counted = sorted(seconds[1:])
    return {
        "measurement": label,
        "value": counted[len(counted) // 2],
        "unit": "s",
        "detail": f"{REPETITIONS} runs, {counted[0]:.2f} to {counted[-1]:.2f} s",
    }


def main(quick: bool = False) -> Path:
    """Write ``results/footprint.csv``."""
    rows = startup() if quick else [*startup(), memory(1), memory(2)]
    return write("footprint_quick" if quick else "footprint", rows)


if __name__ == "__main__":
    main()
