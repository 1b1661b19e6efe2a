"""The kernels of the moments codec return the bits of their norm."""

import math

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


def assert_same_bits(one, other):
    if isinstance(one, tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_bits(mine, theirs)
        return
    one, other = np.asarray(one), np.asarray(other)  # of tensors too
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("special", [None, np.nan, -np.nan, np.inf, -np.inf, -1.0, 1.0, -0.0])
def test_kinds_of_values_are_told_apart(special):
    values = torch.zeros(100)
    if special is not None:
        values[37] = special
    found, expected = both(lambda: ops.kinds_of(values))
    assert found == expected


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3.0, -1e-42, np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -2.0])
def test_second_moments_cover_values_alike(special, value):
    squares, values = torch.ones(50), torch.ones(50)
    squares[7], values[7] = special, value
    found, expected = both(lambda: ops.squares_cover(squares, values))
    assert found == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("squared", [False, True])
def test_sums_are_added_in_the_same_order(shape, squared):
    values = values_of(shape)
    found, expected = both(lambda: ops.sum_sides(values, shape[0], squared))
    assert_same_bits(found, expected)
    exact = values.double().view(shape).square() if squared else values.double().view(shape)
    for row, total in zip(exact.tolist(), found.rows.tolist(), strict=True):
        assert total == pytest.approx(math.fsum(row), rel=1e-12, abs=1e-9)
    assert float(found.columns.sum()) == pytest.approx(float(exact.sum()), rel=1e-12, abs=1e-9)


def test_zeros_of_either_sign_add_up_to_zero():
    for zero in (0.0, -0.0):
        found, expected = both(lambda zero=zero: ops.sum_sides(torch.full((600,), zero), 300, False))
        assert_same_bits(found, expected)
        assert not np.signbit(found.rows).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_first_moments_are_measured_and_rounded_to_the_same_bits(shape):
    values, units = values_of(shape), units_of(shape)
    assert_same_bits(*both(lambda: ops.relative_square(values, units)))
    assert_same_bits(*both(lambda: ops.row_reaches(values, shape[0], units.columns)))
    assert_same_bits(*both(lambda: ops.count_magnitudes(values, units)))
    assert_same_bits(*both(lambda: ops.round_in_units(values, units, 77)))


@pytest.mark.parametrize("held", [0.5, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_second_moments_are_rounded_to_the_same_octaves(shape, held):
    values, units = values_of(shape).abs(), units_of(shape)
    before = codes_of(values.numel(), 1)
    first, expected = both(lambda: ops.round_to_octaves(values, units, None, held))
    assert_same_bits(first, expected)
    assert_same_bits(*both(lambda: ops.round_to_octaves(values, units, before, held)))
    near = (first.int() + before % 5 - 2).clamp(0, 255).to(torch.uint8)
    assert_same_bits(*both(lambda: ops.round_to_octaves(values, units, near, held)))


def test_powers_of_two_and_of_its_root_are_rounded_alike_against_every_unit():
    powers = np.exp2(np.arange(-149.0, 128.0)).astype(np.float32)
    roots = np.exp2(np.arange(-126.5, 127.5)).astype(np.float32)
    edges = np.concatenate((powers, roots))
    values = np.concatenate((np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(9e9))))
    units = Units(np.arange(-9, 9), np.zeros(values.size, np.int64))
    lines = torch.from_numpy(np.tile(values, 18))
    first, expected = both(lambda: ops.round_to_octaves(lines, units, None, 1.0))
    assert_same_bits(first, expected)
    for shift in (-2, -1, 0, 1, 2):
        near = (first.int() + shift).clamp(0, 255).to(torch.uint8)
        assert_same_bits(*both(lambda near=near: ops.round_to_octaves(lines, units, near, 1.0)))


@pytest.mark.parametrize("base", [-1024, -201, 0, 1024])
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (40, 257)])
def test_codes_decode_to_the_same_bits(shape, base):
    rows, columns, elements = map(codes_of, (*shape, shape[0] * shape[1]), range(3))
    rows[::4] = 0
    elements[::3] = 0
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, None, base, False)))
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, elements, base, False)))
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, elements, base, True)))
