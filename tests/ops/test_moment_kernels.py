"""The kernels of the moments codec return the bits of their norm."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops import moments as ops
from inshrink_core.ops.moments import Units

SHAPES = [(1, 1), (1, 7), (3, 8), (5, 129), (130, 1), (17, 40), (2, 9001), (300, 260)]


def values_of(shape, seed=0):
    """Return normal values over many octaves, some zeros of either sign and some subnormal numbers."""
    generator = np.random.default_rng(seed)
    n = shape[0] * shape[1]
    values = generator.standard_normal(n) * np.exp2(generator.uniform(-12, 12, n))
    values[::11] = 0.0
    values[5::13] = -0.0
    values[3::17] = 1e-40
    return torch.from_numpy(values.astype(np.float32))


def units_of(shape, seed=0):
    generator = np.random.default_rng(seed)
    rows, columns = generator.integers(-9, 9, shape[0]), generator.integers(-5, 5, shape[1])
    rows[::5] = -(1 << 20)
    return Units(rows, columns)


def codes_of(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


def both(call):
    """Return what the kernel makes and what the norm makes."""
    found = call()
    with force_backend(Backend.REFERENCE):
        return found, call()


def assert_same_bits(found, expected):
    if found is None or expected is None:
        assert found is expected
        return
    if isinstance(found, tuple):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same_bits(mine, theirs)
        return
    found, expected = np.asarray(found), np.asarray(expected)  # of tensors too
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


SPECIAL = [None, np.nan, -np.nan, np.inf, -np.inf, -1.0, 1.0, -0.0, -1e-42]


@pytest.mark.parametrize("special", SPECIAL)
def test_values_that_will_not_do_are_refused(special):
    values = torch.zeros(100)
    values[12] = 2.0
    if special is not None:
        values[37] = special
    is_finite = special is None or math.isfinite(special)
    for call, refused in (
        (lambda: ops.round_first(values, None, 10, 2.0, None), not is_finite),
        (lambda: ops.round_first(values, None, 10, 0.0, None), not is_finite),
        (lambda: ops.round_second(values, 10, None, 1.0), special not in (None, 1.0, -0.0)),
        (lambda: ops.round_vector(values, None), special not in (None, 1.0, -0.0)),
    ):
        found, expected = both(call)
        assert (found is None, expected is None) == (refused, refused)
        if not refused:
            assert_same_bits(found, expected)


@pytest.mark.parametrize("square", [0.0, -0.0, 1e-42, 3.0, -1e-42, np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -2.0])
def test_second_moments_that_do_not_cover_a_value_give_no_units(square, value):
    values = values_of((5, 10))
    squares = values.square() + 1e-12
    squares[7], values[7] = square, value
    found, expected = both(lambda: ops.round_first(values, squares, 5, 2.0, 0.3))
    assert_same_bits(found, expected)
    with force_backend(Backend.REFERENCE):
        fits = ops.squares_cover(squares, values)
    alone = ops.round_first(values, None, 5, 2.0, None)
    assert (found.columns.unique().numel() > 1) == fits
    assert fits or found.rows.tolist() == alone.rows.tolist()


def test_zeros_of_either_sign_add_up_to_zero():
    for zero in (0.0, -0.0):
        assert not np.signbit(ops.sum_sides(torch.full((600,), zero), 300, False)[0]).any()
        values = torch.full((600,), zero)
        for call in (
            lambda values=values: ops.round_first(values, None, 300, 2.0, None),
            lambda values=values: ops.round_second(values, 300, None, 1.0),
            lambda values=values: ops.round_vector(values, None),
        ):
            found, expected = both(call)
            assert_same_bits(found, expected)
            assert not found.elements.any()


@pytest.mark.parametrize("unit", [0.01, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_first_moments_are_rounded_to_the_same_bits(shape, unit):
    values, rows = values_of(shape), torch.ones(shape)
    rows[::3] = 0.0
    for given in (values, values_of(shape, 1) * 1e-30, values * rows.view(-1)):
        for second in (None, given.square() + 1e-12, values_of(shape, 2).square() + 1e-30):
            for most in (None, 0.7) if values.numel() > 10_000 else (None, 1e-3, 0.7, 1e9):
                assert_same_bits(*both(partial(ops.round_first, given, second, shape[0], unit, most)))


@pytest.mark.parametrize("tolerance", [None, 0.5, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_second_moments_are_rounded_to_the_same_bits(shape, tolerance):
    values = values_of(shape).abs()
    first, expected = both(lambda: ops.round_second(values, shape[0], None, tolerance))
    assert_same_bits(first, expected)
    for growth in (1.0, 1.1, 1.3, 3.0, 1e9):
        later = values * growth * torch.exp2(codes_of(values.numel(), 1).float() % 7 / 4)
        assert_same_bits(*both(lambda later=later: ops.round_second(later, shape[0], first, tolerance)))


@pytest.mark.parametrize("growth", [1e-3, 1.0, 1.01, 3.0, 1e9])
@pytest.mark.parametrize("shape", SHAPES)
def test_octaves_are_carried_and_drawn_to_the_same_bits(shape, growth):
    n = shape[0] * shape[1]
    values, units = values_of(shape).abs() * growth, units_of(shape)
    near = ops.round_log2(values / growth, units, None, 0.5)
    for before in (codes_of(n, 3), near):
        assert_same_bits(*both(partial(ops.carry_log2, values, units, before, codes_of(n, 4))))
    for draw in (1, 255):
        assert_same_bits(*both(partial(ops.dither_log2, values, units, draw)))
    units = Units(np.array([3]), np.zeros(edges().numel(), np.int64))
    assert_same_bits(*both(partial(ops.dither_log2, edges(), units, 9)))


@pytest.mark.parametrize("before", [None, -260, -40, 7, 400])
def test_vectors_are_rounded_to_the_same_powers(before):
    for values in (values_of((1, 300)).abs(), edges()):
        assert_same_bits(*both(lambda values=values: ops.round_vector(values, before)))


def edges():
    """Return powers of two and of its root, and the numbers next to them."""
    powers = np.exp2(np.arange(-149.0, 128.0)).astype(np.float32)
    roots = np.exp2(np.arange(-126.5, 127.5)).astype(np.float32)
    on = np.concatenate((powers, roots))
    return torch.from_numpy(
        np.concatenate((np.nextafter(on, np.float32(0)), on, np.nextafter(on, np.float32(9e9))))
    )


def test_powers_of_two_and_of_its_root_are_rounded_alike_against_every_unit():
    values = edges()
    values = values[values < 2.0**100]
    # The first column sets the means of rows, half octaves apart, and by them their units.
    lines = torch.cat((torch.exp2(torch.arange(240, 249) / 2)[:, None], values.expand(9, -1)), 1)
    lines = lines.reshape(-1).contiguous()
    first, expected = both(lambda: ops.round_second(lines, 9, None, 1.0))
    assert_same_bits(first, expected)
    assert set((first.rows.int() + first.columns[1]).remainder(2).tolist()) == {0, 1}
    for shift in (-2, -1, 0, 1, 2):
        near = (first.elements.int() + shift).clamp(0, 255).to(torch.uint8)
        before = first._replace(elements=near)
        assert_same_bits(*both(lambda before=before: ops.round_second(lines, 9, before, 1.0)))


@pytest.mark.parametrize("eighth", range(9))
def test_factors_on_the_edges_of_their_codes_are_held_alike(eighth):
    """Means of rows are a multiple of an eighth of an octave from the codes before, or next to one."""
    first = ops.round_second(torch.full((4 * 16,), 1.0), 4, None, 1.0)
    scale = np.float32(2.0 ** (eighth / 8))
    for value in (np.nextafter(scale, np.float32(0)), scale, np.nextafter(scale, np.float32(9))):
        rows = torch.tensor([1.0, float(value), 1.0 / float(value), 0.0]).repeat_interleave(16)
        assert_same_bits(*both(lambda rows=rows: ops.round_second(rows, 4, first, 1.0)))
