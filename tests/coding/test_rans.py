"""Context rANS reaches the conditional entropy, has one bitstream, and refuses what is not its own."""

import contextlib
import random
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch

from inshrink_core.coding import rans
from inshrink_core.coding.rans import decode_rans, encode_rans, estimate_bits_of_counts, stream_shape
from inshrink_core.coding.raw import worst_case_coded_bytes
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.tables import read_tables
from inshrink_core.ops.rans import rans_counts
from tests.coding.plain import plain_kernels

RNG = np.random.default_rng


def bytes_of(values):
    return torch.from_numpy(np.asarray(values, np.uint8))


def laplacian(n, n_symbols, n_contexts, scale):
    """Rounded Laplace numbers around the middle of the alphabet, wider with the context."""
    rng = RNG(n + n_symbols)
    contexts = rng.integers(0, n_contexts, n)
    values = np.rint(rng.laplace(0, scale * (0.3 + contexts / n_contexts)) + n_symbols // 2)
    symbols = bytes_of(np.clip(values, 0, n_symbols - 1))
    return symbols, None if n_contexts == 1 else bytes_of(contexts)


def entropy_bits(symbols, contexts):
    pairs = symbols.long() + 256 * (0 if contexts is None else contexts.long())
    counts = np.bincount(pairs.numpy(), minlength=65536).reshape(256, 256)
    totals = np.maximum(counts.sum(1, keepdims=True), 1)
    return float(-(counts * np.log2(np.maximum(counts, 1) / totals)).sum())


def round_trip(symbols, contexts, n_symbols, n_contexts):
    payload = encode_rans(symbols, contexts, n_symbols, n_contexts)
    assert len(payload) <= worst_case_coded_bytes(symbols.numel(), n_symbols)
    decoded = decode_rans(payload, symbols.numel(), n_symbols, contexts, n_contexts)
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, symbols)
    return payload


def test_a_stream_has_exactly_these_bytes():
    # Fifteen 0 and one 1 of an alphabet of 256. Mode 02. One lane and tables of 6 bits: 60; blocks of
    # 2**4 symbols: 04; one table: 00.
    # Table 60, 4 (of 64): bit lengths 6 and 3. Change +6 is 12 in zigzag order, 13 = 1101 after three
    # zeros; 60 without its highest bit, lowest first: 00111. Change -3 is 5, 6 = 110 after two zeros; 4: 00.
    # Bits 0001101 00111 00110 00, eight to a byte: 00011010 01110011 000, lowest first: 58 ce 00.
    # Frequencies 3840 and 256. From 32768, the 1 gives (128 << 12) + 3840 = 528128; each 0 then makes of
    # x = 3840 q + r the state 4096 q + r; after fifteen it is x, little endian; no words.
    x = 528128
    for _ in range(15):
        x = 4096 * (x // 3840) + x % 3840
    expected = bytes.fromhex("02" + "600400" + "58ce00") + x.to_bytes(4, "little")
    assert round_trip(bytes_of([0] * 15 + [1]), None, 256, 1) == expected


def test_contexts_that_differ_get_tables_of_their_own():
    # Eight symbols of each context, all the same in it: two tables of one symbol each, so no words. Mode
    # 02, one lane, 6-bit tables, blocks of 2**5, two tables: 60 05 01. Table numbers 0 and 1: bits 0 1.
    # 64 has 7 bits: change 7, 14 in zigzag order, 15 = 1111 after three zeros; then six zeros. The second
    # table begins with a 0: change 0, 1. Bits 01 0001111000000 1 0001111000000, lowest first; the state
    # never leaves 32768.
    bits = "01" + "0001111000000" + "1" + "0001111000000"
    table = int(bits[::-1], 2).to_bytes(4, "little")
    symbols, contexts = bytes_of([0, 1] * 16), bytes_of([0, 1] * 16)
    payload = round_trip(symbols, contexts, 256, 2)
    assert payload == bytes.fromhex("02" + "600501") + table + (32768).to_bytes(4, "little")


def test_small_and_plain_inputs_fall_back_to_exactly_these_bytes():
    assert round_trip(bytes_of([]), None, 4, 1) == b""
    assert round_trip(bytes_of([3]), None, 4, 1) == b"\x01\x03"
    assert round_trip(bytes_of([200] * 1000), bytes_of([1] * 1000), 256, 2) == b"\x01\xc8"
    # Two bits each, lowest first: 1 | 2 << 2 | 3 << 4.
    assert round_trip(bytes_of([1, 2, 3]), None, 4, 1) == b"\x00\x39"


@pytest.mark.parametrize("n_contexts", [1, 16])
@pytest.mark.parametrize(
    ("n_symbols", "scale"),
    [(16, 0.4), (16, 1.5), (32, 0.25), (256, 12.0)],
    ids=["low", "wide", "rare", "bytes"],
)
def test_a_million_symbols_take_the_conditional_entropy_and_a_hundredth(n_symbols, scale, n_contexts):
    symbols, contexts = laplacian(1_000_000, n_symbols, n_contexts, scale)
    payload = round_trip(symbols, contexts, n_symbols, n_contexts)
    ideal = entropy_bits(symbols, contexts)
    assert payload[0] == 2
    assert 8 * len(payload) <= 1.01 * ideal
    counts = rans_counts(symbols, contexts, n_symbols, n_contexts).numpy()
    assert abs(estimate_bits_of_counts(counts) - 8 * len(payload)) < 0.01 * ideal


@pytest.mark.parametrize("n", [1, 2, 3, 5, 31, 32, 33, 1000, 4097])
@pytest.mark.parametrize(("n_symbols", "n_contexts"), [(1, 1), (2, 1), (17, 3), (256, 1), (256, 32)])
def test_symbols_come_back_within_the_stated_size(n, n_symbols, n_contexts):
    rng = RNG(n)
    symbols = bytes_of(n_symbols * rng.random(n) ** 6)
    contexts = None if n_contexts == 1 else bytes_of(rng.integers(0, n_contexts, n))
    payload = round_trip(symbols, contexts, n_symbols, n_contexts)
    if n <= 1000:
        with force_backend(Backend.REFERENCE):
            assert round_trip(symbols, contexts, n_symbols, n_contexts) == payload


@pytest.mark.parametrize("lanes", [1, 2, 8, 64, 4096])
@pytest.mark.parametrize("n", [300, 4096, 5001])
def test_any_number_of_lanes_and_blocks_comes_back(n, lanes):
    symbols, contexts = laplacian(n, 256, 5, 0.3)
    with mock.patch.object(rans, "stream_shape", return_value=(lanes, max(lanes, 256))):
        round_trip(symbols, contexts, 256, 5)


def test_contexts_that_tell_nothing_share_a_table():
    symbols, _ = laplacian(20_000, 16, 1, 0.5)
    contexts = bytes_of(RNG(1).integers(0, 16, 20_000))
    alone = round_trip(symbols, None, 16, 1)
    assert len(round_trip(symbols, contexts, 16, 16)) < 1.01 * len(alone)


def test_few_symbols_get_few_lanes_and_many_get_blocks():
    for n in (1, 10, 10**6, 10**9):
        for bits in (0.0, 0.01 * n, float(n), 8.0 * n):
            lanes, block_length = stream_shape(n, bits)
            assert lanes <= block_length
            assert 32 * lanes * -(-n // block_length) <= max(0.011 * bits, 32)


def test_a_symbol_or_context_out_of_range_is_an_input_error():
    symbols, contexts = bytes_of([0, 1, 5]), bytes_of([0, 1, 2])
    for arguments in (
        (symbols, None, 5, 1),
        (symbols, contexts, 6, 2),
        (symbols, contexts[:2], 6, 3),
        (symbols.int(), None, 6, 1),
        (symbols, None, 257, 1),
        (symbols, contexts, 6, 33),
    ):
        with pytest.raises(InputError):
            encode_rans(*arguments)
    payload = encode_rans(bytes_of([0, 1] * 500), bytes_of([0, 1] * 500), 256, 2)
    with pytest.raises(InputError):
        decode_rans(payload, 1000, 256, bytes_of([0, 1] * 499), 2)


def test_only_the_lower_five_bits_of_a_context_count():
    rng = np.random.default_rng(6)
    contexts = torch.from_numpy(rng.integers(0, 7, 40000).astype(np.uint8))
    symbols = torch.from_numpy((rng.random(40000) ** 8 * 9 * (1 + contexts.numpy() % 3)).astype(np.uint8))
    flags = torch.from_numpy((rng.integers(0, 8, 40000) * 32).astype(np.uint8))
    payload = encode_rans(symbols, contexts, 32, 7)
    assert encode_rans(symbols, contexts + flags, 32, 7) == payload
    assert torch.equal(decode_rans(payload, 40000, 32, contexts + flags, 7), symbols)


def test_decoding_with_contexts_that_are_not_there_is_safe():
    contexts = bytes_of([0, 1] * 20000)
    payload = encode_rans(bytes_of([0, 1, 1, 1, 0, 2, 3, 1] * 5000), contexts, 4, 2)
    for wrong in (contexts + 2, contexts + 29, contexts * 31):
        with contextlib.suppress(DamagedError):
            assert decode_rans(payload, 40000, 4, wrong, 2).numel() == 40000


def payloads():
    """One payload of every mode, and of one block and several."""
    several, contexts = laplacian(700, 40, 6, 0.8)
    single, _ = laplacian(400, 16, 1, 0.5)
    with mock.patch.object(rans, "stream_shape", return_value=(4, 256)):
        blocks = encode_rans(several, contexts, 40, 6)
    return [
        (blocks, several, contexts, 40, 6),
        (encode_rans(single, None, 16, 1), single, None, 16, 1),
        (encode_rans(bytes_of([2, 1, 0, 4]), None, 5, 1), bytes_of([2, 1, 0, 4]), None, 5, 1),
        (encode_rans(bytes_of([2] * 9), None, 5, 1), bytes_of([2] * 9), None, 5, 1),
    ]


def test_every_truncated_or_extended_payload_is_refused():
    for payload, symbols, contexts, n_symbols, n_contexts in payloads():
        cut = [payload[:length] for length in range(len(payload))]
        for damaged in (*cut, payload + b"\0", payload + b"\0\0"):
            with pytest.raises(DamagedError):
                decode_rans(damaged, symbols.numel(), n_symbols, contexts, n_contexts)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.REFERENCE])
def test_flipped_payloads_are_refused_or_decode_to_symbols_of_the_alphabet(backend):
    rng = random.Random(0)
    n_flips = 3000 if backend is Backend.CPU else 60
    with force_backend(backend):
        for payload, symbols, contexts, n_symbols, n_contexts in payloads():
            for _ in range(n_flips):
                damaged = bytearray(payload)
                for _ in range(rng.choice([1, 1, 1, 4])):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                try:
                    decoded = decode_rans(bytes(damaged), symbols.numel(), n_symbols, contexts, n_contexts)
                except DamagedError:
                    continue
                assert decoded.numel() == symbols.numel()
                assert int(decoded.max()) < n_symbols


def test_a_short_payload_of_many_blocks_allocates_little():
    # Blocks of one symbol each would be a billion states.
    symbols, _ = laplacian(400, 16, 1, 0.5)
    payload = bytearray(encode_rans(symbols, None, 16, 1))
    payload[2] = 0
    tracemalloc.start()
    with pytest.raises(DamagedError):
        decode_rans(bytes(payload), 10**9, 16, None, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_payload_without_symbols_is_empty():
    with pytest.raises(DamagedError):
        decode_rans(b"\x01\x00", 0, 4)


def test_tables_of_no_bytes_are_refused_whatever_memory_held_before():
    # Bits beyond the last byte are zeros, not what lies behind it in memory.
    with plain_kernels():
        for value in range(2, 200):
            filled = np.full(32, value, np.uint8)
            del filled
            assert read_tables(np.zeros(0, np.uint8), (1, 1, 4), 12)[2] == -1
