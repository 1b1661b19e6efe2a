"""Flat, contiguous values of tensors, the form that kernels take."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns: all but the first dimension count as columns.

    A vector is one row.

    Examples
    --------
    >>> sides((8, 3, 3, 3)), sides((5,)), sides(())
    ((8, 27), (1, 5), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape))


def as_float32(tensor: Tensor) -> Tensor:
    """Return the values as a flat, contiguous float32 tensor (exact for float16 and bfloat16)."""
    return flat if (flat := flattened(tensor)).dtype == torch.float32 else flat.to(torch.float32)


def flattened(tensor: Tensor) -> Tensor:
    """Return the values flat and contiguous, with lazy negation applied; may share the caller's memory."""
    # Each torch call may hand the GIL to a waiting thread, so avoid calls that are not needed.
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
