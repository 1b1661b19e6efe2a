"""The values of a tensor as kernels take them: flat and contiguous."""

from __future__ import annotations

import torch
from torch import Tensor


def as_float32(tensor: Tensor) -> Tensor:
    """Return the values flat, contiguous, in float32 (exact for float16 and bfloat16)."""
    flat = flattened(tensor)
    return flat if flat.dtype == torch.float32 else flat.to(torch.float32)


def flattened(tensor: Tensor) -> Tensor:
    """Return the values flat, contiguous, with lazy negation carried out; perhaps the caller's own memory."""
    # Each of torch's calls hands the GIL to another thread, if one waits: none where none is needed.
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
