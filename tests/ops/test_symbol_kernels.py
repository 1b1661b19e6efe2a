"""Kernels of symbol streams write the bits of their rule, and read them."""

from collections import Counter

import numpy as np

from inshrink_core.coding.huffman import (
    code_entries,
    literal_entries,
    stream_bytes,
    stream_words,
    symbol_windows,
    window_bits,
)
from inshrink_core.coding.symbols import RUN_EXTRA_BITS, RUN_STARTS, run_windows
from inshrink_core.ops.cpu.symbols import (
    MAX_CODE_BITS,
    N_RUN_TOKENS,
    code_lengths,
    delta_events,
    pack_events,
    pack_symbols,
    unpack_events,
)

_BASES = np.arange(256)
_MODULUS = 40
_NOT_EXPECTED = 256


def _chunk(n, seed):
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


def _packed(n, seed):
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


def _bits(codes):
    """Codes and their lengths as text, the first bit first."""
    return "".join(f"{value:0{n_bits}b}"[::-1] if n_bits else "" for value, n_bits in codes)


def _stream(text):
    return int(text[::-1] or "0", 2).to_bytes((len(text) + 7) // 8, "little")


def _code(entry):
    return int(entry) & 0xFFFF, int(entry) >> 16


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
    assert run_counts.sum(1).tolist() == [sum(group == found for found, *_ in events) for group in range(256)]


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
    symbols, packing, arguments, (_, literals) = _packed(60_000, seed=0)
    # Codes as long as the format allows, and runs with extra bits.
    assert max(map(window_bits, literals)) == MAX_CODE_BITS
    assert int((packing[0] & 0x7FFFFF).max()) > 500
    words, n_bits = pack_events(*packing)
    out = np.empty(symbols.size, np.uint8)
    assert unpack_events(stream_words(stream_bytes(words, n_bits)), n_bits, *arguments, out) == n_bits
    assert np.array_equal(out, symbols)


def test_plain_codes_follow_each_other():
    rng = np.random.default_rng(1)
    symbols = np.minimum(rng.geometric(0.4, 30_001) - 1, 39).astype(np.uint8)
    lengths = code_lengths(np.maximum(2 ** np.arange(39, -1, -1, dtype=np.int64) >> 15, 1))
    codes = code_entries(lengths)
    stream = stream_bytes(*pack_symbols(symbols, codes))
    assert stream == _stream(_bits(_code(codes[symbol]) for symbol in symbols))
