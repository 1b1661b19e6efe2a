"""The norm of the codebook codecs' kernels, in plain torch: runs on any device, read it to know the rule.

`inshrink_core.ops.quantize` documents the functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.quantize import INFINITE_KEY, MAGNITUDE_KEYS, N_KEYS, PROTECTED, PRUNED


def _keys(values: Tensor) -> Tensor:
    """Signed keys as int32, because torch has no shift of unsigned 16-bit integers."""
    return (as_float32(values).view(torch.int32) >> 16) & (N_KEYS - 1)


def _sensitivity_keys(values: Tensor, gradient: Tensor) -> Tensor:
    """One float32 product and no other float operation, hence equal on every device."""
    product = as_float32(values) * as_float32(gradient).to(values.device)
    return ((product.view(torch.int32) >> 16) & (MAGNITUDE_KEYS - 1)).clamp_max(INFINITE_KEY)


def histogram16(
    values: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `quantize.histogram16`."""
    keys = _keys(values)
    if gradient is not None:
        sensitivity = _sensitivity_keys(values, gradient)
        keys = keys[(sensitivity >= low) & (sensitivity < high)]
    return torch.bincount(keys, minlength=N_KEYS).cpu()


def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """See `quantize.sensitivity_histogram`."""
    return torch.bincount(_sensitivity_keys(values, gradient), minlength=MAGNITUDE_KEYS).cpu()


def assign(
    values: Tensor, lut: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `quantize.assign`."""
    symbols = lut.to(values.device)[_keys(values).long()]
    if gradient is not None:
        sensitivity = _sensitivity_keys(values, gradient)
        symbols[(sensitivity < low) & (symbols != PROTECTED)] = PRUNED
        symbols[sensitivity >= high] = PROTECTED
    return symbols.to(lut.device)


def gather_protected(values: Tensor, symbols: Tensor) -> Tensor:
    """See `quantize.gather_protected`."""
    return flattened(values)[symbols.to(values.device) == PROTECTED].cpu()


def gather_decoded(symbols: Tensor, previous: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `quantize.gather_decoded`."""
    return gather_protected(dequantize(previous, table, protected), symbols)


def symbol_counts(symbols: Tensor) -> Tensor:
    """See `quantize.symbol_counts`."""
    return torch.bincount(symbols.long(), minlength=256).cpu()


def dequantize(symbols: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `quantize.dequantize`."""
    # As words: torch does not keep the bits of a NaN wherever it fills in a single float.
    width = torch.int16 if table.dtype.itemsize == 2 else torch.int32
    values = table.to(symbols.device).view(width)[symbols.long()]
    values[symbols == PROTECTED] = protected.to(symbols.device).view(width)
    return values.view(table.dtype)
