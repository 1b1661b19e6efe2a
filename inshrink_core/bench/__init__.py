"""Every codec on one run: the largest ratio that keeps a bound, measured, not interpolated."""

from inshrink_core.bench.benchmark import bench, kept_points
from inshrink_core.bench.report import BenchReport, Bound, Point, Row, parse_bounds
from inshrink_core.bench.variants import Variant, parse_variants

__all__ = [
    "BenchReport",
    "Bound",
    "Point",
    "Row",
    "Variant",
    "bench",
    "kept_points",
    "parse_bounds",
    "parse_variants",
]
