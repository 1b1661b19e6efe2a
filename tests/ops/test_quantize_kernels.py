"""The numba kernels of the codebook codecs equal their plain-torch twins, bit for bit."""

import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.quantize import (
    MAGNITUDE_KEYS,
    PROTECTED,
    assign,
    dequantize,
    gather_decoded,
    gather_protected,
    histogram16,
    sensitivity_histogram,
    symbol_counts,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def values_of(dtype: torch.dtype, n: int = 1001) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(7)) * 0.1
    edge = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38, -3e38]
    return torch.cat((x, torch.tensor(edge))).to(dtype)


def on_both(function, *args):
    fast = function(*args)
    with force_backend(Backend.REFERENCE):
        return fast, function(*args)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    return first.dtype == second.dtype and torch.equal(first.view(width), second.view(width))


@pytest.mark.parametrize("dtype", DTYPES)
def test_histograms_agree(dtype):
    x = values_of(dtype)
    g = values_of(torch.float32).flip(0)
    for function, args in (
        (histogram16, (x,)),
        (histogram16, (x, g, 0x3000, 0x3C00)),
        (sensitivity_histogram, (x, g)),
    ):
        fast, slow = on_both(function, *args)
        assert same_bits(fast, slow)
    assert int(histogram16(x).sum()) == x.numel()
    assert int(sensitivity_histogram(x, g).sum()) == x.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_assignment_agrees(dtype):
    x, g = values_of(dtype), values_of(torch.float32).flip(0)
    table = torch.randint(0, 20, (65536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for args in ((x, table), (x, table, g, 0x3000, 0x3C00)):
        fast, slow = on_both(assign, *args)
        assert same_bits(fast, slow)


def test_protection_wins_over_pruning_and_pruning_over_bins():
    x = torch.tensor([1.0, 1.0, 1.0])
    g = torch.tensor([1e-12, 1.0, 1e9])
    bins = torch.full((65536,), 5, dtype=torch.uint8)
    kept = torch.full((65536,), PROTECTED, dtype=torch.uint8)
    assert assign(x, bins, g, 0x3000, 0x4000).tolist() == [0, 5, 1]
    assert assign(x, kept, g, 0x3000, 0x4000).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_and_dequantizing_agree_and_put_protected_values_back(dtype):
    x = values_of(dtype)
    symbols = torch.randint(0, 6, (x.numel(),), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    fast, slow = on_both(gather_protected, x, symbols)
    assert same_bits(fast, slow)
    table = torch.arange(256).to(dtype)
    restored, again = on_both(dequantize, symbols, table, fast)
    assert same_bits(restored, again)
    kept = symbols == PROTECTED
    assert same_bits(restored[kept], x[kept])
    assert torch.equal(restored[~kept], table[symbols.long()][~kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_of_what_other_symbols_decode_to_agrees(dtype):
    generator = torch.Generator().manual_seed(4)
    now, before = torch.randint(0, 5, (2, 3001), dtype=torch.uint8, generator=generator)
    table = torch.arange(256).to(dtype)
    kept = torch.randn(int((before == PROTECTED).sum()), generator=generator).to(dtype)
    fast, slow = on_both(gather_decoded, now, before, table, kept)
    assert same_bits(fast, slow)
    assert same_bits(fast, dequantize(before, table, kept)[now == PROTECTED])


@pytest.mark.parametrize("n", [0, 1, 2, 257])
def test_symbol_counts_agree(n):
    symbols = torch.arange(n).to(torch.uint8)
    fast, slow = on_both(symbol_counts, symbols)
    assert same_bits(fast, slow)
    assert int(fast.sum()) == n


def test_strides_do_not_matter():
    x = values_of(torch.float32)[:1000].view(20, 50)
    g = x.flip(0)
    table = torch.arange(65536).to(torch.uint8)
    for function, extra in ((histogram16, ()), (assign, (table,))):
        assert torch.equal(function(x.t(), *extra), function(x.t().contiguous(), *extra))
    assert torch.equal(sensitivity_histogram(x.t(), g.t()), sensitivity_histogram(x, g))
    symbols = assign(x.t(), table)
    assert torch.equal(gather_protected(x.t(), symbols), gather_protected(x.t().contiguous(), symbols))


def test_empty_tensors_have_no_counts_and_no_symbols():
    empty = torch.empty(0, 3)
    assert int(histogram16(empty).sum()) == 0
    assert assign(empty, torch.zeros(65536, dtype=torch.uint8)).numel() == 0
    assert int(sensitivity_histogram(empty, empty).sum()) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_integers(dtype):
    x, g = values_of(dtype), values_of(torch.float32).flip(0)
    table = torch.arange(65536).to(torch.uint8)
    bounds = (0x3000, MAGNITUDE_KEYS)
    assert torch.equal(histogram16(x), histogram16(x.cuda()))
    assert torch.equal(histogram16(x, g, *bounds), histogram16(x.cuda(), g.cuda(), *bounds))
    assert torch.equal(sensitivity_histogram(x, g), sensitivity_histogram(x.cuda(), g.cuda()))
    assert torch.equal(assign(x, table, g, *bounds), assign(x.cuda(), table, g.cuda(), *bounds))
