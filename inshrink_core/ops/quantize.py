"""Typed fronts of the codebook codecs' kernels.

The *key* of a value is the upper half of its float32 bits: sign, exponent and seven bits of mantissa.
The *magnitude key* is the key without its sign, the *sensitivity key* the magnitude key of the float32
product of value and gradient, where every NaN counts as infinite. Keys are integers in the order of the
magnitudes they stand for; integers decide everything, so that no result depends on the device, on the
number of threads or on the order of summation.
"""

from __future__ import annotations

from torch import Tensor

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
    raise NotImplementedError


@op
def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """Count sensitivity keys: int64[32768] on the CPU; NaN counts under the key of infinity."""
    raise NotImplementedError


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
    raise NotImplementedError


@op
def gather_protected(values: Tensor, symbols: Tensor) -> Tensor:
    """Return the values whose symbol is `PROTECTED`, in tensor order, in the tensor's dtype, on the CPU."""
    raise NotImplementedError


@op
def gather_decoded(symbols: Tensor, previous: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """Return ``dequantize(previous, table, protected)`` where `symbols` is `PROTECTED`, in one pass.

    Parameters
    ----------
    symbols, previous : UInt8[Tensor, "n"]
        Symbols of now and of the reference.
    table, protected
        The reference's, as for `dequantize`.

    Returns
    -------
    Float[Tensor, "p"]
        In the dtype of `table`, on the CPU.
    """
    raise NotImplementedError


@op
def symbol_counts(symbols: Tensor) -> Tensor:
    """Count the symbols of a uint8 tensor: int64[256] on the CPU."""
    raise NotImplementedError


@op
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
    raise NotImplementedError
