"""Partition, fit and assign: from the values of one tensor to its symbols, codebook and protected values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from inshrink_core.codecs.inshrinkerator.block import FIRST_BIN, InshrinkeratorReference, round_to_bfloat16
from inshrink_core.ops.quantize import INFINITE_KEY, MAGNITUDE_KEYS, assign, gather_protected, histogram16
from inshrink_core.quantization import (
    ValueHistogram,
    assignment_table,
    fit_exact,
    fit_published,
    round_centroids,
    squared_error,
    value_histogram,
)
from inshrink_core.quantization.partition import NO_UPPER, KeyCounts, Thresholds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.codec import TensorInput
    from inshrink_core.codecs.inshrinkerator.codec import InshrinkeratorCodec

__all__ = ["Observation", "is_finite", "known_gradient", "quantize"]


class Observation(NamedTuple):
    """Histograms of one finite tensor; of abs(g·w) where the gradient is known."""

    magnitude: KeyCounts
    sensitivity: KeyCounts | None


def known_gradient(item: TensorInput) -> Tensor | None:
    """Drop a gradient that cannot be that of this tensor."""
    gradient = item.gradient
    usable = gradient is not None and gradient.shape == item.tensor.shape and gradient.dtype.is_floating_point
    return gradient if usable else None


def is_finite(dense: NDArray[np.int64]) -> bool:
    """Return whether counts by key are those of finite values alone."""
    return not dense.reshape(2, MAGNITUDE_KEYS)[:, INFINITE_KEY:].any()


def quantize(
    item: TensorInput,
    codec: InshrinkeratorCodec,
    cut: Thresholds,
    previous: InshrinkeratorReference | None,
) -> InshrinkeratorReference | None:
    """Partition, fit and assign; None for a tensor with infinities or NaN."""
    spec = item.spec
    gradient = known_gradient(item) if codec.wants_gradients else None
    by_sensitivity = gradient is not None and codec.prune_metric == "sensitivity"
    prune_below = 0 if by_sensitivity else cut.prune_magnitude
    bounds = (cut.prune_sensitivity if by_sensitivity else 0, cut.protect_sensitivity)
    dense = histogram16(item.tensor).numpy()
    if not is_finite(dense):
        return None
    if gradient is not None and bounds != (0, NO_UPPER):
        dense = histogram16(item.tensor, gradient, *bounds).numpy()
    else:
        gradient = None
    halves = dense.reshape(2, MAGNITUDE_KEYS)
    halves[:, :prune_below] = 0
    halves[:, cut.protect_magnitude :] = 0
    codebook = _codebook(value_histogram(dense, spec.dtype), spec, codec, previous)
    table = assignment_table(
        codebook,
        spec.dtype,
        first_symbol=FIRST_BIN,
        prune_below=prune_below,
        protect_from=cut.protect_magnitude,
    )
    symbols = assign(item.tensor, torch.from_numpy(table), gradient, *bounds)
    return InshrinkeratorReference(
        dtype=spec.dtype,
        shape=spec.shape,
        symbols=symbols,
        codebook=torch.from_numpy(codebook),
        protected=round_to_bfloat16(gather_protected(item.tensor, symbols)),
    )


def _codebook(
    histogram: ValueHistogram,
    spec: TensorSpec,
    codec: InshrinkeratorCodec,
    previous: InshrinkeratorReference | None,
) -> NDArray[np.float32]:
    """Fit a codebook, or keep the reference's while it is about as good."""
    k = codec.bins_of(spec)
    if codec.fit == "published":
        fitted = fit_published(histogram, k, alpha=codec.alpha, sigma=codec.sigma, seed=codec.seed)
    else:
        fitted = fit_exact(histogram, k)
    fresh = round_centroids(fitted, spec.dtype, bfloat16=codec.centroids == "bfloat16")
    if codec.codebook == "held" and previous is not None and previous.codebook.numel() <= k:
        held: NDArray[np.float32] = previous.codebook.numpy()
        limit = codec.hold_factor * squared_error(histogram, fresh)
        if squared_error(histogram, held) <= limit:
            return held.copy()
    return fresh
