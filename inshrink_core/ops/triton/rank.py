"""The rank of rare symbols, in Triton: how many of them come before each block of a tensor.

Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKED = 1024
"""Elements of a block: eight a thread, and a prefix sum of a few steps."""


@triton.jit
def _count(
    symbols: tl.tensor, low: tl.tensor, high: tl.tensor, counts: tl.tensor, n: tl.tensor, size: tl.constexpr
) -> None:
    block = tl.program_id(0).to(tl.int64)
    place = block * size + tl.arange(0, size)
    symbol = tl.load(symbols + place, mask=place < n, other=0).to(tl.int32)
    found = (place < n) & (symbol >= low) & (symbol < high)
    tl.store(counts + block + 1, tl.sum(found.to(tl.int32), 0))


def count_before(symbols: Tensor, low: int, high: int) -> Tensor:
    """Return how many symbols in ``low <= symbol < high`` come before each block of `RANKED`.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        At least one.
    low, high
        Bounds.

    Returns
    -------
    Int64[Tensor, "blocks + 1"]
        On the device; the last one is the number of all.
    """
    n_blocks = triton.cdiv(symbols.numel(), RANKED)
    counts = torch.zeros(n_blocks + 1, dtype=torch.int64, device=symbols.device)
    _count[(n_blocks,)](symbols, low, high, counts, symbols.numel(), RANKED, enable_fp_fusion=False)
    return counts.cumsum(0)
