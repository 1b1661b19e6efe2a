"""Changes and byte planes of floats are undone, and sums are exact, the same on every back end."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.ops.cpu.changes import N_PLACES, apply_changes, find_changes, find_contexts
from inshrink_core.ops.cpu.distance import SLICE, squared_distance
from inshrink_core.ops.cpu.planes import Transform, merge_planes, split_planes
from inshrink_core.ops.sample import sample, sample_sums
from tests.strategies import normal, random_bits

RULES = {"int16": (7, 125), "int32": (23, 125)}


def frames(dtype, n):
    """Return three rows of words: anything, a little more, and anything in part."""
    first, last = random_bits(dtype, (n,), 1), random_bits(dtype, (n,), 2)
    second = first + (torch.arange(n) % 41 - 20).clamp(-9, 17).to(first.dtype)
    third = torch.where(torch.arange(n) % 5 == 0, last, second)
    return first, second, third


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("n", [0, 1, 15, 1023, 1025, 5000])
def test_changes_are_undone_and_contexts_are_those_of_history_and_exponent(dtype, n):
    (mantissa, top), context_state = RULES[dtype], None
    for before, now in pairwise(frames(dtype, n)):
        tokens, after, extra = find_changes(now, before, context_state)
        values, again, intact = apply_changes(tokens, extra, before, context_state)
        assert intact
        assert torch.equal(values, now)
        assert torch.equal(again, after)
        exponent = (before.long() >> mantissa) & 255
        age_and_octave = (
            torch.zeros(n, dtype=torch.int64) if context_state is None else context_state.long() & 63
        )
        places = 16 * age_and_octave + (top - exponent).clamp(0, 15)
        for kind in (torch.uint8, torch.int16):
            mapping = torch.arange(N_PLACES).to(kind)
            assert torch.equal(find_contexts(before, context_state, mapping, mantissa, top), mapping[places])
        context_state = after


@pytest.mark.parametrize("dtype", RULES)
def test_extra_bits_that_do_not_fit_are_noticed(dtype):
    before, _, now = frames(dtype, 3000)
    tokens, _, extra = find_changes(now, before, None)
    padded = extra.copy()
    padded[-1] |= np.uint32(1 << 31)
    for wrong in (extra[:-1], extra[:0], np.append(extra, np.uint32(0)), np.append(extra, np.uint32(5))):
        assert not apply_changes(tokens, wrong, before, None)[2]
    assert apply_changes(tokens, extra, before, None)[2]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_a_history_says_how_large_how_old_and_of_what_sign_a_change_is(dtype):
    # -1 and 0 as words of floats: the ordered integer of -1 has all bits but the sign flipped.
    before, now = torch.tensor([0, 0, 20, 0, -1], dtype=dtype), torch.tensor([0, 1, 14, 100, -3], dtype=dtype)
    tokens, context_state, extra = find_changes(now, before, None)
    # z: 0, 2, 11, 200, 4. 200 is 11001000 in binary: k = 7, two bits below the highest 10, 5 bits extra.
    assert tokens.tolist() == [0, 2, 11, 4 * 7 + 2, 4]
    assert extra.tolist() == [200 & 31]
    assert context_state.tolist() == [0, 1, 64 + 3, 7, 2]
    _, aged, _ = find_changes(now, now, context_state)
    assert aged.tolist() == [0, 16 + 1, 16 + 64 + 3, 16 + 7, 16 + 2]
    again, _, _ = find_changes(before, now, context_state)
    # The change of 6 goes the other way now, turned by the sign of the last one: -6, so z is 11.
    assert again.tolist()[2] == 11


def zigzag(words):
    return (words << 1) ^ -(words < 0).to(words.dtype)


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_planes_are_the_bytes_of_transformed_words_and_come_back(dtype, transform, n):
    words, reference = random_bits(dtype, (n,), 1), random_bits(dtype, (n,), 2)
    planes = split_planes(words, reference, transform)
    assert planes.shape == (words.element_size(), n)
    joined = planes.T.reshape(-1).view(words.dtype)
    signed = words.view(torch.int8) if dtype == "uint8" else words
    other = reference.view(torch.int8) if dtype == "uint8" else reference
    expected = {
        Transform.NONE: signed,
        Transform.ZIGZAG: zigzag(signed),
        Transform.ROTATE: (signed << 1) | (signed < 0).to(signed.dtype),
        Transform.DELTA: zigzag(signed - other),
    }.get(transform)
    assert expected is None or torch.equal(joined, expected.view(joined.dtype))
    found = torch.empty_like(words)
    merge_planes(planes, reference, transform, found)
    assert torch.equal(found, words)


def test_ordered_integers_keep_the_order_of_floats():
    # One unit in the last place apart, on both sides of zero: deltas of 1, zigzag 2 (or 1 downwards).
    values = torch.tensor([-1.0, -1e-45, 0.0, 1e-45, 1.0, float("inf")])
    above = torch.nextafter(values, torch.tensor(float("inf")))
    planes = split_planes(above.view(torch.int32), values.view(torch.int32), Transform.ORDERED_DELTA)
    # -1e-45 to -0.0 is one unit as well; 0.0 is two integers above -1e-45.
    assert planes[0].tolist() == [2, 2, 2, 2, 2, 0]
    assert not planes[1:].any()


@pytest.mark.parametrize("n", [0, 1, 3000, 16384, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["nothing", "integers", "second", "both"])
def test_sums_are_those_of_mantissas_by_exponent(n, dtype, given):
    values = (normal((n,), 4) * 10.0 ** torch.arange(n).remainder(9).sub(4)).to(dtype)
    values[:2] = torch.inf
    integers = torch.arange(n, dtype=torch.int32) - n // 2 if given in ("integers", "both") else None
    second = normal((n,), 5).square() if given in ("second", "both") else None
    sums = sample_sums(values.view(1, n), integers, second, 2.0**-9)
    w = sample(values).float()
    away = torch.zeros(0) if integers is None else w - sample(integers).float() * 2.0**-9
    m = torch.zeros(0) if second is None else sample(second)
    for row, terms in zip(sums, (w * w, away * away, m), strict=True):
        bits = terms.view(torch.int32).long()
        exponent = bits >> 23
        mantissa = (bits & 0x7FFFFF) + torch.where(exponent > 0, 1 << 23, 0)
        expected = torch.zeros(257, dtype=torch.int64).scatter_add_(0, exponent, mantissa)
        expected[256] = (exponent == 255).sum()
        assert row.tolist() == expected.tolist()


def test_tensors_of_different_lengths_are_an_input_error():
    with pytest.raises(InputError):
        sample_sums(torch.zeros(3), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, SLICE + 3])
def test_sums_are_those_of_running_sums_also_for_points_of_a_lattice(n):
    values, integers = normal((n,), 1) * 1e3, (normal((n,), 2) * 2.0**7).round().to(torch.int32)
    decoded = integers.float() * 2.0**-7
    found = squared_distance(values, integers, 2.0**-7)
    assert found == squared_distance(values, decoded)
    for total, terms in zip(found, (values - decoded, values), strict=True):
        expected = 0.0
        for part in terms.double().square().split(SLICE):
            padded = torch.nn.functional.pad(part, (0, -part.numel() % 16))
            expected += sum(padded.view(-1, 16).cumsum(0)[-1:].flatten().tolist())
        assert total == expected


def test_values_that_are_not_finite_count_for_nothing():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, largest, 3.0, 4.0])
    decoded = torch.tensor([0.5, 0.0, math.inf, 0.0, -largest, math.nan, 2.0])
    error, norm = squared_distance(values, decoded)
    assert error == 0.25 + 4.0
    assert norm == 1.0 + float(largest) ** 2 + 9.0 + 16.0
