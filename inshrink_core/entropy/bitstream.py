"""Bit streams between bytes and the words that kernels read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["stream_bytes", "stream_words"]

_PADDING_BYTES = 16
"""Two words: kernels read the word of a position that is at most the end, and the one after."""


def stream_bytes(words: NDArray[np.uint64], n_bits: int) -> bytes:
    """Return the bytes of a stream of `n_bits` bits, the last byte padded with zero bits."""
    return words.view(np.uint8)[: (n_bits + 7) // 8].tobytes()


def stream_words(stream: bytes | memoryview) -> NDArray[np.uint64]:
    """Return a stream as 64-bit words, padded with two words of zeros at least."""
    padded = np.zeros((len(stream) + 7) // 8 * 8 + _PADDING_BYTES, np.uint8)
    padded[: len(stream)] = np.frombuffer(stream, np.uint8)
    return padded.view("<u8").astype(np.uint64, copy=False)
