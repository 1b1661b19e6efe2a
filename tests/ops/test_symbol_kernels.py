"""Kernels of symbol streams write the bits of their rule, and read them."""

from collections import Counter

import numpy as np
import pytest

from inshrink_core.coding.events import RUN_EXTRA_BITS, RUN_STARTS, run_windows
from inshrink_core.coding.huffman import (
    code_entries,
    literal_entries,
    stream_bytes,
    stream_words,
    symbol_windows,
    window_bits,
)
from inshrink_core.ops.symbols import (
    MAX_CODE_BITS,
    N_RUN_TOKENS,
    code_lengths,
    delta_events,
    pack_events,
    pack_symbols,
    unpack_events,
    unpack_symbols,
)

_BASES = np.arange(256)
_MODULUS = 40
_NOT_EXPECTED = 256


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
    records, run_counts, literal_counts = delta_events(groups, symbols, _BASES, expected, _MODULUS)
    runs, literals = _codes(run_counts, literal_counts, expected)
    codes = (
        np.stack([code_entries(lengths, 96) for lengths in runs]),
        np.stack([code_entries(lengths, 257) for lengths in literals]),
    )
    packing = (records, run_counts.sum(axis=1), _BASES, *codes)
    tables = (_BASES, *_windows(runs, literals))
    return symbols, packing, (groups, _BASES, expected, _MODULUS, *tables), (runs, literals)


def _unpack(words, n_bits, arguments):
    out = np.empty(arguments[0].size, np.uint8)
    return unpack_events(words, n_bits, *arguments, out), out


def _bits(codes) -> str:
    """Codes and their lengths as text, the first bit first."""
    return "".join(f"{value:0{n_bits}b}"[::-1] if n_bits else "" for value, n_bits in codes)


def _stream(text: str) -> bytes:
    return int(text[::-1] or "0", 2).to_bytes((len(text) + 7) // 8, "little")


def _code(entry) -> tuple[int, int]:
    return int(entry) & 0xFFFF, int(entry) >> 16


def test_large_groups_exercise_every_path():
    _, packing, (groups, *_), (runs, literals) = _packed(60_000, seed=0)
    assert set(groups.tolist()) == {0, 1, 7, 30, 39}
    assert max(map(window_bits, literals)) == MAX_CODE_BITS
    assert max(map(window_bits, runs)) > 4
    assert int((packing[0] & 0x7FFFFF).max()) > 500


def test_events_are_runs_of_the_expected_symbol_each_ended_by_a_literal():
    groups, symbols, expected = _chunk(60_000, seed=0)
    found, run_counts, literal_counts = delta_events(groups, symbols, _BASES, expected, _MODULUS)
    events = []
    for group in range(256):
        run = 0
        for symbol in symbols[groups == group].tolist():
            if symbol == expected[group]:
                run += 1
            else:
                events.append((group, run, (group - symbol) % _MODULUS))
                run = 0
        events += [(group, run, 256)] if run else []
    assert found.tolist() == [run | literal << 23 for _, run, literal in events]
    literals = [(group, literal) for group, _, literal in events if literal < 256]
    assert {at: literal_counts[at] for at in set(literals)} == Counter(literals)
    assert literal_counts.sum() == len(literals)
    assert run_counts.sum(1).tolist() == [sum(group == one for one, *_ in events) for group in range(256)]


def test_packed_events_are_the_codes_of_runs_their_extra_bits_and_literals():
    _, (records, n_events, tables, run_codes, literal_codes), _, _ = _packed(60_000, seed=0)
    codes = []
    for table, record in zip(np.repeat(tables, n_events).tolist(), records.tolist(), strict=True):
        run, literal = record & 0x7FFFFF, record >> 23
        token = int(np.searchsorted(RUN_STARTS, run, side="right")) - 1
        n_extra = int(RUN_EXTRA_BITS[token])
        codes += [_code(run_codes[table, token]), (run & ((1 << n_extra) - 1), n_extra)]
        codes.append(_code(literal_codes[table, literal]))
    words, n_bits = pack_events(records, n_events, tables, run_codes, literal_codes)
    assert stream_bytes(words, n_bits) == _stream(_bits(codes))


def test_events_of_large_groups_come_back():
    symbols, packing, arguments, _ = _packed(60_000, seed=0)
    words, n_bits = pack_events(*packing)
    taken, out = _unpack(stream_words(stream_bytes(words, n_bits)), n_bits, arguments)
    assert taken == n_bits
    assert np.array_equal(out, symbols)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_streams_end_at_another_place_or_in_symbols_of_the_alphabet(seed):
    rng = np.random.default_rng(seed)
    _, packing, arguments, _ = _packed(25_000, seed)
    stream = bytearray(stream_bytes(*pack_events(*packing)))
    if seed % 3 == 0:
        del stream[rng.integers(len(stream)) :]
    elif seed % 3 == 1:
        stream[rng.integers(len(stream))] ^= 1 << int(rng.integers(8))
    else:
        stream = bytearray(rng.bytes(int(rng.integers(1, len(stream)))))
    taken, out = _unpack(stream_words(bytes(stream)), 8 * len(stream), arguments)
    assert taken <= 8 * len(stream)
    assert seed % 3 == 1 or taken < 0
    assert taken < 0 or out.max() < _MODULUS


def test_codes_that_take_no_bits_decode_from_an_empty_stream():
    groups = np.zeros(20_000, np.uint8)
    lone_run, lone_literal = np.zeros(N_RUN_TOKENS, np.int64), np.zeros(_MODULUS, np.int64)
    lone_run[0] = lone_literal[3] = 1
    tables = (np.zeros(256, np.int64), *_windows([lone_run], [lone_literal]))
    for rests in (0, _NOT_EXPECTED):
        expected = np.full(256, rests)
        taken, out = _unpack(stream_words(b""), 0, (groups, _BASES, expected, _MODULUS, *tables))
        assert taken == 0
        assert (out == (0 - 3) % _MODULUS).all()


@pytest.mark.parametrize("n", [0, 1, 3, 29, 30, 31, 4095, 4096, 30_001])
def test_plain_codes_follow_each_other_at_every_size(n):
    rng = np.random.default_rng(n)
    symbols = np.minimum(rng.geometric(0.4, n) - 1, 39).astype(np.uint8)
    lengths = code_lengths(np.maximum(2 ** np.arange(39, -1, -1, dtype=np.int64) >> 15, 1))
    assert window_bits(lengths) == MAX_CODE_BITS
    codes = code_entries(lengths)
    words, n_bits = pack_symbols(symbols, codes)
    stream = stream_bytes(words, n_bits)
    assert stream == _stream(_bits(_code(codes[symbol]) for symbol in symbols))
    windows, out = symbol_windows(lengths, MAX_CODE_BITS, literal_entries(lengths)), np.empty(n, np.uint8)
    assert unpack_symbols(stream_words(stream), n_bits, windows, out) == n_bits
    assert np.array_equal(out, symbols)
