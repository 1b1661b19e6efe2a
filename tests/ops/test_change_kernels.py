"""Changes of floats: they are undone, extra bits are exactly enough, and histories follow their rule."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from inshrink_core.ops.cpu.changes import N_PLACES, apply_changes, find_changes, find_contexts
from tests.strategies import random_bits

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
