"""The codebook codecs' ops.

The *key* of a value is the upper half of its float32 bits: sign, exponent and seven bits of mantissa.
The *magnitude key* is the key without its sign, the *sensitivity key* the magnitude key of the float32
product of value and gradient, where every NaN counts as infinite. Keys are integers in the order of the
magnitudes they stand for; integers decide everything, so that no result depends on the device, on the
number of threads or on the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.registry import op

N_KEYS = 1 << 16
"""Number of keys: sign (1 bit), exponent (8), mantissa (7)."""

MAGNITUDE_KEYS = 1 << 15
"""Number of magnitude keys."""

INFINITE_KEY = 0x7F80
"""Magnitude key of infinity; larger ones are NaN."""

PRUNED = 0
"""Symbol of a parameter that decodes to zero."""

PROTECTED = 1
"""Symbol of a parameter whose value is stored beside the symbols; bins follow from 2 on."""


def _keys(values: Tensor) -> Tensor:
    """Signed keys as int32, because torch has no shift of unsigned 16-bit integers."""
    return (as_float32(values).view(torch.int32) >> 16) & (N_KEYS - 1)


def _sensitivity_keys(values: Tensor, gradient: Tensor) -> Tensor:
    """One float32 product and no other float operation, hence equal on every device."""
    product = as_float32(values) * as_float32(gradient).to(values.device)
    return ((product.view(torch.int32) >> 16) & (MAGNITUDE_KEYS - 1)).clamp_max(INFINITE_KEY)


@op
def histogram16(
    values: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """Count the keys of a tensor.

    Parameters
    ----------
    values : Float[Tensor, "..."]
        float32, float16 or bfloat16; any strides, any device.
    gradient : Float[Tensor, "..."] or None
        Of the same shape. If given, only values whose sensitivity key is in ``low <= key < high`` count.
    low, high
        Bounds on the sensitivity key.

    Returns
    -------
    Int[Tensor, "65536"]
        int64 counts by key, on the CPU. O(n).

    Examples
    --------
    >>> import torch
    >>> int(histogram16(torch.tensor([1.0, 1.0, -2.0]))[0x3F80])
    2
    """
    keys = _keys(values)
    if gradient is not None:
        sensitivity = _sensitivity_keys(values, gradient)
        keys = keys[(sensitivity >= low) & (sensitivity < high)]
    return torch.bincount(keys, minlength=N_KEYS).cpu()


@op
def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """Count sensitivity keys: int64[32768] on the CPU; NaN counts under the key of infinity."""
    return torch.bincount(_sensitivity_keys(values, gradient), minlength=MAGNITUDE_KEYS).cpu()


@op
def assign(
    values: Tensor, lut: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """Map every value to its symbol.

    Parameters
    ----------
    values : Float[Tensor, "..."]
        float32, float16 or bfloat16.
    lut : UInt8[Tensor, "65536"]
        Symbol of every key.
    gradient : Float[Tensor, "..."] or None
        If given, a sensitivity key of at least `high` makes the symbol `PROTECTED`; else one below
        `low` makes it `PRUNED`, unless the table says `PROTECTED`.
    low, high
        Thresholds on the sensitivity key.

    Returns
    -------
    UInt8[Tensor, "n"]
        Symbols in the order of the contiguous tensor, on the device of the table. O(n).
    """
    symbols = lut.to(values.device)[_keys(values).long()]
    if gradient is not None:
        sensitivity = _sensitivity_keys(values, gradient)
        symbols[(sensitivity < low) & (symbols != PROTECTED)] = PRUNED
        symbols[sensitivity >= high] = PROTECTED
    return symbols.to(lut.device)


def gather_protected(values: Tensor, symbols: Tensor) -> Tensor:
    """Return the values whose symbol is `PROTECTED`, in tensor order, in the tensor's dtype, on the CPU."""
    return flattened(values)[symbols.to(values.device) == PROTECTED].cpu()


def dequantize(symbols: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """Map symbols back to values; one table look-up each and no arithmetic.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Every symbol below ``table.numel()``; as many of them `PROTECTED` as `protected` has values.
    table : Float[Tensor, "256"]
        Value of every symbol, in the stored dtype.
    protected : Float[Tensor, "p"]
        Values of the protected parameters in tensor order, in the stored dtype.

    Returns
    -------
    Float[Tensor, "n"]
        In the stored dtype, on the device of the symbols.
    """
    # As words: torch does not keep the bits of a NaN wherever it fills in a single float.
    width = torch.int16 if table.dtype.itemsize == 2 else torch.int32
    values = table.to(symbols.device).view(width)[symbols.long()]
    values[symbols == PROTECTED] = protected.to(symbols.device).view(width)
    return values.view(table.dtype)
