"""Run the benchmarks one after the other: ``python -m benchmarks.run [--quick] [NAME ...]``.

Benchmarks that train keep each finished training in ``benchmarks/data``, and continue where they stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

BENCHMARKS = (
    "sample",
    "requests",
    "explorer",
    "speed",
    "verbs",
    "search",
    "sizes",
    "controlled",
    "published",
    "unseen_data",
    "gpu",
)
"""From minutes to hours. `gpu` says that it has nothing to do where there is no CUDA device."""


def main() -> None:
    """Run the benchmarks named, and print where each result is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="by default all")
    parser.add_argument("--quick", action="store_true", help="smaller versions, ten minutes in all")
    arguments = parser.parse_args()
    for name in arguments.names or BENCHMARKS:
        begun, cpu = time.perf_counter(), time.process_time()
        # Imported when it is its turn: the one for GPUs needs what others do not.
        found = import_module(f"benchmarks.{name}").main(quick=arguments.quick)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        sys.stderr.write(f"{name}: {found} ({seconds:.0f} s, {cpu:.0f} s of this process)\n")


if __name__ == "__main__":
    main()
