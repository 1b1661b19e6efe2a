"""Adaptive binary arithmetic coding of symbols: a range coder whose probabilities follow the data.

A symbol of b bits is b binary decisions, most significant first. Each node of the tree of decisions has,
for each context, an estimate of its own, which starts at one half and moves by 1/(n + 2) of the distance
at its n-th use (the estimator of Krichevsky and Trofimov), by 1/1024 once it was used often. Everything
is integers, so that every back end writes and reads the same bytes.

The coder is the range coder of G. N. N. Martin ("Range encoding", Video & Data Recording Conference,
1979) with carry propagation into what was written; ``docs/format-rivals.md`` defines the bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.ops.registry import dispatch

__all__ = ["adaptive_decode", "adaptive_encode"]

_HOST = torch.device("cpu")


def adaptive_encode(
    symbols: NDArray[np.uint8], contexts: NDArray[np.uint8], n_bits: int, n_contexts: int, limit: int
) -> NDArray[np.uint8] | None:
    """Return the code of some symbols, or None where it would take more than `limit` bytes.

    Parameters
    ----------
    symbols
        UInt8[n], values below ``2**n_bits``.
    contexts
        UInt8[n], values below `n_contexts`.
    n_bits
        1 to 8.
    n_contexts
        1 to 256.
    limit
        Most bytes to write.
    """
    out = np.empty(limit, np.uint8)
    size = int(dispatch("adaptive_encode", _HOST)(symbols, contexts, n_bits, n_contexts, out))
    return None if size < 0 else out[:size]


def adaptive_decode(
    stream: NDArray[np.uint8], contexts: NDArray[np.uint8], n_bits: int, n_contexts: int
) -> tuple[NDArray[np.uint8], bool]:
    """Return one symbol per context, and whether the stream ends where and as an encoder ends it.

    Any bytes are safe to decode. O(n · n_bits).
    """
    symbols = np.empty(contexts.size, np.uint8)
    intact = dispatch("adaptive_decode", _HOST)(stream, contexts, n_bits, n_contexts, symbols)
    return symbols, bool(intact)
