"""Symbol streams come back, stay within their bound, and come close to the conditional entropy."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from inshrink_core.coding import symbols as symbol_stream
from inshrink_core.coding.raw import packed_bytes
from inshrink_core.coding.symbols import (
    NO_EXPECTATION,
    RUN_EXTRA_BITS,
    RUN_STARTS,
    decode_symbols,
    encode_symbols,
    expected_symbols,
)
from inshrink_core.errors import DamagedError
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.symbols import MAX_CHUNK, MAX_CODE_BITS
from tests.strategies import symbol_pairs


def _symbols(*values):
    return torch.tensor(values, dtype=torch.uint8)


def _moving(n, n_symbols, moved, seed):
    """Symbols of a bell-shaped distribution, of which a share moves to a neighbouring bin."""
    rng = np.random.default_rng(seed)
    previous = np.clip(rng.normal(n_symbols / 2, n_symbols / 6, n), 0, n_symbols - 1).astype(np.uint8)
    steps = np.where(rng.random(n) < moved, rng.choice([-1, 1], n), 0)
    symbols = np.clip(previous.astype(int) + steps, 0, n_symbols - 1).astype(np.uint8)
    return torch.from_numpy(previous), torch.from_numpy(symbols)


def _conditional_entropy_bits(previous, symbols):
    """n · H(symbol | previous symbol), in bits."""
    pairs = np.bincount(previous.numpy().astype(int) * 256 + symbols.numpy(), minlength=65536).reshape(
        256, 256
    )
    totals = np.broadcast_to(pairs.sum(axis=1, keepdims=True), pairs.shape)
    used = pairs > 0
    return float(-(pairs[used] * np.log2(pairs[used] / totals[used])).sum())


def _round_trip(symbols, n_symbols, previous=None, n_previous=0):
    payload = encode_symbols(symbols, n_symbols, previous, n_previous)
    assert len(payload) <= sum(5 + packed_bytes(part.numel(), n_symbols) for part in symbols.split(MAX_CHUNK))
    decoded = decode_symbols(payload, symbols.numel(), n_symbols, previous, n_previous)
    assert torch.equal(decoded, symbols)
    return payload


@given(case=symbol_pairs())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_symbols_come_back_and_both_back_ends_write_the_same_bytes(case):
    symbols, n_symbols, previous, n_previous = case
    payload = _round_trip(symbols, n_symbols, previous, n_previous)
    with force_backend(Backend.REFERENCE):
        assert _round_trip(symbols, n_symbols, previous, n_previous) == payload


def test_back_ends_agree_where_groups_have_tables_of_their_own():
    rng = np.random.default_rng(0)
    previous = rng.integers(0, 6, 60_000).astype(np.uint8)
    # Groups 0 to 2 move at quite different rates, 3 shifts by one, 4 and 5 are noise: every kind of table.
    rates = np.array([0.02, 0.3, 0.1, 0.0, 1.0, 1.0])[previous]
    symbols = np.where(rng.random(previous.size) < rates, rng.integers(0, 7, previous.size), previous)
    symbols = torch.from_numpy(np.where(previous == 3, 4, symbols).astype(np.uint8))
    payload = _round_trip(symbols, 7, torch.from_numpy(previous), 6)
    assert payload[0] == 3
    assert payload[1] == 0  # neither uniform nor pooled
    with force_backend(Backend.REFERENCE):
        assert _round_trip(symbols, 7, torch.from_numpy(previous), 6) == payload


def test_chunks_are_framed_and_come_back(monkeypatch):
    monkeypatch.setattr(symbol_stream, "MAX_CHUNK", 100)
    previous, symbols = _moving(1050, 18, 0.1, seed=1)
    symbols[300:500] = previous[300:500]
    _round_trip(symbols, 18, previous, 18)
    _round_trip(symbols, 18)


def test_a_run_may_be_as_long_as_a_chunk():
    n = symbol_stream.MAX_CHUNK
    previous = torch.zeros(n + 5, dtype=torch.uint8)
    symbols = previous.clone()
    symbols[n - 1] = 1
    assert len(_round_trip(symbols, 2, previous, 2)) < 32
    assert len(_round_trip(symbols, 2)) < 32


@pytest.mark.parametrize(
    ("symbols", "n_symbols", "previous", "expected"),
    [
        ((), 4, None, ""),
        # kind 1, D = 0: nothing moved.
        ((3, 1, 2), 4, (3, 1, 2), "0100"),
        # kind 1, D = -1 mod 4 = 3: every bin moved up by one.
        ((1, 2, 3), 4, (0, 1, 2), "0103"),
        # kind 0, two bits each, first symbol least significant: 11 10 01 00.
        ((0, 1, 2, 3), 4, None, "00e4"),
        # kind 2, lengths 2, 2, 1 and a padding nibble, 28 times "0", then "10" and "11".
        ((2,) * 28 + (0, 1), 3, None, "02" + "2201" + "000000d0"),
    ],
)
def test_tiny_streams_have_exactly_these_bytes(symbols, n_symbols, previous, expected):
    before = None if previous is None else _symbols(*previous)
    assert _round_trip(_symbols(*symbols), n_symbols, before, n_symbols).hex() == expected


def test_a_grouped_chunk_has_exactly_these_bytes():
    # One group (alone, hence base 0): 60 zeros, a literal, 59 zeros. Symbol 1 of 4 is D = -1 mod 4 = 3.
    # kind 3, flags uniform and pooled = 3; runs 60 (class 16 + 4 + 3 = 23) and 59 (class 23 + 0: 56 to 63),
    # so the run table holds one class: 23 zeros as nibbles 0 f 0 6, length 1, end f;
    # literal table: three zeros as 0 2, length 1, a padding nibble. Neither takes bits but for
    # the three extra bits of each run (60 - 56 = 4, 59 - 56 = 3): 4 + 3 << 3 = 0x1c.
    symbols = _symbols(*[0] * 60, 1, *[0] * 59)
    assert _round_trip(symbols, 4).hex() == "0303" + "f060f1" + "2001" + "1c"


def test_groups_stand_one_after_the_other():
    # Groups 0 and 1 alternate, 60 symbols each, D = 0 but for one symbol: runs 20 and 39 in group 0, then
    # 40 and 19 in group 1. Kind 3, flags uniform and pooled = 3. Classes 17, 20, 21, 16 have two bits each:
    # 16 zeros as 0 f, 2 2, two zeros as 0 1, 2 2, end f, padding; the only literal, 1, takes none: 0 0 1 0.
    # Class and extra bits, first bit first: 01 00, 10 111 | 11 000, 00 11.
    previous = _symbols(*[0, 1] * 60)
    symbols = previous.clone()
    symbols[2 * 20] = 1
    symbols[2 * 40 + 1] = 0
    payload = _round_trip(symbols, 2, previous, 2)
    assert payload.hex() == "0303" + "f02210220f" + "0001" + "d20703"


def test_size_is_within_two_percent_of_the_conditional_entropy():
    # 200,000 symbols, 15 % moved by one bin. Huffman on runs and literals of nearly even direction wastes
    # under 2 %; tables take at most 18 groups × 2 tables × 50 bytes = 1,800 bytes.
    previous, symbols = _moving(200_000, 18, 0.15, seed=3)
    size = len(_round_trip(symbols, 18, previous, 18))
    assert size <= 1.02 * _conditional_entropy_bits(previous, symbols) / 8 + 1800


def test_both_back_ends_refuse_the_same_streams():
    previous, symbols = _moving(400, 6, 0.2, seed=9)
    payload = encode_symbols(symbols, 6, previous, 6)
    rng = random.Random(10)
    for _ in range(300):
        damaged = bytearray(payload)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        outcomes = []
        for backend in (Backend.CPU, Backend.REFERENCE):
            with force_backend(backend):
                try:
                    outcomes.append(decode_symbols(bytes(damaged), 400, 6, previous, 6).tolist())
                except DamagedError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_an_event_never_needs_more_bits_than_a_window_holds():
    assert max(31, MAX_CODE_BITS) + MAX_CODE_BITS + int(RUN_EXTRA_BITS.max()) <= 64
    assert RUN_STARTS[-1] == MAX_CHUNK


def test_a_group_expects_what_prevails_in_it():
    counts = np.zeros((256, 256), np.int64)
    counts[0, 0], counts[0, 1] = 90, 10  # rests
    counts[1, 2], counts[1, 1] = 80, 20  # the bins were renumbered
    counts[2, 0:4] = 25  # no symbol prevails
    counts[3, 5] = 3  # too few to tell
    expected = expected_symbols(counts, np.arange(256))
    assert expected[:5].tolist() == [0, 2, NO_EXPECTATION, 3, 4]
