"""From histograms to codebooks, and from codebooks to look-up tables."""

from inshrink_core.quantization.codebook import (
    KeyHistogram,
    assignment_table,
    fit_exact,
    key_histogram,
    key_values,
    round_centroids,
    sorted_keys,
    squared_error,
)
from inshrink_core.quantization.published import fit_published, log_sketch

__all__ = [
    "KeyHistogram",
    "assignment_table",
    "fit_exact",
    "fit_published",
    "key_histogram",
    "key_values",
    "log_sketch",
    "round_centroids",
    "sorted_keys",
    "squared_error",
]
