"""The kernels of the codebook codecs equal their plain-torch twins, bit for bit."""

import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.quantize import (
    INFINITE_KEY,
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
from tests.ops.interpreted import kernels
from tests.strategies import bits, normal, random_bits

DTYPES = ["float32", "bfloat16", "float16"]
SIZES = [0, 1, 1023, 2050]
BOUNDS = (0x3000, 0x3C00)


def random_values(dtype: str, n: int, seed: int = 0) -> torch.Tensor:
    """Random words: NaN of many payloads, infinities, both zeros, subnormals; and plain weights.

    No NaN in float16: their float32 bits depend on where they stand when torch converts them.
    """
    wild = random_bits(dtype, (n // 2,), seed)
    values = torch.cat((wild, normal((n - n // 2,), seed).to(wild.dtype)))
    edges = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -6e-8, 65504.0, 3e38])
    values[: edges.numel()] = edges[:n].to(values.dtype)
    if dtype == "float16":
        values[values.isnan()] = 0.25
    return values


def table_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 20, (65536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def symbols_of(n: int, seed: int, high: int = 5) -> torch.Tensor:
    return torch.randint(0, high, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def on(device, arguments):
    return [part.to(device) if isinstance(part, torch.Tensor) else part for part in arguments]


def agree(device, function, *arguments):
    """Fail unless a function returns what its reference does; return that."""
    with force_backend(Backend.REFERENCE):
        expected = function(*arguments)
    with kernels():
        found = function(*on(device, arguments))
    assert found.dtype == expected.dtype
    assert bits(found) == bits(expected)
    return expected


def check_histograms(device):
    for dtype in DTYPES:
        for n in SIZES:
            x, g = random_values(dtype, n), random_values("float32", n, 1)
            agree(device, histogram16, x, g, *BOUNDS)
            for counts in (agree(device, histogram16, x), agree(device, sensitivity_histogram, x, g)):
                assert int(counts.sum()) == n


def check_gradients_of_any_kind(device):
    x = random_values("bfloat16", 500)
    for dtype in ("float16", "bfloat16", "float64"):
        gradient = normal((500,), 3).to(getattr(torch, dtype))
        agree(device, sensitivity_histogram, x, gradient)
        agree(device, assign, x, table_of(1), gradient, *BOUNDS)


def check_every_half_and_brain_float(device):
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(65536).to(torch.int32).to(torch.int16).view(dtype)
        numbers = values[~values.isnan()]
        agree(device, histogram16, numbers)
        agree(device, assign, numbers, torch.arange(65536).to(torch.uint8))
        with kernels():
            not_numbers = histogram16(values[values.isnan()].to(device)).view(2, -1).sum(0)
        assert int(not_numbers[INFINITE_KEY + 1 :].sum()) == int(values.isnan().sum())


def check_assignment(device):
    for dtype in DTYPES:
        for n in SIZES:
            x, g = random_values(dtype, n), random_values("float32", n, 1)
            agree(device, assign, x, table_of(2))
            agree(device, assign, x, table_of(3), g, *BOUNDS)
            agree(device, assign, x, table_of(3), g, 0, MAGNITUDE_KEYS)


def check_results_are_where_the_table_is(device):
    x, table = random_values("float32", 700), table_of(4)
    with kernels():
        assert assign(x.to(device), table).device.type == "cpu"
        assert assign(x.to(device), table.to(device)).device.type == torch.device(device).type
        symbols = symbols_of(700, 5).to(device)
        assert dequantize(symbols, torch.zeros(256), x[symbols.cpu() == PROTECTED]).device == symbols.device


def check_protection_wins_over_pruning_and_pruning_over_bins(device):
    x, g = torch.ones(3), torch.tensor([1e-12, 1.0, 1e9])
    bins = torch.full((65536,), 5, dtype=torch.uint8)
    kept = torch.full((65536,), PROTECTED, dtype=torch.uint8)
    assert agree(device, assign, x, bins, g, 0x3000, 0x4000).tolist() == [0, 5, 1]
    assert agree(device, assign, x, kept, g, 0x3000, 0x4000).tolist() == [1, 1, 1]


def check_strides(device):
    x = random_values("float32", 1000).view(20, 50).t()
    g = normal((50, 20), 4)
    agree(device, histogram16, x)
    agree(device, assign, x, table_of(1), g, *BOUNDS)
    agree(device, sensitivity_histogram, x, g)
    for function, *more in ((histogram16,), (assign, table_of(1), g), (sensitivity_histogram, g)):
        assert bits(function(x, *more)) == bits(function(x.contiguous(), *(one.contiguous() for one in more)))


def check_symbol_counts(device):
    for n in (0, 1, 4096, 9001):
        counts = agree(device, symbol_counts, symbols_of(n, n, 256))
        assert int(counts.sum()) == n


def check_equal_keys_are_all_counted(device):
    # More programs than one table serves, and every value the same.
    assert int(agree(device, histogram16, torch.full((150_000,), -0.0))[0x8000]) == 150_000


def check_dequantizing(device):
    for dtype in DTYPES:
        for n in SIZES:
            x, symbols = random_values(dtype, n), symbols_of(n, n + 1)
            kept = gather_protected(x, symbols)
            table = random_values(dtype, 256, 6)
            restored = agree(device, dequantize, symbols, table, kept)
            assert bits(restored[symbols == PROTECTED]) == bits(kept)
            assert bits(restored[symbols != PROTECTED]) == bits(table[symbols.long()][symbols != PROTECTED])
    symbols = symbols_of(2000, 7)
    symbols[symbols == PROTECTED] = 0
    agree(device, dequantize, symbols, torch.arange(256.0), torch.zeros(0))


def check_what_other_symbols_decode_to(device):
    for dtype in DTYPES:
        now, before = symbols_of(3001, 8), symbols_of(3001, 9)
        table = torch.arange(256).to(getattr(torch, dtype))
        kept = random_values(dtype, int((before == PROTECTED).sum()))
        found = agree(device, gather_decoded, now, before, table, kept)
        assert bits(found) == bits(dequantize(before, table, kept)[now == PROTECTED])
