"""Whether a save that several writers write at once is on disk sooner, as FastPersist has it.

FastPersist (Wang et al., 2024) writes a checkpoint with a writer per device, past the page cache, from
aligned buffers. Here `NBYTES` are written and synced by one, two and four threads, each with a file of its
own; through the page cache, and past it (``O_DIRECT``) where the file system allows that. Rounds are
interleaved; a row has the median seconds, and those of one writer through the page cache over them. The row
*share of a save* says what there is to gain: the part of compressing a run of that size, on one thread, in
which the disk is waited for. ``results/parallel_writers.csv``; ``--folder`` says whose disk is measured.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import torch

import inshrink_core
from benchmarks.results import write

NBYTES = 512 << 20
_CHUNK = 8 << 20
WRITERS = (1, 2, 4)
ROUNDS = 5


def _write(path: Path, nbytes: int, buffer: mmap.mmap, flags: int) -> None:
    """Write and sync a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    try:
        for _ in range(nbytes // _CHUNK):
            os.write(descriptor, buffer)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seconds(folder: Path, writers: int, *, direct: bool) -> float | None:
    """Return how long the writers take; None where the file system has no such writing."""
    buffers = [mmap.mmap(-1, _CHUNK) for _ in range(writers)]  # aligned to pages
    for buffer in buffers:
        buffer.write(os.urandom(_CHUNK))
    flags = os.O_DIRECT if direct else 0
    errors: list[OSError] = []

    def work(number: int) -> None:
        try:
            _write(folder / f"{number}", NBYTES // writers, buffers[number], flags)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(writers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    return None if errors else took


def share_of_waiting(folder: Path) -> tuple[float, float]:
    """Return the seconds that compressing a run of `NBYTES` takes, and those in which the disk is awaited."""
    run = folder / "run"
    run.mkdir()
    weights = {
        f"{i}.weight": torch.randn(1024, 4096) * 0.02 for i in range(NBYTES // 4 // (1024 * 4096) // 2)
    }
    for step in (1, 2):
        torch.save({"model": weights, "step": step}, run / f"{step}.pt")
        weights = {name: value + 0.001 * torch.randn_like(value) for name, value in weights.items()}
    waited, sync = 0.0, os.fsync

    def timed(descriptor: int) -> None:
        nonlocal waited
        begun = time.perf_counter()
        sync(descriptor)
        waited += time.perf_counter() - begun

    with mock.patch.object(os, "fsync", timed):
        begun = time.perf_counter()
        inshrink_core.compress(run, folder / "a.inshrink", threads=1)
        return time.perf_counter() - begun, waited


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    ways = [(writers, direct) for direct in (False, True) for writers in WRITERS]
    taken: dict[tuple[int, bool], list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(ROUNDS):
            for way in ways:
                took = seconds(Path(folder), way[0], direct=way[1])
                if took is not None:
                    taken[way].append(took)
        whole, waited = share_of_waiting(Path(folder))
    alone = statistics.median(taken[1, False])
    rows: list[dict[str, object]] = [
        {
            "what": "past the page cache" if direct else "through the page cache",
            "writers": writers,
            "seconds": statistics.median(found),
            "fastest": min(found),
            "slowest": max(found),
            "gb_per_s": NBYTES / 1e9 / statistics.median(found),
            "times_one_writer": alone / statistics.median(found),
        }
        for (writers, direct), found in taken.items()
        if found
    ]
    rows.append({"what": "share of a save", "writers": 1, "seconds": whole, "share": waited / whole})
    for row in rows:
        print(row)
    write("parallel_writers", rows)


if __name__ == "__main__":
    main()
