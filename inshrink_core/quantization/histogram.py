"""What a 16-bit key stands for, and the list of key bins that a codebook is fitted to."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["N_KEYS", "ValueHistogram", "key_values", "ordered_sum", "sorted_keys", "value_histogram"]

N_KEYS = 1 << 16
"""Keys are the upper half of a float32: sign, exponent, seven bits of mantissa."""

_N_FINITE = 0x7F80
"""Finite magnitude keys: 0 up to the key of infinity."""

_OFFSETS = {"float32": 0x8000, "float16": 0x7000, "bfloat16": 0}
"""Middle of the lower half that a key leaves open, by stored dtype: all 16 bits of a float32, the upper
three of a float16 (0..7 in units of 2^13, mean 3.5), none of a bfloat16."""


class ValueHistogram(NamedTuple):
    """Key bins that occur, in the order of their values.

    Parameters
    ----------
    values : Float[ndarray, "m"]
        float64 representatives, ascending (the two zeros may stand side by side).
    counts : Int[ndarray, "m"]
        Positive int64 counts.
    """

    values: NDArray[np.float64]
    counts: NDArray[np.int64]


@cache
def key_values(dtype: str) -> NDArray[np.float64]:
    """Return the representative of every key: the middle of the values of `dtype` that share it.

    Parameters
    ----------
    dtype
        ``float32``, ``float16`` or ``bfloat16``.

    Returns
    -------
    Float[ndarray, "65536"]
        float64; zero for the two zero keys (subnormals below 2^-133 among them); infinity for
        what is not finite. Read-only.
    """
    bits = np.arange(N_KEYS, dtype=np.uint32) << np.uint32(16)
    finite = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(_N_FINITE << 16)
    nonzero = (bits & np.uint32(0x7FFFFFFF)) != 0
    bits[finite & nonzero] |= np.uint32(_OFFSETS[dtype])
    values = np.where(finite, bits, np.uint32(_N_FINITE << 16)).view(np.float32).astype(np.float64)
    values.setflags(write=False)
    return values


@cache
def sorted_keys() -> NDArray[np.int64]:
    """Return all finite keys in the order of their values: negative ones from the largest magnitude down."""
    magnitudes = np.arange(_N_FINITE)
    keys = np.concatenate(((magnitudes | 0x8000)[::-1], magnitudes))
    keys.setflags(write=False)
    return keys


def value_histogram(counts: NDArray[np.int64], dtype: str) -> ValueHistogram:
    """Return the bins that occur among dense counts by key (`ops` kernel ``histogram16``).

    Infinite and NaN keys are left out: tensors that have them are not quantized.
    """
    order = sorted_keys()
    in_order = counts[order]
    occupied = np.flatnonzero(in_order)
    return ValueHistogram(key_values(dtype)[order[occupied]], in_order[occupied])


def ordered_sum(terms: NDArray[np.float64]) -> float:
    """Add numbers from first to last: `np.sum` pairs them in a way that depends on the processor."""
    return float(np.cumsum(terms)[-1]) if len(terms) else 0.0
