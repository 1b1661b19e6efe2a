"""The kernels of the moments codec return the bits of their norm, and of numpy's own sums."""

import numpy as np
import pytest

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops import moments as ops
from inshrink_core.ops.moments import Units

SHAPES = [(1, 1), (1, 7), (3, 8), (5, 129), (130, 1), (17, 40), (2, 9001), (1, 20_000), (300, 260)]


def values_of(shape, seed=0):
    """Return normal values over many octaves, some zeros of either sign and some subnormal numbers."""
    generator = np.random.default_rng(seed)
    n = shape[0] * shape[1]
    values = generator.standard_normal(n) * np.exp2(generator.uniform(-12, 12, n))
    values[::11] = 0.0
    values[5::13] = -0.0
    values[3::17] = 1e-40
    return values.astype(np.float32)


def units_of(shape, seed=0):
    generator = np.random.default_rng(seed)
    rows, columns = generator.integers(-9, 9, shape[0]), generator.integers(-5, 5, shape[1])
    rows[::5] = -(1 << 20)
    return Units(rows, columns)


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
    one, other = np.asarray(one), np.asarray(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("special", [None, np.nan, -np.nan, np.inf, -np.inf, -1.0, 1.0, -0.0])
def test_kinds_of_values_are_told_apart(special):
    values = np.zeros(100, np.float32)
    if special is not None:
        values[37] = special
    found, expected = both(lambda: ops.kinds_of(values))
    assert found == expected


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3.0, -1e-42, np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -2.0])
def test_second_moments_cover_values_alike(special, value):
    squares, values = np.ones(50, np.float32), np.ones(50, np.float32)
    squares[7], values[7] = special, value
    found, expected = both(lambda: ops.squares_cover(squares, values))
    assert found == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("squared", [False, True])
def test_sums_are_added_in_the_order_of_numpy(shape, squared):
    values = values_of(shape)
    assert_same_bits(*both(lambda: ops.sum_sides(values, shape[0], squared)))


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
    values, units = np.abs(values_of(shape)), units_of(shape)
    before = np.random.default_rng(1).integers(0, 256, values.size).astype(np.uint8)
    first, expected = both(lambda: ops.round_to_octaves(values, units, None, held))
    assert_same_bits(first, expected)
    assert_same_bits(*both(lambda: ops.round_to_octaves(values, units, before, held)))
    near = np.clip(first.astype(int) + before % 5 - 2, 0, 255).astype(np.uint8)
    assert_same_bits(*both(lambda: ops.round_to_octaves(values, units, near, held)))


def test_powers_of_two_and_of_its_root_are_rounded_alike_against_every_unit():
    powers = np.exp2(np.arange(-149.0, 128.0)).astype(np.float32)
    roots = np.exp2(np.arange(-126.5, 127.5)).astype(np.float32)
    edges = np.concatenate((powers, roots))
    values = np.concatenate((np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(9e9))))
    units = Units(np.arange(-9, 9), np.zeros(values.size, np.int64))
    lines = np.tile(values, 18)
    first, expected = both(lambda: ops.round_to_octaves(lines, units, None, 1.0))
    assert_same_bits(first, expected)
    for shift in (-2, -1, 0, 1, 2):
        near = np.clip(first.astype(int) + shift, 0, 255).astype(np.uint8)
        assert_same_bits(*both(lambda near=near: ops.round_to_octaves(lines, units, near, 1.0)))


@pytest.mark.parametrize("base", [-1024, -201, 0, 1024])
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (40, 257)])
def test_codes_decode_to_the_same_bits(shape, base):
    generator = np.random.default_rng(0)
    rows, columns = (generator.integers(0, 256, n).astype(np.uint8) for n in shape)
    rows[::4] = 0
    elements = generator.integers(0, 256, shape[0] * shape[1]).astype(np.uint8)
    elements[::3] = 0
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, None, base, False)))
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, elements, base, False)))
    assert_same_bits(*both(lambda: ops.expand_units(rows, columns, elements, base, True)))
