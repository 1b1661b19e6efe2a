"""The codebook codecs in Triton: counting keys, assigning symbols, and symbols back to values.

`inshrink_core.ops.quantize` documents the functions; `inshrink_core.ops.reference.quantize` has their twins.
Importing this module needs Triton. Values are read as the words they are stored in and keys are made by
integers, because processors do not agree on the bits of a converted NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.quantize import INFINITE_KEY, MAGNITUDE_KEYS, N_KEYS, PROTECTED, PRUNED
from inshrink_core.ops.reference import quantize as reference
from inshrink_core.ops.triton.lattice import RANKED, count_before

_INFINITE = tl.constexpr(INFINITE_KEY)
_MAGNITUDE = tl.constexpr(MAGNITUDE_KEYS - 1)
_PROTECTED = tl.constexpr(PROTECTED)
_PRUNED = tl.constexpr(PRUNED)

_SIZE = 1024
"""Elements of one program: eight a thread."""

_MAX_COPIES = 32
"""Tables that programs count keys in by turns: of equal keys only one can be added to a table at a time."""

_MAX_COUNTED = 1 << 31
"""The counters of keys have 32 bits."""

_COUNTED = 4096
"""Symbols of one turn of a histogram of 256 bins."""

_PROGRAMS = 1024
"""Most programs that count symbols: several for each of the hundred-odd multiprocessors of a large GPU."""


@triton.jit
def _key_of(words: tl.tensor, place: tl.tensor, here: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Key of values of a kind: "float32", "bfloat16" or "float16"."""
    word = tl.load(words + place, mask=here, other=0).to(tl.int32)
    if kind == "float32":
        key = word >> 16
    elif kind == "bfloat16":
        key = word
    else:
        # Exponent and mantissa moved to their places are the value times 2**-112, exact also as a
        # subnormal; what has the largest exponent is infinite, or NaN, which conversion makes quiet.
        moved = (word & 0x7FFF) << 13
        finite = (moved.to(tl.float32, bitcast=True) * (2.0**112)).to(tl.int32, bitcast=True)
        quiet = tl.where((word & 0x3FF) != 0, 0x400000, 0)
        bits = tl.where((word & 0x7C00) == 0x7C00, moved | 0x7F800000 | quiet, finite)
        key = (bits >> 16) | (word & 0x8000)
    return key & 0xFFFF


@triton.jit
def _sensitivity_of(values: tl.tensor, gradient: tl.tensor, place: tl.tensor, here: tl.tensor) -> tl.tensor:
    """Magnitude key of the product of value and gradient, NaN as infinite."""
    value = tl.load(values + place, mask=here, other=0.0)
    product = value * tl.load(gradient + place, mask=here, other=0.0)
    return tl.minimum((product.to(tl.int32, bitcast=True) >> 16) & _MAGNITUDE, _INFINITE)


@triton.jit(do_not_specialize=["low", "high", "copies"])
def _count_keys(
    words: tl.tensor,
    values: tl.tensor,
    gradient: tl.tensor,
    counts: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    n: tl.tensor,
    copies: tl.tensor,
    n_keys: tl.constexpr,
    kind: tl.constexpr,
    bounded: tl.constexpr,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    if kind == "sensitivity":
        key = _sensitivity_of(values, gradient, place, here)
    else:
        key = _key_of(words, place, here, kind)
    if bounded:
        sensitivity = _sensitivity_of(values, gradient, place, here)
        here = here & (sensitivity >= low) & (sensitivity < high)
    tl.atomic_add(counts + (tl.program_id(0) % copies) * n_keys + key, 1, mask=here)


@triton.jit(do_not_specialize=["low", "high"])
def _assign(
    words: tl.tensor,
    values: tl.tensor,
    gradient: tl.tensor,
    lut: tl.tensor,
    out: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    n: tl.tensor,
    kind: tl.constexpr,
    bounded: tl.constexpr,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    symbol = tl.load(lut + _key_of(words, place, here, kind), mask=here, other=0).to(tl.int32)
    if bounded:
        sensitivity = _sensitivity_of(values, gradient, place, here)
        symbol = tl.where((sensitivity < low) & (symbol != _PROTECTED), _PRUNED, symbol)
        symbol = tl.where(sensitivity >= high, _PROTECTED, symbol)
    tl.store(out + place, symbol.to(tl.uint8), mask=here)


@triton.jit
def _count_symbols(symbols: tl.tensor, counts: tl.tensor, n: tl.tensor, size: tl.constexpr) -> None:
    found = tl.zeros((256,), tl.int32)
    stride = tl.num_programs(0).to(tl.int64) * size
    for begin in range(tl.program_id(0).to(tl.int64) * size, n, stride):
        place = begin + tl.arange(0, size)
        symbol = tl.load(symbols + place, mask=place < n, other=0).to(tl.int32)
        found += tl.histogram(symbol, 256, mask=place < n)
    tl.atomic_add(counts + tl.arange(0, 256), found.to(tl.int64), mask=found > 0)


@triton.jit(do_not_specialize=["n_protected"])
def _dequantize(
    symbols: tl.tensor,
    table: tl.tensor,
    protected: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    n_protected: tl.tensor,
    size: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    place = block * size + tl.arange(0, size)
    here = place < n
    symbol = tl.load(symbols + place, mask=here, other=0).to(tl.int32)
    kept = here & (symbol == _PROTECTED)
    rank = tl.load(ranks + block) + tl.cumsum(kept.to(tl.int32), 0) - 1
    stored = kept & (rank < n_protected)
    word = tl.load(table + symbol, mask=here, other=0)
    word = tl.where(kept, tl.load(protected + rank, mask=stored, other=0), word)
    tl.store(out + place, word, mask=here)


def _words(values: Tensor) -> tuple[Tensor, str]:
    """Return a tensor's words, flat, and the kind of its values; other kinds are converted."""
    if values.dtype in (torch.bfloat16, torch.float16):
        return flattened(values).view(torch.int16), str(values.dtype).removeprefix("torch.")
    return as_float32(values).view(torch.int32), "float32"


def _factors(values: Tensor, gradient: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return what sensitivity is the product of, in float32."""
    if gradient is None:
        return unused, unused
    return as_float32(values), as_float32(gradient).to(values.device)


def _counted(
    words: Tensor,
    factors: tuple[Tensor, Tensor],
    bounds: tuple[int, int],
    n_keys: int,
    kind: str,
    bounded: bool,
) -> Tensor:
    """Count keys in a few tables, and return their sum on the CPU."""
    n = words.numel()
    n_programs = triton.cdiv(n, _SIZE)
    copies = min(max(n_programs // 64, 1), _MAX_COPIES)
    counts = torch.zeros(copies, n_keys, dtype=torch.int32, device=words.device)
    if n:
        _count_keys[(n_programs,)](
            words, *factors, counts, *bounds, n, copies, n_keys, kind, bounded, _SIZE, enable_fp_fusion=False
        )
    return counts.sum(0, dtype=torch.int64).cpu()


def histogram16(values: Tensor, gradient: Tensor | None, low: int, high: int) -> Tensor:
    """See `inshrink_core.ops.quantize.histogram16`."""
    if values.numel() >= _MAX_COUNTED:
        return reference.histogram16(values, gradient, low, high)
    words, kind = _words(values)
    factors = _factors(values, gradient, words)
    return _counted(words, factors, (low, high), N_KEYS, kind, gradient is not None)


def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.sensitivity_histogram`."""
    if values.numel() >= _MAX_COUNTED:
        return reference.sensitivity_histogram(values, gradient)
    factors = _factors(values, gradient, values)
    return _counted(factors[0], factors, (0, 0), MAGNITUDE_KEYS, "sensitivity", False)


def assign(values: Tensor, lut: Tensor, gradient: Tensor | None, low: int, high: int) -> Tensor:
    """See `inshrink_core.ops.quantize.assign`."""
    words, kind = _words(values)
    factors = _factors(values, gradient, words)
    out = torch.empty(words.numel(), dtype=torch.uint8, device=words.device)
    if words.numel():
        grid = (triton.cdiv(words.numel(), _SIZE),)
        table = lut.to(words.device)
        bounded = gradient is not None
        _assign[grid](
            words,
            *factors,
            table,
            out,
            low,
            high,
            words.numel(),
            kind,
            bounded,
            _SIZE,
            enable_fp_fusion=False,
        )
    return out.to(lut.device)


def symbol_counts(symbols: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.symbol_counts`."""
    n = symbols.numel()
    counts = torch.zeros(256, dtype=torch.int64, device=symbols.device)
    if n:
        grid = (min(triton.cdiv(n, _COUNTED), _PROGRAMS),)
        _count_symbols[grid](symbols, counts, n, _COUNTED, enable_fp_fusion=False)
    return counts.cpu()


def dequantize(symbols: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.dequantize`."""
    device, n = symbols.device, symbols.numel()
    width = torch.int16 if table.dtype.itemsize == 2 else torch.int32
    out = torch.empty(n, dtype=table.dtype, device=device)
    if n:
        ranks = count_before(symbols == PROTECTED)
        entries, kept = (part.to(device).view(width) for part in (table, protected))
        tensors = (symbols, entries, kept, ranks, out.view(width))
        _dequantize[(ranks.numel(),)](*tensors, n, protected.numel(), RANKED, enable_fp_fusion=False)
    return out


def gather_decoded(symbols: Tensor, previous: Tensor, table: Tensor, protected: Tensor) -> Tensor:
    """See `inshrink_core.ops.quantize.gather_decoded`."""
    return reference.gather_protected(dequantize(previous.to(symbols.device), table, protected), symbols)
