"""The LC-Checkpoint codec: residuals in buckets by sign and exponent, the largest promoted, Huffman codes.

Chen, Liu, Ren and Jin, "On Efficient Constructions of Checkpoints" (ICML 2020, arXiv:2009.13003):
exponent-based quantization, priority promotion, Huffman coding of bucket numbers, residuals against the
last reconstructed state.

Notes
-----
Assumptions where the paper gives no details: 3 bits (7 buckets and zero) by default; of two buckets with
equal exponents the positive one is promoted first; bucket values are float32; the first checkpoint is exact;
each tensor stores its Huffman table (the paper caches tables between checkpoints); tensors other than weights
are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from inshrink_core.codec import TensorInput
from inshrink_core.quantization.codebook import ordered_mean
from inshrink_lab.published.flat import BITS, Floats
from inshrink_lab.published.residual import MAX_CENTROIDS, Quantized, ResidualCodec, fit_nearest

__all__ = ["LcCheckpointCodec", "promote_buckets"]

_EXPONENT_OFFSET = 149
"""Offset of float32 exponents, which frexp returns as -148 (smallest positive number) to 128."""

_N_BUCKETS = 2 * (_EXPONENT_OFFSET + 129)


@dataclass(frozen=True, kw_only=True, slots=True)
class LcCheckpointCodec(ResidualCodec[None]):
    """Every weight's residual in a few buckets of exponents; everything else exact.

    Parameters
    ----------
    bits
        A residual is zero or in one of ``2**bits - 1`` buckets, 1..8. Each more keeps smaller residuals.
    representative
        Value of a bucket: ``midrange`` of its members, as published, or their ``mean``.
    coder
        ``huffman``, as published; ``rans``, ``lzma`` or ``zstd``.
    keyframe
        ``exact``, as published, or ``quantized`` to 255 centroids.
    vectors
        Weights of at most one dimension: ``quantized`` like all others, or ``exact``.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec = LcCheckpointCodec()
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> first = codec.encode(TensorInput(spec=spec, tensor=torch.zeros(64, 64)), None, None)
    >>> moved = torch.full((64, 64), 0.25)
    >>> second = codec.encode(TensorInput(spec=spec, tensor=moved), None, first.reference)
    >>> codec.decode(spec, second.block, first.reference).decoded().unique()
    tensor([0.2500])
    """

    name = "lc-checkpoint"
    bitstream = "lc-checkpoint/1"
    ranges: ClassVar = {"bits": (1, 8)}
    words: ClassVar = {"representative": ("midrange", "mean"), **ResidualCodec.words}
    label = "LC-Checkpoint"
    tuning = BITS
    compared = (("LC-Checkpoint", {}),)

    bits: int = 3
    representative: str = "midrange"
    coder: str = "huffman"
    keyframe: str = "exact"
    vectors: str = "quantized"

    def quantize(self, item: TensorInput, values: Floats, plan: None, *, delta: bool) -> Quantized:
        """Put residuals in buckets; assign values without a reference to centroids."""
        if not delta:
            return fit_nearest(values, values != 0, MAX_CENTROIDS, tolerance=0.0)
        return promote_buckets(values, self.bits, self.representative)


def promote_buckets(values: Floats, bits: int, representative: str) -> Quantized:
    """Put values in buckets by sign and exponent; promote those of the largest exponents.

    Parameters
    ----------
    values : Float[ndarray, "n"]
        Finite.
    bits
        The ``2**bits - 1`` largest buckets are promoted; all other values become zero.
    representative
        ``midrange`` or ``mean``.

    Returns
    -------
    Quantized
        Symbols by ascending value of their bucket. O(n) per promoted bucket.

    Examples
    --------
    >>> quantized = promote_buckets(np.array([1.0, 1.5, -6.0, 0.01], np.float32), 1, "midrange")
    >>> quantized.symbols.tolist(), quantized.codebook.tolist()
    ([0, 0, 1, 0], [-6.0])
    """
    _, exponents = np.frexp(values)
    # One number per bucket that sorts by exponent; at equal exponents the positive bucket is larger.
    buckets = np.where(values == 0, 0, 2 * (exponents + _EXPONENT_OFFSET) + (values > 0))
    found = np.flatnonzero(np.bincount(buckets, minlength=1)[1:]) + 1
    promoted = found[-((1 << bits) - 1) :]
    codebook = np.array([_representative(values[buckets == b], representative) for b in promoted], np.float32)
    order = np.argsort(codebook, kind="stable")
    table = np.zeros(_N_BUCKETS, np.uint8)
    table[promoted[order]] = np.arange(1, 1 + order.size)
    return Quantized(table[buckets], codebook[order])


def _representative(members: Floats, kind: str) -> np.float32:
    """Return a bucket's value; buckets do not overlap, so all values are distinct."""
    low, high = float(members.min()), float(members.max())
    value = ordered_mean(members) if kind == "mean" else (low + high) / 2
    return np.float32(min(max(value, low), high))
