"""From histograms to codebooks, and from codebooks to look-up tables."""

from inshrink_core.quantization.codebook import (
    ValueHistogram,
    assignment_table,
    fit_exact,
    key_values,
    round_centroids,
    sorted_keys,
    squared_error,
    value_histogram,
)
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
