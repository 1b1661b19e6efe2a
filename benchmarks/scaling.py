"""Time, memory and overhead of compressing and restoring models of 1 M to 300 M parameters.

The models are matrices and vectors as of a GPT. Four checkpoints, weights alone: each weight moves by a
tenth of its standard deviation at first and by less later, half of it as in the checkpoint before
(momentum), more in some rows than in others. Each measurement is a process of its own; kernels are
compiled, and a small run compressed, before the clock starts. MB/s are of raw bytes, reading and writing
files included; restoring is the whole chain decoded in order to memory, tensor after tensor. CPU seconds
are summed over threads: where they are far below the wall time, the machine was busy with other work. Peak
memory is what compressing, or decoding, holds above what the process held before.

``overhead`` is the share of the archive that is no coded data (`benchmarks.overhead` says how it is
counted); it is counted for the lattice codec.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.results import kept, write

SIZES = {1: (128, 5), 3: (192, 7), 10: (320, 8), 30: (512, 10), 100: (768, 14), 300: (1024, 24)}
"""Width and depth by millions of parameters: 12 · width² · depth."""

CODECS = ("lattice", "inshrinkerator")
N_STEPS = 4
QUICK_LARGEST = 10
TIMEOUT_S = 1800

_CHILD = """
import json, sys, time, pathlib, tempfile
import torch, inshrink_core
from inshrink_core.lab.bench.measure import PeakMemory
from benchmarks.overhead import overhead_share
from benchmarks.scaling import write_run

run, codec, threads, device = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(threads)
config = {"coarseness": 2.5} if codec == "lattice" else {}
options = dict(codec=codec, config=config, optimizer="exact", threads=threads, device=device)

def decode(path):
    walk = inshrink_core.Archive.open(path)
    steps, walk, nbytes = walk.steps, walk.sequential(), 0
    for step in steps:
        checkpoint = walk[step]
        for spec in checkpoint.specs:
            checkpoint.source.read(spec)
        nbytes += checkpoint.raw_bytes()
    return nbytes

with tempfile.TemporaryDirectory(dir=pathlib.Path(run).parent) as scratch:
    scratch = pathlib.Path(scratch)
    (scratch / "small").mkdir()
    write_run(scratch / "small", 64, 1)
    inshrink_core.compress(scratch / "small", scratch / "small.inshrink", **options)
    decode(scratch / "small.inshrink")
    with PeakMemory() as compressing:
        begun, cpu = time.perf_counter(), time.process_time()
        report = inshrink_core.compress(run, scratch / "big.inshrink", **options)
        encode_seconds, encode_cpu = time.perf_counter() - begun, time.process_time() - cpu
    with PeakMemory() as decoding:
        begun, cpu = time.perf_counter(), time.process_time()
        nbytes = decode(scratch / "big.inshrink")
        decode_seconds, decode_cpu = time.perf_counter() - begun, time.process_time() - cpu
    share = overhead_share(scratch / "big.inshrink") if codec == "lattice" else None
print(json.dumps({
    "encode_seconds": encode_seconds, "decode_seconds": decode_seconds,
    "encode_cpu_seconds": encode_cpu, "decode_cpu_seconds": decode_cpu,
    "encode_mb_per_s": nbytes / 1e6 / encode_seconds, "decode_mb_per_s": nbytes / 1e6 / decode_seconds,
    "encode_peak_bytes": compressing.nbytes, "decode_peak_bytes": decoding.nbytes,
    "ratio_weights": report.size.ratio_weights, "overhead": share,
}))
"""


def write_run(directory: Path, width: int, depth: int) -> int:
    """Write four checkpoints of a model and return its number of parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn_qkv": (3 * width, width), "attn_proj": (width, width)}
    shapes |= {"fc1": (4 * width, width), "fc2": (width, 4 * width)}
    model = {
        f"blocks.{layer}.{name}.weight": 0.02 * torch.randn(shape, generator=generator)
        for layer in range(depth)
        for name, shape in shapes.items()
    }
    model |= {f"blocks.{layer}.ln.weight": torch.ones(width) for layer in range(depth)}
    moves = {name: torch.zeros_like(weight) for name, weight in model.items()}
    for step in range(N_STEPS):
        for name, weight in model.items():
            rows = (1, 1) if weight.dim() == 2 else (1,)
            scale = 0.002 / (1 + step) * (0.5 + torch.rand(weight.shape[0], *rows[1:], generator=generator))
            moves[name].mul_(0.5).add_(
                torch.randn(weight.shape, generator=generator) * scale, alpha=0.75**0.5
            )
            weight.add_(moves[name])
        save_file(model, directory / f"step_{step + 1}.safetensors")
    return sum(weight.numel() for weight in model.values())


def measure(millions: int) -> list[dict[str, object]]:
    """Measure one size under every codec, number of threads and device at hand."""
    devices = [("cpu", 1), ("cpu", 2), *([("cuda", 1)] if torch.cuda.is_available() else [])]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="inshrink-scaling-") as scratch:
        run = Path(scratch) / "run"
        run.mkdir()
        n_parameters = write_run(run, *SIZES[millions])
        for codec in CODECS:
            for device, threads in devices:
                figures = _child(run, codec, threads, device)
                rows.append(
                    {
                        "parameters": n_parameters,
                        "steps": N_STEPS,
                        "codec": codec,
                        "device": device,
                        "threads": threads,
                        **figures,
                    }
                )
                sys.stderr.write(f"{rows[-1]}\n")
    return rows


def _child(run: Path, codec: str, threads: int, device: str) -> dict[str, Any]:
    """Measure in a fresh process, so that memory is that of one measurement."""
    command = [sys.executable, "-c", _CHILD, str(run), codec, str(threads), device]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(quick: bool = False, largest: int | None = None) -> Path:
    """Write ``results/scaling.csv``, after each size what there is; quick: up to 10 M parameters."""
    largest = largest or (QUICK_LARGEST if quick else max(SIZES))
    rows: list[dict[str, object]] = []
    for millions in (size for size in SIZES if size <= largest):
        key = {"millions": millions, "version": 1, "steps": N_STEPS, "cuda": torch.cuda.is_available()}
        if quick:
            rows += measure(millions)
        else:
            rows += kept("scaling", f"{millions}m", key, partial(measure, millions))
        path = write("scaling_quick" if quick else "scaling", rows)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--largest", type=int, choices=list(SIZES), help="millions of parameters")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.largest)
