"""Rounding to a lattice: tokens, histories, extra bits and matched gain follow their rules."""

import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.lattice import pack_extra, unpack_extra
from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    FIRST_LARGE,
    MAX_GRADE,
    MIN_GRADE,
    Lattice,
    gain_grade,
    large_changes,
    matched_changes,
    round_to_lattice,
    sum_tokens,
)
from tests.ops.lattice_checks import same
from tests.strategies import normal

UNIT = Lattice(1.0, 1, 1.0, 2**24 - 1)


def zeros(n):
    return torch.zeros(n, dtype=torch.int32)


def rounded_all(*targets):
    """Round one tensor after the other, each from the state of the one before."""
    state, context_state, found = zeros(len(targets[0])), None, []
    for target in targets:
        found.append(round_to_lattice(torch.tensor(target), state, context_state, UNIT))
        state, context_state = found[-1].integers, found[-1].context_state
    return found


def test_tokens_are_summed_by_row_and_by_column():
    tokens = torch.randint(0, 229, (7, 4099), dtype=torch.uint8)
    rows, columns = sum_tokens(tokens.view(-1), 7)
    assert rows.tolist() == [sum(row) for row in tokens.tolist()]
    assert columns.tolist() == [sum(column) for column in tokens.T.tolist()]


def test_extra_bits_that_are_not_those_of_the_tokens_are_refused():
    tokens = torch.tensor([3, 128, 227, 228, 130], dtype=torch.uint8)
    # 5, 29 and 5 bits; a last bit that belongs to none of them.
    assert unpack_extra(tokens, bytes(5)).tolist() == [128, 7 << 29, 6 << 5]
    assert unpack_extra(tokens, b"\xff" * 4 + b"\x7f").tolist() == [159, (8 << 29) - 1, (7 << 5) - 1]
    assert all(unpack_extra(tokens, bits) is None for bits in (bytes(4), bytes(6), b"\xff" * 5))


def test_extra_bits_of_many_large_changes_come_back():
    z = torch.from_numpy(np.random.default_rng(2).integers(128, 1 << 26, 70000))
    place = torch.log2(z.double()).floor().long()
    tokens = (FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2)) & 3)).to(torch.uint8)
    extra = pack_extra(z.numpy())
    assert np.array_equal(unpack_extra(tokens, extra), z.numpy())
    assert unpack_extra(tokens, extra[:-1]) is None
    assert unpack_extra(tokens, extra + b"\0") is None


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.REFERENCE])
def test_without_integers_before_they_were_zeros(backend):
    values, none = normal((4000,), 1), zeros(4000)
    values[7] = torch.nan
    # Changes of one step size in 16 units: thousands, of which most have extra bits.
    lattice = Lattice(2.0**-18, 16, 2.0**14, 2**24 - 1)
    with force_backend(backend):
        alone, rounded = (round_to_lattice(values, before, None, lattice) for before in (None, none))
        assert same(alone, rounded)
        assert rounded.n_exact == 1
        z = large_changes(rounded.tokens, None, rounded.integers, None, 16)
        assert z.size > 3000
        assert np.array_equal(large_changes(rounded.tokens, none, rounded.integers, None, 16), z)
    decoded = rounded.integers.float() * lattice.unit
    assert float((decoded - values).nan_to_num().abs().max()) <= 0.5001 * 16 * 2.0**-18


def test_history_has_age_pair_and_sign():
    found = rounded_all(*([float(target)] for target in (0, 3, 3, 3, 5, 4, *[4] * 9)))
    context_states = [int(rounded.context_state[0]) for rounded in found]
    # none; first change; two frames without; same sign; other sign and negative; ageing to the oldest
    assert context_states[:6] == [0, 1, 4, 7, 2, 32 + 3]
    assert context_states[-1] == 32 + 3 + 3 * 7


def test_a_change_is_coded_times_the_sign_of_the_last_one():
    first, second = rounded_all([1.0, -1.0], [3.0, -3.0])
    assert second.tokens.tolist() == [4, 4]
    assert (first.context_state & CONTEXT_BITS).tolist() == [1, 1]


def test_large_changes_take_a_token_of_their_first_three_bits():
    (rounded,) = rounded_all([63.0, 64.0, 80.0, 1e6])
    # z = 126, 128, 160 and 2e6 = 1.907 * 2**20: tokens 126, 128 + 0, 128 + 1, 128 + 4 * 13 + 3
    assert rounded.tokens.tolist() == [126, 128, 129, 183]
    assert (rounded.n_large, rounded.n_exact) == (3, 0)
    # 5, 5 and 18 extra bits
    assert len(pack_extra(np.array([128, 160, 2_000_000]))) == 4


def test_matched_gain_keeps_the_movement_and_sends_only_the_largest():
    n, lattice = 40_000, Lattice(2.0**-18, 512, 2.0**9, 2**24 - 1)  # a step size of .00195
    before = torch.randint(-40, 40, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)) * 512
    base = before.float() * 2.0**-18
    movement = normal((n,), 2, scale=0.0007)
    grade = gain_grade(base + movement, base, before, lattice)
    assert MIN_GRADE < grade < MAX_GRADE

    def gain(changes):
        rounded = round_to_lattice(base + movement, before, None, lattice, changes)
        stored = (rounded.integers - before).float() * 2.0**-18
        return float((stored * movement).sum() / (movement * movement).sum())

    changes = matched_changes(base + movement, before, lattice, base, grade)
    assert gain(changes) == pytest.approx(1.0, abs=0.01)
    assert gain(None) < 0.9


def test_the_grade_is_zero_where_plain_rounding_will_do_and_negative_where_the_step_is_too_coarse():
    base, before = torch.zeros(1000), zeros(1000)
    assert gain_grade(torch.full((1000,), 3.0), base, before, UNIT) == 0
    assert gain_grade(normal((1000,), 1, scale=0.03), base, before, UNIT) < 0
    assert gain_grade(normal((1000,), 1, scale=0.08), base, before, UNIT) > 0
