"""Run the benchmarks one after the other: ``python -m benchmarks.run [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

BENCHMARKS = ("footprint", "speed", "codebook", "ratio", "rehearsal")


def main() -> None:
    """Run what was asked for and say where each result lies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="by default all")
    parser.add_argument("--quick", action="store_true", help="smaller versions, ten minutes in all")
    arguments = parser.parse_args()
    for name in arguments.names or BENCHMARKS:
        begun = time.perf_counter()
        path = import_module(f"benchmarks.{name}").main(quick=arguments.quick)
        sys.stderr.write(f"{name}: {path} ({time.perf_counter() - begun:.0f} s)\n")


if __name__ == "__main__":
    main()
