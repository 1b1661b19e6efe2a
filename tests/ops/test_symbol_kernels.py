"""Kernels of symbol streams agree with the reference."""

import numpy as np
import pytest

from inshrink_core.coding.events import run_windows
from inshrink_core.coding.huffman import (
    code_entries,
    literal_entries,
    stream_bytes,
    stream_words,
    symbol_windows,
    window_bits,
)
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops import symbols as ops
from inshrink_core.ops.symbols import MAX_CODE_BITS, N_RUN_TOKENS, code_lengths

_BASES = np.arange(256)
_MODULUS = 40
_NOT_EXPECTED = 256


def _on(backend, op, *arguments):
    with force_backend(backend):
        return getattr(ops, op)(*arguments)


def _chunk(n: int, seed: int):
    """Five groups: calm, moving in long-tailed steps, shifted by one, noise, and one nearly absent."""
    rng = np.random.default_rng(seed)
    groups = rng.choice([0, 1, 7, 30, 39], n, p=[0.3, 0.3, 0.2, 0.1999, 0.0001]).astype(np.uint8)
    steps = np.minimum(rng.geometric(0.4, n), 39) * rng.choice([-1, 1], n)
    symbols = (groups + np.where(rng.random(n) < 0.4, steps, 0)) % _MODULUS
    symbols = np.where(groups == 0, np.where(rng.random(n) < 0.003, 5, 0), symbols)
    symbols = np.where(groups == 7, np.where(rng.random(n) < 0.1, symbols, 8), symbols)
    symbols = np.where(groups == 30, np.minimum(rng.geometric(0.45, n) - 1, 39), symbols)
    expected = _BASES.copy()
    expected[7], expected[30] = 8, _NOT_EXPECTED
    return groups, symbols.astype(np.uint8), expected


def _codes(run_counts, literal_counts, expected):
    """One pair of tables for each group, with codes as long as the format allows."""
    lone = np.zeros(N_RUN_TOKENS, np.int64)
    lone[0] = 1
    runs = [
        code_lengths(counts[:N_RUN_TOKENS]) if rests < _NOT_EXPECTED else lone
        for counts, rests in zip(run_counts, expected, strict=True)
    ]
    return runs, [code_lengths(counts[:_MODULUS]) for counts in literal_counts]


def _windows(runs, literals):
    run_bits, literal_bits = (max(map(window_bits, lengths)) for lengths in (runs, literals))
    return (
        np.stack([run_windows(lengths, run_bits) for lengths in runs]),
        np.stack([symbol_windows(lengths, literal_bits, literal_entries(lengths)) for lengths in literals]),
    )


def _packed(n: int, seed: int):
    groups, symbols, expected = _chunk(n, seed)
    records, run_counts, literal_counts = _on(
        Backend.CPU, "delta_events", groups, symbols, _BASES, expected, _MODULUS
    )
    runs, literals = _codes(run_counts, literal_counts, expected)
    codes = (
        np.stack([code_entries(lengths, 96) for lengths in runs]),
        np.stack([code_entries(lengths, 257) for lengths in literals]),
    )
    packing = (records, run_counts.sum(axis=1), expected, _BASES, *codes)
    sizes = np.bincount(groups, minlength=256)
    tables = (_BASES, *_windows(runs, literals))
    return symbols, packing, (groups, sizes, _BASES, expected, _MODULUS, *tables), (runs, literals)


def _unpack(backend, words, n_bits, arguments):
    out = np.empty(arguments[0].size, np.uint8)
    return _on(backend, "unpack_events", words, n_bits, *arguments, out), out


def test_large_groups_exercise_every_path():
    _, packing, (_, sizes, *_), (runs, literals) = _packed(60_000, seed=0)
    assert (sizes[[0, 1, 7, 30, 39]] > 0).all()
    assert max(map(window_bits, literals)) == MAX_CODE_BITS
    assert max(map(window_bits, runs)) > 4
    assert int((packing[0] & 0x7FFFFF).max()) > 500


def test_kernels_and_reference_agree_on_large_groups():
    symbols, packing, arguments, _ = _packed(60_000, seed=0)
    groups, _, bases, expected, *_ = arguments
    for ours, norm in zip(
        *(_on(b, "delta_events", groups, symbols, bases, expected, _MODULUS) for b in Backend if b != "cuda"),
        strict=True,
    ):
        assert np.array_equal(ours, norm)
    words, n_bits = _on(Backend.CPU, "pack_events", *packing)
    norm_words, norm_bits = _on(Backend.REFERENCE, "pack_events", *packing)
    assert (n_bits, stream_bytes(words, n_bits)) == (norm_bits, stream_bytes(norm_words, norm_bits))
    padded = stream_words(stream_bytes(words, n_bits))
    for backend in (Backend.CPU, Backend.REFERENCE):
        taken, out = _unpack(backend, padded, n_bits, arguments)
        assert taken == n_bits
        assert np.array_equal(out, symbols)


@pytest.mark.parametrize("seed", range(12))
def test_kernels_and_reference_refuse_the_same_streams_of_large_groups(seed):
    rng = np.random.default_rng(seed)
    _, packing, arguments, _ = _packed(25_000, seed)
    stream = bytearray(stream_bytes(*_on(Backend.CPU, "pack_events", *packing)))
    if seed % 3 == 0:
        del stream[rng.integers(len(stream)) :]
    elif seed % 3 == 1:
        stream[rng.integers(len(stream))] ^= 1 << int(rng.integers(8))
    else:
        stream = bytearray(rng.bytes(int(rng.integers(1, len(stream)))))
    words = stream_words(bytes(stream))
    taken, out = _unpack(Backend.CPU, words, 8 * len(stream), arguments)
    norm_taken, norm_out = _unpack(Backend.REFERENCE, words, 8 * len(stream), arguments)
    assert taken == norm_taken
    assert taken < 0 or np.array_equal(out, norm_out)


def test_codes_that_take_no_bits_decode_from_an_empty_stream():
    groups = np.zeros(20_000, np.uint8)
    lone_run, lone_literal = np.zeros(N_RUN_TOKENS, np.int64), np.zeros(_MODULUS, np.int64)
    lone_run[0] = lone_literal[3] = 1
    tables = (np.zeros(256, np.int64), *_windows([lone_run], [lone_literal]))
    for rests in (0, _NOT_EXPECTED):
        expected = np.full(256, rests)
        arguments = (groups, np.bincount(groups, minlength=256), _BASES, expected, _MODULUS, *tables)
        for backend in (Backend.CPU, Backend.REFERENCE):
            taken, out = _unpack(backend, stream_words(b""), 0, arguments)
            assert taken == 0
            assert (out == (0 - 3) % _MODULUS).all()


@pytest.mark.parametrize("n", [0, 1, 3, 29, 30, 31, 4095, 4096, 30_001])
def test_plain_codes_agree_at_every_size(n):
    rng = np.random.default_rng(n)
    symbols = np.minimum(rng.geometric(0.4, n) - 1, 39).astype(np.uint8)
    lengths = code_lengths(np.maximum(2 ** np.arange(39, -1, -1, dtype=np.int64) >> 15, 1))
    assert window_bits(lengths) == MAX_CODE_BITS
    results = [
        _on(b, "pack_symbols", symbols, code_entries(lengths)) for b in (Backend.CPU, Backend.REFERENCE)
    ]
    streams = [stream_bytes(words, n_bits) for words, n_bits in results]
    assert streams[0] == streams[1]
    windows = symbol_windows(lengths, MAX_CODE_BITS, literal_entries(lengths))
    out = np.empty(n, np.uint8)
    for backend in (Backend.CPU, Backend.REFERENCE):
        words, n_bits = stream_words(streams[0]), results[0][1]
        assert _on(backend, "unpack_symbols", words, n_bits, windows, out) == n_bits
        assert np.array_equal(out, symbols)
