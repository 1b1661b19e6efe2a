"""Flat symbols: every coder gives them back, within the stated size, and trusts no byte."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inshrink_core.coding.raw import worst_case_coded_bytes
from inshrink_core.errors import DamagedError
from inshrink_lab.published.flat import (
    FLAT_CODERS,
    decode_flat,
    encode_flat,
)


@given(st.integers(1, 300), st.integers(1, 256), st.sampled_from([1.0, 4.0, 30.0]), st.integers(0, 999))
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.parametrize("coder", sorted(FLAT_CODERS))
def test_any_symbols_come_back_within_the_stated_size(coder, n, n_symbols, skew, seed):
    symbols = (n_symbols * np.random.default_rng(seed).random(n) ** skew).astype(np.uint8)
    payload = encode_flat(symbols, n_symbols, coder)
    assert len(payload) <= worst_case_coded_bytes(n, n_symbols)
    assert np.array_equal(decode_flat(payload, n, n_symbols), symbols)


@pytest.mark.parametrize("coder", sorted(FLAT_CODERS))
def test_damaged_payloads_are_refused_or_decode_to_symbols_of_the_alphabet(coder):
    rng = random.Random(coder)
    symbols = (5 * np.random.default_rng(0).random(2000) ** 4).astype(np.uint8)
    payload = encode_flat(symbols, 5, coder)
    assert payload[0] == FLAT_CODERS[coder]
    for length in range(0, len(payload), 7):
        with pytest.raises(DamagedError):
            decode_flat(payload[:length], 2000, 5)
    for _ in range(150):
        damaged = bytearray(payload)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            decoded = decode_flat(bytes(damaged), 2000, 5)
        except DamagedError:
            continue
        assert decoded.size == 2000
        assert int(decoded.max()) < 5


def test_incompressible_symbols_are_packed():
    symbols = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    for coder in FLAT_CODERS:
        assert len(encode_flat(symbols, 256, coder)) == 1001


@pytest.mark.parametrize("payload", [b"", b"\6", b"\1", b"\1\4", b"\1\0\0", b"\0", b"\0\0\0"])
def test_payloads_of_no_four_symbols_of_two_bits_are_refused(payload):
    with pytest.raises(DamagedError):
        decode_flat(payload, 4, 4)
