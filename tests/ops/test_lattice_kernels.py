"""The numba kernels of the lattice codec equal their plain-torch twins, bit for bit, and keep their rules."""

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
    N_CONTEXTS,
    Gain,
    Lattice,
    advance,
    gain_grade,
    large_changes,
    round_to_lattice,
    scale_integers,
    sum_tokens,
)
from tests.strategies import normal


def lattice_of(unit: float, spacing: int) -> Lattice:
    return Lattice(unit, spacing, float(np.float32(1 / (spacing * unit))), 2**24 - 1)


def histories(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    context = torch.randint(0, N_CONTEXTS, (n,), dtype=torch.uint8, generator=generator)
    negative = torch.randint(0, 2, (n,), dtype=torch.uint8, generator=generator)
    return context + 32 * negative * (context > 0)


def same(first, second) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(("spacing", "scale"), [(128, 1.0), (1, 1.0), (1, 30.0), (20000, 1.0)])
def test_back_ends_agree_and_decoding_reaches_the_same_state(spacing, scale, tracked, matched):
    n = 5000
    values = normal((n,), 0) * scale
    values[5], values[7], values[8] = float("nan"), 1e30, float("-inf")
    generator = torch.Generator().manual_seed(1)
    before = torch.randint(-3000, 3000, (n,), dtype=torch.int32, generator=generator)
    history = histories(n) if tracked else None
    lattice = lattice_of(2.0**-17, spacing)
    gain = None
    if matched:
        base = torch.nan_to_num(values) + normal((n,), 2, 0.0005)
        grade = gain_grade(values, base, before, lattice)
        with force_backend(Backend.REFERENCE):
            assert grade == gain_grade(values, base, before, lattice)
        gain = Gain(base, abs(grade))
    fast = round_to_lattice(values, before, history, lattice, gain)
    with force_backend(Backend.REFERENCE):
        assert same(fast, round_to_lattice(values, before, history, lattice, gain))
    z = large_changes(fast.tokens, before, fast.integers, history, spacing)
    extra = pack_extra(z)
    assert np.array_equal(unpack_extra(fast.tokens, extra), z)
    moved = advance(fast.tokens, z, before, history, lattice)
    assert moved.valid
    assert torch.equal(moved.integers, fast.integers)
    assert torch.equal(moved.history, fast.history)
    with force_backend(Backend.REFERENCE):
        assert np.array_equal(large_changes(fast.tokens, before, fast.integers, history, spacing), z)
        assert same(moved, advance(fast.tokens, z, before, history, lattice))


def test_back_ends_sum_rows_and_columns_of_tokens_the_same():
    tokens = torch.randint(0, 229, (7 * 4099,), dtype=torch.uint8)
    for n_rows in (1, 7, 4099, tokens.numel()):
        rows, columns = sum_tokens(tokens, n_rows)
        with force_backend(Backend.REFERENCE):
            again = sum_tokens(tokens, n_rows)
        assert np.array_equal(rows, again[0])
        assert np.array_equal(columns, again[1])
        assert rows.sum() == columns.sum() == int(tokens.sum())


def test_extra_bits_that_are_not_those_of_the_tokens_are_refused():
    tokens = torch.tensor([3, 128, 227, 228, 130], dtype=torch.uint8)
    # 5, 29 and 5 bits; a last bit that belongs to none of them.
    assert unpack_extra(tokens, bytes(5)).tolist() == [128, 7 << 29, 6 << 5]
    assert unpack_extra(tokens, b"\xff" * 4 + b"\x7f").tolist() == [159, (8 << 29) - 1, (7 << 5) - 1]
    assert all(unpack_extra(tokens, bits) is None for bits in (bytes(4), bytes(6), b"\xff" * 5))


def test_without_integers_before_they_were_zeros_on_every_back_end():
    values, zeros = normal((4000,), 1), torch.zeros(4000, dtype=torch.int32)
    values[7] = torch.nan
    for backend in (Backend.CPU, Backend.REFERENCE):
        with force_backend(backend):
            # Changes of one spacing in 16 units: thousands, of which most have extra bits.
            lattice = lattice_of(2.0**-18, 16)
            alone, rounded = (round_to_lattice(values, one, None, lattice) for one in (None, zeros))
            assert same(alone, rounded)
            assert rounded.n_exact == 1
            z = large_changes(rounded.tokens, zeros, rounded.integers, None, 16)
            assert z.size > 3000
            assert np.array_equal(large_changes(rounded.tokens, None, rounded.integers, None, 16), z)
            gain = Gain(torch.zeros(4000), MIN_GRADE)
            matched = (round_to_lattice(values, one, None, lattice, gain) for one in (None, zeros))
            assert same(*matched)


def test_values_end_within_half_a_step():
    values, lattice = normal((4000,), 1), lattice_of(2.0**-18, 100)
    rounded = round_to_lattice(values, torch.zeros(4000, dtype=torch.int32), None, lattice)
    zeros = torch.zeros(4000, dtype=torch.int32)
    large = large_changes(rounded.tokens, zeros, rounded.integers, None, lattice.spacing)
    decoded = scale_integers(advance(rounded.tokens, large, None, None, lattice).integers, lattice.unit)
    assert float((decoded - values).abs().max()) <= 0.5001 * 100 * 2.0**-18


def test_history_tells_age_pair_and_sign():
    lattice = lattice_of(1.0, 1)
    state, history = torch.zeros(1, dtype=torch.int32), None
    seen = []
    for target in (0, 3, 3, 3, 5, 4, *[4] * 9):
        rounded = round_to_lattice(torch.tensor([float(target)]), state, history, lattice)
        state, history = rounded.integers, rounded.history
        seen.append(int(history[0]))
    # none; first change; two frames without; same sign; other sign and negative; ageing to the oldest
    assert seen[:6] == [0, 1, 4, 7, 2, 32 + 3]
    assert seen[-1] == 32 + 3 + 3 * 7


def test_a_change_is_coded_times_the_sign_of_the_last_one():
    lattice = lattice_of(1.0, 1)
    for sign in (1.0, -1.0):
        first = round_to_lattice(torch.tensor([sign]), torch.zeros(1, dtype=torch.int32), None, lattice)
        second = round_to_lattice(torch.tensor([3 * sign]), first.integers, first.history, lattice)
        assert int(second.tokens[0]) == 4
        assert int(first.history[0]) & CONTEXT_BITS == 1


def test_large_changes_take_a_token_of_their_first_three_bits():
    lattice = lattice_of(1.0, 1)
    values = torch.tensor([63.0, 64.0, 80.0, 1e6])
    rounded = round_to_lattice(values, torch.zeros(4, dtype=torch.int32), None, lattice)
    # z = 126, 128, 160 and 2e6 = 1.907 * 2**20: tokens 126, 128 + 0, 128 + 1, 128 + 4 * 13 + 3
    assert rounded.tokens.tolist() == [126, 128, 129, 183]
    assert (rounded.n_large, rounded.n_exact) == (3, 0)
    # 5, 5 and 18 extra bits
    assert len(pack_extra(np.array([128, 160, 2_000_000]))) == 4


def test_matched_gain_keeps_the_movement_and_sends_only_the_largest():
    n = 40_000
    lattice = lattice_of(2.0**-18, 512)  # a spacing of .00195
    before = torch.randint(-40, 40, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)) * 512
    base = before.float() * 2.0**-18
    movement = normal((n,), 2, scale=0.0007)
    grade = gain_grade(base + movement, base, before, lattice)
    assert MIN_GRADE < grade < MAX_GRADE
    matched = round_to_lattice(base + movement, before, None, lattice, Gain(base, grade))
    plain = round_to_lattice(base + movement, before, None, lattice)

    def gain(rounded) -> float:
        kept = (rounded.integers - before).float() * 2.0**-18
        return float((kept * movement).sum() / (movement * movement).sum())

    assert gain(matched) == pytest.approx(1.0, abs=0.01)
    assert gain(plain) < 0.9


def test_a_movement_that_plain_rounding_resolves_needs_no_threshold():
    base = torch.zeros(1000)
    before = torch.zeros(1000, dtype=torch.int32)
    values = torch.full((1000,), 3.0)
    assert gain_grade(values, base, before, lattice_of(1.0, 1)) == 0


def test_a_step_too_coarse_for_the_movement_is_reported():
    base, before = torch.zeros(1000), torch.zeros(1000, dtype=torch.int32)
    lattice = lattice_of(1.0, 1)
    assert gain_grade(normal((1000,), 1, scale=0.03), base, before, lattice) < 0
    assert gain_grade(normal((1000,), 1, scale=0.08), base, before, lattice) > 0


def test_extra_bits_of_many_large_changes_come_back():
    z = torch.from_numpy(np.random.default_rng(2).integers(128, 1 << 26, 70000))
    place = torch.log2(z.double()).floor().long()
    tokens = (FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2)) & 3)).to(torch.uint8)
    extra = pack_extra(z.numpy())
    assert np.array_equal(unpack_extra(tokens, extra), z.numpy())
    assert unpack_extra(tokens, extra[:-1]) is None
    assert unpack_extra(tokens, extra + b"\0") is None
