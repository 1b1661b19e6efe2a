"""The format of context rANS, and the choice of its tables."""

from contextlib import nullcontext

import numba
import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu import tables
from inshrink_core.ops.cpu.tables import choose_tables, pool_contexts, read_tables
from inshrink_core.ops.cpu.wide_rans import is_wide
from inshrink_core.ops.rans import RansModel, rans_encode
from tests.coding.plain import plain_kernels
from tests.ops.rans_checks import normalize_counts


def written(rows: np.ndarray, frequencies: np.ndarray, precision: int) -> np.ndarray:
    """Bytes of table numbers and tables, and ones behind them."""
    packed = np.zeros(4 * frequencies.size + 99, np.uint8)
    tables.write_kernel(rows, frequencies, precision, packed)
    return packed


def test_wide_vectors_are_used_only_where_numba_compiles_for_this_processor(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not is_wide()


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.REFERENCE])
def test_half_and_half_shifts_one_bit_a_symbol(backend):
    # f = 2048 doubles the state. From 0x8000, symbol 1 gives (16 << 12) + 2048 = 0x10800, fourteen zeros
    # 0x10800 << 14 = 0x42000000. That is not below 2048 << 19 = 0x40000000: the last zero moves the
    # word 0x0000 out, and makes of 0x4200 = 8 * 2048 + 0x200 the state (8 << 12) + 0x200.
    symbols = torch.tensor([0] * 15 + [1], dtype=torch.uint8)
    model = RansModel(np.zeros(1, np.int64), np.array([[2048, 2048]]))
    with force_backend(backend):
        blocks = rans_encode(symbols, None, model, 1, 16)
    assert blocks.words.tolist() == [0]
    assert blocks.n_words.tolist() == [1]
    assert blocks.states.tolist() == [[0x8200]]


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.REFERENCE])
def test_words_stand_in_order_of_step_and_lane(backend):
    # f = 1 spills whenever the state is at least 2**19; from 0x8000 it grows to (0x8000 << 12) + s, which
    # spills its low word, s, before the second symbol of its lane. Lanes 0 and 1 hold symbols 0, 2 and
    # 1, 3: what they spill is what they coded first, symbols 2 and 3.
    frequencies = np.ones((1, 256), np.int64)
    frequencies[0, 255] = 4096 - 255
    model = RansModel(np.zeros(1, np.int64), frequencies)
    with force_backend(backend):
        blocks = rans_encode(torch.tensor([0, 1, 2, 3], dtype=torch.uint8), None, model, 2, 4)
    assert blocks.words.tolist() == [2, 3]
    assert blocks.states.tolist() == [[0x800 << 12, (0x800 << 12) + 1]]


def test_reciprocals_equal_division_for_every_frequency():
    # The reference divides; numba multiplies by a reciprocal. Two lanes of random states meet each
    # frequency from 1 to 4095 a few times.
    for f in [*range(1, 40), *range(40, 4096, 61), 2047, 2048, 2049, 4094, 4095]:
        model = RansModel(np.zeros(1, np.int64), np.array([[f, 4096 - f]]))
        symbols = torch.from_numpy((np.random.default_rng(f).random(24) < 0.5).astype(np.uint8))
        fast = rans_encode(symbols, None, model, 2, 32)
        with force_backend(Backend.REFERENCE):
            slow = rans_encode(symbols, None, model, 2, 32)
        assert torch.equal(fast.words, slow.words)
        assert torch.equal(fast.states, slow.states)


def test_table_kernels_agree_and_invert_each_other():
    rng = np.random.default_rng(3)
    for n_symbols in (1, 2, 16, 100, 256):
        counts = (rng.random((6, n_symbols)) ** 9 * 1e6).astype(np.int64)
        counts[2] = 0
        counts[:, 0] += np.array([1, 1, 0, 1, 10**12, 1])
        for precision in (8, 12):
            frequencies = normalize_counts(counts, precision)
            assert (frequencies.sum(1) == 1 << precision).all()
            assert ((frequencies > 0) == (counts > 0))[[0, 1, 3, 4, 5]].all()
            packed = written(np.arange(6), frequencies, precision)
            numbered, again, n_bits = read_tables(packed, 8 * packed.size, (6, 6, n_symbols), precision)
            assert n_bits > 0
            assert not packed[(n_bits + 7) // 8 :].any()
            assert numbered.tolist() == [0, 1, 2, 3, 4, 5]
            assert np.array_equal(again, frequencies)
            rows = pool_contexts(counts)[0]
            with plain_kernels():
                assert np.array_equal(normalize_counts(counts, precision), frequencies)
                assert np.array_equal(written(np.arange(6), frequencies, precision), packed)
                same = read_tables(packed, 8 * packed.size, (6, 6, n_symbols), precision)
                assert np.array_equal(same[1], again)
                assert np.array_equal(pool_contexts(counts)[0], rows)


def test_compiled_and_plain_kernels_choose_the_same_tables_and_their_bits_can_be_read():
    rng = np.random.default_rng(4)
    for n_symbols, scale in ((1, 1e3), (3, 30), (16, 1e3), (100, 1e5)):
        counts = (rng.random((6, n_symbols)) ** 6 * scale).astype(np.int64)
        counts[0, 0] += 1
        chosen = choose_tables(counts, np.array([12, 10, 8, 7]))
        with plain_kernels():
            again = choose_tables(counts, np.array([12, 10, 8, 7]))
        for mine, theirs in zip(chosen, again, strict=True):
            assert np.array_equal(mine, theirs)
        shape = (6, chosen.frequencies.shape[0], n_symbols)
        rows, frequencies, n_bits = read_tables(chosen.packed, chosen.n_bits, shape, chosen.precision)
        assert np.array_equal(rows, chosen.rows)
        assert np.array_equal(frequencies, chosen.frequencies)
        assert n_bits == chosen.n_bits
        assert len({4096 >> 12 - chosen.precision, *frequencies.sum(1).tolist()}) == 1


def test_the_chosen_tables_cost_least():
    # A table takes 60 bits or so; 20 symbols of one bit are not worth one for each context, and coarse
    # tables are enough for them. 100 times as many are.
    few, many = (scale * np.array([[9, 1], [1, 9]]) for scale in (1, 1000))
    assert choose_tables(few, np.array([12, 6])).rows.tolist() == [0, 0]
    assert choose_tables(few, np.array([12, 6])).precision == 6
    chosen = choose_tables(many, np.array([12, 6]))
    assert chosen.rows.tolist() == [0, 1]
    entropy = 20000 * -(0.9 * np.log2(0.9) + 0.1 * np.log2(0.1))
    assert entropy <= chosen.data_bits < 1.001 * entropy


@pytest.mark.parametrize("kernels", [nullcontext, plain_kernels])
def test_bits_that_are_no_table_are_told(kernels):
    rng = np.random.default_rng(5)
    with kernels():
        for size in [*range(12), 60] * 8:
            packed = rng.integers(0, 256, (size + 7) // 8).astype(np.uint8)
            _, frequencies, n_bits = read_tables(packed, size, (1, 2, 7), 12)
            assert n_bits == -1 or (frequencies.sum(1) == 4096).all()
            assert n_bits <= size


def test_frequencies_are_rounded_where_it_costs_least():
    # 7/8, 1/16, 1/16 of 16 are exact; 1000 : 1 : 1 of 16 leaves 14 for the first; of 3 : 3 : 3 the
    # first symbol gets what is over.
    counts = np.array([[14, 1, 1], [1000, 1, 1], [3, 3, 3]])
    assert normalize_counts(counts, 4).tolist() == [[14, 1, 1], [14, 1, 1], [6, 5, 5]]
