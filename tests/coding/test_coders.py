"""Coders of bytes return what they were given, within their bounds, and refuse what is not theirs."""

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from inshrink_core.coding.huffman import (
    parse_lengths,
)
from inshrink_core.coding.rans import decode_rans
from inshrink_core.coding.raw import pack_bits, packed_bytes, unpack_bits, worst_case_coded_bytes
from inshrink_core.coding.zstd import zstd_compress, zstd_decompress
from inshrink_core.errors import DamagedError
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.symbols import code_lengths
from inshrink_core.varint import Cursor
from inshrink_lab.published.adaptive import decode_adaptive
from inshrink_lab.published.flat import FLAT_CODERS, decode_flat, decode_huffman, encode_flat, encode_huffman
from inshrink_lab.published.lzma2 import lzma_compress, lzma_decompress


class Coder(NamedTuple):
    """A coder of bytes: from values, back to `n` of them, and the most bytes that `n` take."""

    name: str
    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[bytes, int], np.ndarray]
    worst_case_bytes: Callable[[int], int]


def _flat(name):
    return Coder(
        f"flat {name}",
        lambda values: encode_flat(values, 256, name),
        lambda payload, n: decode_flat(payload, n, 256),
        lambda n: worst_case_coded_bytes(n, 256),
    )


_CODERS = [
    Coder("raw", lambda v: pack_bits(v, 256), lambda p, n: unpack_bits(p, n, 256), lambda n: n),
    Coder(
        "zstd",
        lambda values: zstd_compress(values, 3) if values.size else b"",
        lambda p, n: np.frombuffer(zstd_decompress(p, n) if n or len(p) else b"", np.uint8),
        lambda n: n + n // 256 + 512,  # ZSTD_compressBound of the zstd manual, rounded up
    ),
    Coder(
        "lzma2",
        lambda values: lzma_compress(values.tobytes()),
        lambda payload, n: np.frombuffer(lzma_decompress(payload, n), np.uint8),
        lambda n: n + n // 1024 + 16,
    ),
    # The largest table, and 12 bits a value.
    Coder("huffman", encode_huffman, decode_huffman, lambda n: 258 + (12 * n + 7) // 8),
    *map(_flat, FLAT_CODERS),
]


def _skewed(n, n_values, seed=0):
    return (n_values * np.random.default_rng(seed).random(n) ** 3).astype(np.uint8)


@pytest.mark.parametrize("coder", _CODERS, ids=lambda coder: coder.name)
@pytest.mark.parametrize("n_values", [1, 17, 256])
@pytest.mark.parametrize("n", [0, 1, 5, 64, 65, 5000])
def test_values_come_back_within_the_stated_size(coder, n, n_values):
    if coder.name.startswith("flat") and n == 0:
        pytest.skip("a tensor without elements has no symbols")
    values = _skewed(n, n_values)
    payload = coder.encode(values)
    assert len(payload) <= coder.worst_case_bytes(n)
    assert np.array_equal(coder.decode(payload, n), values)
    with force_backend(Backend.REFERENCE):
        assert coder.encode(values) == payload
        assert np.array_equal(coder.decode(payload, n), values)


@pytest.mark.parametrize("coder", _CODERS, ids=lambda coder: coder.name)
def test_damaged_payloads_are_refused_or_decode_to_as_many_values(coder):
    rng = random.Random(0)
    payload = coder.encode(np.repeat(_skewed(100, 5), 5))
    for length in range(len(payload)):
        with pytest.raises(DamagedError):
            coder.decode(payload[:length], 500)
    with pytest.raises(DamagedError):
        coder.decode(payload + b"\0", 500)
    for _ in range(500):
        damaged = bytearray(payload)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            assert coder.decode(bytes(damaged), 500).size == 500
        except DamagedError:
            continue


@pytest.mark.parametrize("decode", [decode_flat, decode_adaptive, decode_rans])
@pytest.mark.parametrize(
    "payload", [b"", b"\6", b"\1", b"\1\4", b"\1\0\0", b"\2", b"\3\0", b"\0", b"\0\0\0", b"\7\0"]
)
def test_payloads_of_no_four_symbols_of_two_bits_are_refused(decode, payload):
    with pytest.raises(DamagedError):
        decode(payload, 4, 4)


@pytest.mark.parametrize("coder", FLAT_CODERS)
def test_incompressible_symbols_are_packed(coder):
    symbols = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    assert len(encode_flat(symbols, 256, coder)) == 1001


def test_huffman_has_exactly_these_bytes():
    # Counts 1, 1, 2: lengths 2, 2, 1, then no more, nibbles 2 2 1 f: 22 f1. Canonical codes: 2 is 0, 0 is 10,
    # 1 is 11; "0 1 2 2" is 10 11 0 0, first bit least significant: 0b001101.
    assert encode_huffman(np.array([0, 1, 2, 2], np.uint8)).hex() == "22f10d"


def test_packed_bits_have_exactly_these_bytes():
    # Three bits each, first bit least significant: 5 | 2 << 3 | 7 << 6 = 0x1d5.
    assert pack_bits(np.array([5, 2, 7], np.uint8), 8).hex() == "d501"
    assert pack_bits(np.zeros(9, np.uint8), 1) == b""


@pytest.mark.parametrize("n_symbols", [1, 2, 3, 4, 5, 18, 128, 129, 256])
def test_packed_bits_come_back(n_symbols):
    symbols = _skewed(77, n_symbols)
    payload = pack_bits(symbols, n_symbols)
    assert len(payload) == packed_bytes(77, n_symbols)
    assert np.array_equal(unpack_bits(payload, 77, n_symbols), symbols)


def test_packed_symbols_outside_the_alphabet_are_refused():
    with pytest.raises(DamagedError, match="outside the alphabet"):
        unpack_bits(b"\x03", 1, 3)
    with pytest.raises(DamagedError, match="padding"):
        unpack_bits(b"\x80", 1, 4)


def test_huffman_is_within_its_bound_of_the_entropy():
    # Geometric with p = .4, 100,000 values. The unary code, which Huffman equals or beats, takes 1 / .4 = 2.5
    # bits a value; the entropy is H(.4) / .4 = 2.427: a waste of .073 bit at most, .08 with sampling noise.
    # The table takes under 40 bytes.
    values = np.minimum(np.random.default_rng(1).geometric(0.4, 100_000) - 1, 255).astype(np.uint8)
    counts = np.bincount(values)
    counts = counts[counts > 0]
    entropy_bits = -(counts * np.log2(counts / counts.sum())).sum()
    assert len(encode_huffman(values)) <= (entropy_bits + 0.08 * values.size) / 8 + 40


@pytest.mark.parametrize("limit", [8, 9, 12])
def test_code_lengths_are_complete_and_limited_even_for_fibonacci_counts(limit):
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    for counts in (np.array(fibonacci), np.array(fibonacci[::-1]), np.arange(1, 257), np.ones(256)):
        lengths = code_lengths(counts.astype(np.int64), limit)
        assert lengths.max() <= limit
        assert sum(2.0**-lengths) == 1
        with force_backend(Backend.REFERENCE):
            assert np.array_equal(code_lengths(counts.astype(np.int64), limit), lengths)


def test_limited_code_lengths_are_the_best_of_all():
    rng = np.random.default_rng(3)
    for n in (2, 3, 4, 5):
        choices = [
            c for c in itertools.product(range(1, 4), repeat=n) if sum(2.0**-length for length in c) <= 1
        ]
        for _ in range(20):
            counts = rng.integers(1, 30, n)
            best = min(int((np.array(choice) * counts).sum()) for choice in choices)
            assert int((code_lengths(counts, 3) * counts).sum()) == best


# Nothing, cut off, four of one bit, a repetition of nothing, a reserved word, cut off again, gaps, a half.
@pytest.mark.parametrize("table", ["", "11", "1111", "0d", "e1", "1011", "21ff", "3333ff"])
def test_tables_that_are_no_complete_prefix_code_are_refused(table):
    with pytest.raises(DamagedError):
        parse_lengths(Cursor(memoryview(bytes.fromhex(table))), 8)
