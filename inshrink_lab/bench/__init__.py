"""Every codec on one run: the largest ratio that keeps a bound, measured, not interpolated."""

from inshrink_lab.bench.benchmark import Bench, bench
from inshrink_lab.bench.report import BenchReport, Bound, BoundRow, Point, parse_bounds

__all__ = [
    "Bench",
    "BenchReport",
    "Bound",
    "BoundRow",
    "Point",
    "bench",
    "parse_bounds",
]
