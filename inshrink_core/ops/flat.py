"""The values of a tensor as kernels take them: flat and contiguous."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a shape: all but the first dimension together; a vector is one row.

    Examples
    --------
    >>> sides((8, 3, 3, 3)), sides((5,)), sides(())
    ((8, 27), (1, 5), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape))


def as_float32(tensor: Tensor) -> Tensor:
    """Return the values flat, contiguous, in float32 (exact for float16 and bfloat16)."""
    return flat if (flat := flattened(tensor)).dtype == torch.float32 else flat.to(torch.float32)


def flattened(tensor: Tensor) -> Tensor:
    """Return the values flat, contiguous, with lazy negation carried out; perhaps the caller's own memory."""
    # Each of torch's calls hands the GIL to another thread, if one waits: none where none is needed.
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
