"""Ops of the codebook codecs.

The *key* of a value is the upper half of its float32 bits: sign, exponent and seven bits of mantissa. The
*magnitude key* is the key without its sign. The *sensitivity key* is the magnitude key of the float32 product
``value * gradient``, where every NaN counts as infinite. Keys of magnitudes are integers in the order of the
magnitudes. All decisions compare integers, so no result depends on the device, the number of threads or the
order of summation.
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
"""Symbol of a pruned parameter, which decodes to zero."""

PROTECTED = 1
"""Symbol of a parameter whose value is stored separately; bins start at symbol 2."""


def _keys(values: Tensor) -> Tensor:
    """Return signed keys as int32, because PyTorch has no shift of unsigned 16-bit integers."""
    return (as_float32(values).view(torch.int32) >> 16) & (N_KEYS - 1)


def _sensitivity_keys(values: Tensor, gradient: Tensor) -> Tensor:
    """Return the keys of one float32 product, which is equal on every device."""
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
        Same shape. If given, only values with ``low <= key < high`` for the sensitivity key count.
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
        If given, a sensitivity key of at least `high` makes the symbol `PROTECTED`. A key below `low` makes
        it `PRUNED`, unless the table has `PROTECTED`.
    low, high
        Thresholds on the sensitivity key.

    Returns
    -------
    UInt8[Tensor, "n"]
        Symbols in the order of the contiguous tensor, on the device of the table.

    Notes
    -----
    O(n).
    """
    symbols = lut.to(values.device)[_keys(values).long()]
    if gradient is not None:
        sensitivity = _sensitivity_keys(values, gradient)
        symbols[(sensitivity < low) & (symbols != PROTECTED)] = PRUNED
        symbols[sensitivity >= high] = PROTECTED
    return symbols.to(lut.device)


def gather_protected(values: Tensor, symbols: Tensor) -> Tensor:
    """Return the values whose symbol is `PROTECTED`, in tensor order and in their dtype, on the CPU."""
    return flattened(values)[symbols.to(values.device) == PROTECTED].cpu()


def dequantize(symbols: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """Map symbols back to values with one table look-up each and no arithmetic.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Each below ``table.numel()``; the number of `PROTECTED` symbols equals the length of `protected`.
    table : Float[Tensor, "256"]
        Value of every symbol, in the stored dtype.
    protected : Float[Tensor, "p"]
        Values of the protected parameters in tensor order, in the stored dtype.

    Returns
    -------
    Float[Tensor, "n"]
        In the stored dtype, on the device of the symbols.
    """
    # Index integers: PyTorch does not preserve the bits of a NaN where it fills in a single float.
    width = torch.int16 if table.dtype.itemsize == 2 else torch.int32
    values = table.to(symbols.device).view(width)[symbols.long()]
    values[symbols == PROTECTED] = protected.to(symbols.device).view(width)
    return values.view(table.dtype)
