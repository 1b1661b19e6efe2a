"""The codebook codecs on CUDA devices: Triton kernels where Triton is installed, else the reference.

Triton launches on the current device, so that of the tensors is made current.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from inshrink_core.ops.quantize import MAGNITUDE_KEYS
from inshrink_core.ops.reference import quantize as reference
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

_HAS_TRITON = find_spec("triton") is not None

_MAX_COUNTED = 1 << 31
"""The counters of keys have 32 bits."""


@register("histogram16", Backend.CUDA)
def histogram16(
    values: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `inshrink_core.ops.quantize.histogram16`."""
    if not _HAS_TRITON or values.numel() >= _MAX_COUNTED:
        return reference.histogram16(values, gradient, low, high)
    from inshrink_core.ops.triton.quantize_kernels import count_keys_on

    with torch.cuda.device(values.get_device()):
        return count_keys_on(values, gradient, low, high)


@register("sensitivity_histogram", Backend.CUDA)
def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.sensitivity_histogram`."""
    if not _HAS_TRITON or values.numel() >= _MAX_COUNTED:
        return reference.sensitivity_histogram(values, gradient)
    from inshrink_core.ops.triton.quantize_kernels import count_sensitivity_on

    with torch.cuda.device(values.get_device()):
        return count_sensitivity_on(values, gradient)


@register("assign", Backend.CUDA)
def assign(
    values: Tensor, lut: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `inshrink_core.ops.quantize.assign`."""
    if not _HAS_TRITON:
        return reference.assign(values, lut, gradient, low, high)
    from inshrink_core.ops.triton.quantize_kernels import assign_on

    with torch.cuda.device(values.get_device()):
        return assign_on(values, lut, gradient, low, high)


@register("symbol_counts", Backend.CUDA)
def symbol_counts(symbols: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.symbol_counts`."""
    if not _HAS_TRITON:
        return reference.symbol_counts(symbols)
    from inshrink_core.ops.triton.quantize_kernels import count_symbols_on

    with torch.cuda.device(symbols.get_device()):
        return count_symbols_on(symbols)


@register("dequantize", Backend.CUDA)
def dequantize(symbols: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.dequantize`."""
    if not _HAS_TRITON:
        return reference.dequantize(symbols, table, protected)
    from inshrink_core.ops.triton.quantize_kernels import dequantize_on

    with torch.cuda.device(symbols.get_device()):
        return dequantize_on(symbols, table, protected)


@register("gather_decoded", Backend.CUDA)
def gather_decoded(symbols: Tensor, previous: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.gather_decoded`."""
    return reference.gather_protected(dequantize(previous.to(symbols.device), table, protected), symbols)
