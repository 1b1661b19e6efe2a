"""Run the benchmarks one after the other: ``python -m benchmarks.run [--quick] [--again] [NAME ...]``.

A benchmark that finished is not run again as long as the engine, the benchmarks and the machine are the
same as when it did: a digest of their source files and of the machine's name stands in
``benchmarks/data/finished``. The long ones also keep what they measured piece by piece, so that a run that
was cut off goes on within a benchmark, also after the code has changed. ``--again`` runs what is finished;
``--quick`` always measures, and keeps no such record.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from importlib import import_module
from pathlib import Path

import inshrink_core
from benchmarks.results import DATA, RESULTS, machine

BENCHMARKS = (
    "sample",
    "footprint",
    "small_frames",
    "requests",
    "explorer",
    "explorer_tasks",
    "speed",
    "verbs",
    "codebook",
    "moments",
    "momentum",
    "ratio",
    "overhead",
    "scaling",
    "engines",
    "matrix",
    "lookahead",
    "rivals",
    "optimizer",
    "rehearsal",
    "restore_cost",
    "controlled",
    "published",
    "promise",
    "check",
    "partial",
    "search",
    "remaining",
    "transfer",
    "gpu",
)
"""From minutes to hours. `gpu` says that it has nothing to do where there is no CUDA device."""

QUICK = tuple(name for name in BENCHMARKS if name not in {"moments"})


def digest(folders: tuple[Path, ...] | None = None) -> str:
    """Return what changes with the engine, the benchmarks or the machine."""
    folders = folders or (Path(inshrink_core.__file__).parent, Path(__file__).parent)
    found = hashlib.sha256(machine().encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def is_finished(name: str, now: str, results: Path = RESULTS, data: Path = DATA) -> bool:
    """Whether a benchmark finished with the code of now, and its results are still there."""
    record = data / "finished" / name
    return (results / f"{name}.csv").exists() and record.is_file() and record.read_text() == now


def finish(name: str, now: str, data: Path = DATA) -> None:
    """Note that a benchmark finished."""
    (data / "finished").mkdir(parents=True, exist_ok=True)
    (data / "finished" / name).write_text(now)


def main() -> None:
    """Run what was asked for and say where each result lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="by default all")
    parser.add_argument("--quick", action="store_true", help="smaller versions, ten minutes in all")
    parser.add_argument("--again", action="store_true", help="also what is finished")
    arguments = parser.parse_args()
    now = digest()
    for name in arguments.names or (QUICK if arguments.quick else BENCHMARKS):
        if not (arguments.quick or arguments.again) and is_finished(name, now):
            sys.stderr.write(f"{name}: finished before, with this code on this machine\n")
            continue
        begun, cpu = time.perf_counter(), time.process_time()
        # Imported when it is its turn: the one for GPUs needs what others do not.
        found = import_module(f"benchmarks.{name}").main(quick=arguments.quick)
        if not arguments.quick and isinstance(found, Path):
            finish(name, now)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        sys.stderr.write(f"{name}: {found} ({seconds:.0f} s, {cpu:.0f} s of this process)\n")


if __name__ == "__main__":
    main()
