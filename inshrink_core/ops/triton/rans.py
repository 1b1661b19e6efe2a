"""Context rANS on CUDA devices: Triton kernels where Triton is installed, else the reference.

Triton launches on the current device, so that of the tensors is made current.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from inshrink_core.ops.rans import RansBlocks, RansModel
from inshrink_core.ops.reference import rans as reference
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

_HAS_TRITON = find_spec("triton") is not None


@register("rans_counts", Backend.CUDA)
def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    # The counters of the kernel have 32 bits.
    if not _HAS_TRITON or symbols.numel() >= 1 << 31:
        return reference.rans_counts(symbols, contexts, n_symbols, n_contexts)
    from inshrink_core.ops.triton.rans_kernels import count_pairs_on

    with torch.cuda.device(symbols.get_device()):
        counts = count_pairs_on(symbols, contexts)
    return counts[:n_contexts, :n_symbols].long().cpu().contiguous()


@register("rans_encode", Backend.CUDA)
def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    if not _HAS_TRITON:
        return reference.rans_encode(symbols, contexts, model, lanes, block_length)
    from inshrink_core.ops.triton.rans_kernels import encode_blocks

    with torch.cuda.device(symbols.get_device()):
        return encode_blocks(symbols, contexts, model, lanes, block_length)


@register("rans_decode", Backend.CUDA)
def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    if not _HAS_TRITON:
        return reference.rans_decode(blocks, contexts, model, n, block_length)
    from inshrink_core.ops.triton.rans_kernels import decode_blocks

    with torch.cuda.device(blocks.words.get_device()):
        return decode_blocks(blocks, contexts, model, n, block_length)
