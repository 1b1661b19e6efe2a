"""Compressing a run of 1,000 checkpoints of 50 kB, with a file a frame and with many frames a file."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

import inshrink_core
from benchmarks.results import write

WIDTH = 64
"""One matrix of so many rows and columns, with both moments of Adam: 50 kB of float32."""

N_STEPS, N_QUICK_STEPS, REPETITIONS = 1000, 100, 3

WAYS = {"a file a frame": 1 << 62, "segments": None}
"""How many small files there may be; None is what the engine says."""


def write_run(folder: Path, n_steps: int) -> int:
    """Write checkpoints whose weights move a little from step to step, and return their bytes."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.1 * torch.randn(WIDTH, WIDTH, generator=generator)
    for step in range(1, n_steps + 1):
        moment = 1e-3 * torch.randn(WIDTH, WIDTH, generator=generator)
        weight += moment
        state = {0: {"step": torch.tensor(float(step)), "exp_avg": moment, "exp_avg_sq": moment**2}}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}]
        optimizer = {"state": state, "param_groups": groups}
        torch.save(
            {"model": {"w": weight}, "optimizer": optimizer, "step": step}, folder / f"step_{step:04}.pt"
        )
    return sum(file.stat().st_size for file in folder.iterdir())


@contextmanager
def counted_syncs() -> Iterator[list[int]]:
    """Yield a list that grows with every fsync."""
    syncs: list[int] = []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        syncs.append(descriptor)
        fsync(descriptor)

    with mock.patch.object(os, "fsync", sync):
        yield syncs


def measure(run: Path, target: Path, limit: int | None) -> dict[str, object]:
    """Compress a run, and say what that took and what lies there."""
    with ExitStack() as stack:
        for module in ("archive", "archive.writer") if limit is not None else ():
            stack.enter_context(mock.patch(f"inshrink_core.{module}.MAX_SMALL_FILES", limit))
        syncs = stack.enter_context(counted_syncs())
        begun, cpu = time.perf_counter(), time.process_time()
        report = inshrink_core.compress(run, target, threads=1)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    files = [file for file in target.rglob("*") if file.is_file()]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "files": len(files),
        "syncs": len(syncs),
        "bytes": sum(file.stat().st_size for file in files),
        "disk_bytes": sum(512 * file.stat().st_blocks for file in files),
        "ratio_total": report.size.ratio_total,
    }


def main(quick: bool = False) -> Path:
    """Write ``results/small_frames.csv``."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        run, target = Path(scratch) / "run", Path(scratch) / "run.inshrink"
        run.mkdir()
        n_steps = N_QUICK_STEPS if quick else N_STEPS
        original = write_run(run, n_steps)
        inshrink_core.compress(run, target, steps=range(1, 4), threads=1)  # loads the kernels
        for repetition in range(1 if quick else REPETITIONS):
            for way, limit in WAYS.items():
                shutil.rmtree(target)
                found = {"checkpoints": n_steps, "original_bytes": original, "way": way}
                rows.append(found | {"repetition": repetition + 1} | measure(run, target, limit))
    return write("small_frames_quick" if quick else "small_frames", rows)


if __name__ == "__main__":
    print(main())
