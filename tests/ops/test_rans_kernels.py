"""The format of context rANS, and the choice of its tables."""

import numba
import numpy as np
import pytest
import torch

from inshrink_core.ops.cpu.tables import choose_tables, read_tables
from inshrink_core.ops.cpu.wide_rans import is_wide
from inshrink_core.ops.rans import RansModel, rans_decode, rans_encode
from tests.coding.plain import plain_kernels


def test_wide_vectors_are_used_only_where_numba_compiles_for_this_processor(monkeypatch):
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not is_wide()


def test_reciprocals_divide_for_every_frequency():
    # Two lanes of random states meet each frequency from 1 to 4095 a few times; decoding takes no quotient.
    for f in [*range(1, 40), *range(40, 4096, 61), 2047, 2048, 2049, 4094, 4095]:
        model = RansModel(np.zeros(1, np.int64), np.array([[f, 4096 - f]]))
        symbols = torch.from_numpy((np.random.default_rng(f).random(24) < 0.5).astype(np.uint8))
        blocks = rans_encode(symbols, None, model, 2, 32)
        decoded, intact = rans_decode(blocks, None, model, 24, 32)
        assert intact
        assert torch.equal(decoded, symbols)


@pytest.mark.parametrize("precisions", [(12, 10, 8, 7), (8,), (12,)])
def test_compiled_and_plain_kernels_choose_the_same_tables_and_read_them(precisions):
    rng = np.random.default_rng(4)
    for n_symbols, scale in ((1, 1e3), (3, 30), (16, 1e3), (100, 1e5)):
        counts = (rng.random((6, n_symbols)) ** 6 * scale).astype(np.int64)
        counts[:, 0] += np.array([1, 1, 0, 1, 10**9, 1])
        counts[2] = 0
        for apart in (False, True):
            chosen = choose_tables(counts, precisions, apart=apart)
            behind = np.append(chosen.packed, np.full(9, 255, np.uint8))
            shape = (6, chosen.frequencies.shape[0], n_symbols)
            rows, frequencies, n_bits = read_tables(behind, shape, chosen.precision)
            with plain_kernels():
                again = choose_tables(counts, precisions, apart=apart)
                plain = read_tables(behind, shape, chosen.precision)
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(chosen, again, strict=True))
            assert np.array_equal(rows, chosen.rows)
            assert np.array_equal(frequencies, chosen.frequencies)
            assert np.array_equal(plain[1], frequencies)
            assert n_bits == plain[2] == chosen.n_bits
            assert (frequencies.sum(1) == 1 << chosen.precision).all()
            assert (frequencies[rows] > 0)[counts > 0].all()


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
