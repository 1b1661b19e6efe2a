"""Ratio, excess and speed against the size of the model, from 0.5 to 25 million parameters.

One GPT over characters in four sizes, AdamW, 512 characters a step, 1,000 steps, 20 saves; two seeds, each
uninterrupted, restored nine times, and moved by last bits where the other is restored (the control). The
defaults, optimizer state included. The task had a part in the defaults at 0.8 M parameters (*tuned on*);
these sizes, steps and learning rates had none. The largest takes a quarter of an hour a training on one core,
six of them: the benchmark goes on where it was stopped, within a training too.

``results/sizes.csv`` has a row a size.

With ``--speed``, ``results/sizes_speed.csv``: of the last two of ten saves of a hundred steps, weights and
moments, `compress` and ``zstd -3`` (level 3 of the library) on one thread, and `restore` of the last one and
decompression, in turns, three times; the median of the ratios says how many times as fast ours is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

import inshrink_core
from benchmarks import gpt_sizes
from benchmarks.results import DATA, write
from inshrink_core.lab.rehearsal import Rehearsal
from inshrink_core.lab.tasks import find_task

FOLDER = DATA / "sizes"
SEEDS = 2
ROUNDS = 3
TASKS: tuple[tuple[str, str | None], ...] = (
    *((f"{gpt_sizes.__file__}:{name}", None) for name in ("GPT05", "GPT18", "GPT63")),
    ("char-gpt", "medium"),
)
BRIEF = {"steps": 100, "saves": 10, "restores": 1, "seeds": 1, "control": False}
QUICK = {"steps": 40, "saves": 4, "restores": 1, "seeds": 1}


def rehearse(task: str, scale: str | None, folder: Path, **options: Any) -> Rehearsal:
    """Train what is not kept yet."""
    found = inshrink_core.rehearse(
        task, folder, scale=scale, keep_archives=True, **({"seeds": SEEDS, "control": True} | options)
    )
    assert isinstance(found, Rehearsal)
    return found


def n_parameters(task: str, scale: str | None) -> int:
    """Return how many numbers a task trains."""
    with torch.device("meta"):
        network = find_task(task, scale)[0].build()
    return sum(weight.numel() for weight in network.parameters())


def row_of(found: Rehearsal, parameters: int) -> dict[str, object]:
    """Return what a rehearsal says."""
    return {
        "task": found.task,
        "parameters": parameters,
        "seeds": len(found.restored),
        "restores": len(found.restored_at),
        "raw_bytes": found.raw_bytes,
        "archive_bytes": found.archive_bytes,
        "ratio_total": found.ratio_total,
        "ratio_weights": found.ratio_weights,
        "excess": found.excess,
        "chance": found.chance,
        "beyond_chance": found.beyond_chance,
        "excesses": [None if one is None else round(one, 5) for one in found.excesses],
        "noise": found.noise,
        "metric": statistics.fmean(one.final for one in found.uninterrupted),
        "train_seconds": found.train_seconds / len(found.uninterrupted),
    }


def speed(archive: Path) -> dict[str, object]:
    """Measure both ways on the last two steps of an archive."""
    with tempfile.TemporaryDirectory(prefix="inshrink-sizes-") as scratch:
        folder = Path(scratch)
        steps = inshrink_core.open(archive).steps[-2:]
        run = folder / "run"
        inshrink_core.restore(archive, run, steps=list(steps))
        raw = [path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()]
        squeeze, expand = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
        squeezed = [squeeze.compress(content) for content in raw]
        found: dict[str, list[float]] = {"compress": [], "restore": []}
        mb_per_s: dict[str, list[float]] = {"compress": [], "restore": []}
        for turn in range(-1, ROUNDS):
            made, out = folder / f"{turn}.inshrink", folder / f"{turn}"
            ours = _seconds(lambda made=made: inshrink_core.compress(run, made, threads=1))
            theirs = _seconds(lambda: [squeeze.compress(content) for content in raw])
            back = _seconds(
                lambda made=made, out=out: inshrink_core.restore(made, out, steps=[steps[-1]], threads=1)
            )
            expanded = _seconds(lambda: expand.decompress(squeezed[-1]))
            if turn >= 0:  # The first compiles.
                found["compress"].append(theirs / ours)
                found["restore"].append(expanded / back)
                mb_per_s["compress"].append(sum(map(len, raw)) / 1e6 / ours)
                mb_per_s["restore"].append(len(raw[-1]) / 1e6 / back)
    return {
        "saves_nbytes": sum(map(len, raw)),
        "compress_mb_per_s": statistics.median(mb_per_s["compress"]),
        "compress_over_zstd": statistics.median(found["compress"]),
        "restore_mb_per_s": statistics.median(mb_per_s["restore"]),
        "restore_over_zstd": statistics.median(found["restore"]),
    }


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main(quick: bool = False, folder: Path = FOLDER, only_speed: bool = False) -> Path:
    """Write ``results/sizes.csv``, or that of speed, after each size what there is; quick: a few steps."""
    rows: list[dict[str, object]] = []
    options: dict[str, Any] = QUICK if quick else BRIEF if only_speed else {}
    name = "sizes_speed" if only_speed else "sizes"
    for task, scale in TASKS[:1] if quick else TASKS:
        own = folder / ("quick" if quick else name) / (scale or task.rpartition(":")[2])
        found, parameters = rehearse(task, scale, own, **options), n_parameters(task, scale)
        if only_speed:
            archive = next(iter(sorted((own / "archives").glob("restored-seed0-*.inshrink"))))
            rows.append({"task": found.task, "parameters": parameters} | speed(archive))
        else:
            rows.append(row_of(found, parameters))
        sys.stderr.write(f"{rows[-1]}\n")
        path = write(f"{name}_quick" if quick else name, rows)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--speed", action="store_true", help="measure speed alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where finished trainings are kept")
    arguments = parser.parse_args()
    main(arguments.quick, arguments.folder, arguments.speed)
