"""Conversion of tensors of any dtype to plain numbers, for norms, histograms and scores.

Most operations of PyTorch do not support every dtype (float8 is not promoted, float4 not even converted), so
code that measures values uses this module. Codecs store bits and do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_FLOAT4 = "torch.float4_e2m1fn_x2"
"""Two numbers per byte, the first in the lower half; compared by name, as older releases lack the dtype."""

_FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By their four bits: sign, two of exponent, one of mantissa (Open Compute MX specification 1.0, 5.3.3)."""


def real_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all real numbers of a tensor as one dimension: two for a complex number or a pair of float4.

    Parameters
    ----------
    values
        Any shape, dtype, device and strides.
    dtype
        The floating dtype of the result, which aliases `values` if no conversion is needed.

    Examples
    --------
    >>> import torch
    >>> real_numbers(torch.tensor([1 + 2j]), torch.float64).tolist()
    [1.0, 2.0]
    """
    import torch

    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    elif str(flat.dtype) == _FLOAT4:
        flat = _pairs(flat).reshape(-1)
    return flat.to(dtype)


def magnitudes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one number per element, in the tensor's shape.

    Complex numbers are replaced by their absolute value and pairs of float4 by their norm; other numbers keep
    their value and sign.

    Parameters
    ----------
    values, dtype
        As in `real_numbers`.
    """
    if not values.is_complex() and str(values.dtype) != _FLOAT4:
        return values.detach().to(dtype)
    pairs = real_numbers(values, dtype).view(-1, 2)
    return pairs[:, 0].hypot(pairs[:, 1]).view(values.shape)


def _pairs(values: Tensor) -> Tensor:
    """Return both numbers of each float4 element, float32, (n, 2)."""
    import torch

    bits = values.view(torch.uint8)
    numbers = torch.tensor(_FLOAT4_NUMBERS, device=values.device)
    return torch.stack((numbers[(bits & 15).long()], numbers[(bits >> 4).long()]), dim=1)
