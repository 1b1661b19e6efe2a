"""The adaptive coder: exact bytes for tiny inputs, near the conditional entropy, nothing trusted."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inshrink_core.coding.raw import worst_case_coded_bytes
from inshrink_lab.published import adaptive
from inshrink_lab.published.adaptive import decode_adaptive, encode_adaptive
from tests.coding.plain import plain_kernels


def _source(n, n_symbols, n_contexts, seed, skew=0.3):
    """Symbols drawn from one distribution per context."""
    rng = np.random.default_rng(seed)
    tables = rng.dirichlet(np.full(n_symbols, skew), n_contexts)
    contexts = rng.integers(0, n_contexts, n).astype(np.uint8)
    points = rng.random(n)
    symbols = (points[:, None] > np.cumsum(tables, 1)[contexts]).sum(1)
    return np.minimum(symbols, n_symbols - 1).astype(np.uint8), contexts


@st.composite
def _cases(draw):
    n = draw(st.integers(0, 200))
    n_symbols, n_contexts = draw(st.integers(1, 256)), draw(st.integers(1, 256))
    skew = draw(st.sampled_from([0.01, 0.3, 5.0]))
    return (*_source(n, n_symbols, n_contexts, draw(st.integers(0, 2**32 - 1)), skew), n_symbols, n_contexts)


@given(_cases())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_symbols_come_back_within_the_stated_size(case):
    symbols, contexts, n_symbols, n_contexts = case
    payload = encode_adaptive(symbols, contexts, n_symbols, n_contexts)
    assert len(payload) <= worst_case_coded_bytes(symbols.size, n_symbols)
    decoded = decode_adaptive(payload, symbols.size, n_symbols, contexts, n_contexts)
    assert np.array_equal(decoded, symbols)
    with plain_kernels():
        assert encode_adaptive(symbols, contexts, n_symbols, n_contexts) == payload
        assert np.array_equal(
            decode_adaptive(payload, symbols.size, n_symbols, contexts, n_contexts), symbols
        )


def test_a_carry_runs_through_bytes_already_written():
    # Rare ones after frequent ones end near the top of the range again and again.
    rng = random.Random(0)
    for _ in range(300):
        symbols = np.array([rng.random() < 0.97 for _ in range(rng.randrange(2, 400))], np.uint8)
        stream = adaptive.encode_kernel(symbols, np.zeros(symbols.size, np.uint8), 1, 1, 500)
        decoded, intact = adaptive.decode_kernel(stream, np.zeros(symbols.size, np.uint8), 1, 1)
        assert intact
        assert np.array_equal(decoded, symbols)


def test_compiled_and_plain_kernels_agree_on_damaged_streams():
    rng = random.Random(1)
    symbols, contexts = _source(300, 9, 4, 2)
    stream = adaptive.encode_kernel(symbols, contexts, 4, 4, 1000)
    for _ in range(60):
        damaged = stream.copy()
        damaged[rng.randrange(damaged.size)] ^= 1 << rng.randrange(8)
        damaged = damaged[: rng.randrange(1, damaged.size + 1)]
        fast, fast_intact = adaptive.decode_kernel(damaged, contexts, 4, 4)
        with plain_kernels():
            plain, plain_intact = adaptive.decode_kernel(damaged, contexts, 4, 4)
        assert np.array_equal(fast, plain)
        assert fast_intact == plain_intact
