"""From histograms to codebooks, and from codebooks to look-up tables."""

from inshrink_core.quantization.codebook import (
    assignment_table,
    fit_exact,
    round_centroids,
    squared_error,
)
from inshrink_core.quantization.histogram import ValueHistogram, key_values, sorted_keys, value_histogram
from inshrink_core.quantization.published import fit_published, log_sketch

__all__ = [
    "ValueHistogram",
    "assignment_table",
    "fit_exact",
    "fit_published",
    "key_values",
    "log_sketch",
    "round_centroids",
    "sorted_keys",
    "squared_error",
    "value_histogram",
]
