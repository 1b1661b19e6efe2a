"""Changes of floats: the kernels equal the reference, and changes are undone, whatever the words."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.changes import N_PLACES, ChangeRule, apply_changes, find_changes, find_contexts
from tests.strategies import random_bits

RULES = {"int16": ChangeRule(7, 125), "int32": ChangeRule(23, 125)}


def frames(dtype, n):
    """Return three rows of words: anything, a little more, and anything in part."""
    first, last = random_bits(dtype, (n,), 1), random_bits(dtype, (n,), 2)
    second = first + (torch.arange(n) % 41 - 20).clamp(-9, 17).to(first.dtype)
    third = torch.where(torch.arange(n) % 5 == 0, last, second)
    return first, second, third


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("n", [0, 1, 15, 1023, 1025, 5000])
def test_changes_agree_between_back_ends_and_are_undone(dtype, n):
    rule, history = RULES[dtype], None
    words = frames(dtype, n)
    for before, now in pairwise(words):
        fast = find_changes(now, before, history, rule)
        undone = apply_changes(fast.tokens, fast.extra, before, history, rule)
        with force_backend(Backend.REFERENCE):
            plain = find_changes(now, before, history, rule)
            undone_plainly = apply_changes(fast.tokens, fast.extra, before, history, rule)
        assert all(np.array_equal(one, other) for one, other in zip(fast, plain, strict=True))
        for values, after, intact in (undone, undone_plainly):
            assert intact
            assert torch.equal(values, now)
            assert torch.equal(after, fast.history)
        history = fast.history


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("n", [0, 1, 1025])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int16])
def test_contexts_agree_between_back_ends(dtype, n, kind):
    before, now, _ = frames(dtype, n)
    history = find_changes(now, before, None, RULES[dtype]).history
    mapping = torch.arange(N_PLACES).to(kind)
    for known in (None, history):
        contexts = find_contexts(now, known, mapping, RULES[dtype])
        assert contexts.dtype == kind
        with force_backend(Backend.REFERENCE):
            assert torch.equal(find_contexts(now, known, mapping, RULES[dtype]), contexts)


@pytest.mark.parametrize("backend", [Backend.CPU, Backend.REFERENCE])
@pytest.mark.parametrize("dtype", RULES)
def test_extra_bits_that_do_not_fit_are_noticed(dtype, backend):
    before, _, now = frames(dtype, 3000)
    tokens, _, extra = find_changes(now, before, None, RULES[dtype])
    unused = np.append(extra, np.uint32(0))
    padded = extra.copy()
    padded[-1] |= np.uint32(1 << 31)
    with force_backend(backend):
        for wrong in (extra[:-1], extra[:0], unused, np.append(extra, np.uint32(5))):
            assert not apply_changes(tokens, wrong, before, None, RULES[dtype])[2]
        assert apply_changes(tokens, extra, before, None, RULES[dtype])[2]


def test_a_history_says_how_large_how_old_and_of_what_sign_a_change_is():
    rule = RULES["int16"]
    before = torch.zeros(4, dtype=torch.int16)
    now = torch.tensor([0, 1, -6, 100], dtype=torch.int16)
    # Of -6 the ordered integer is flipped: not of interest here, so a positive word is taken down.
    before[2], now[2] = 20, 14
    tokens, history, extra = find_changes(now, before, None, rule)
    # z: 0, 2, 11, 200. 200 is 11001000 in binary: k = 7, the two bits below the highest 10, 5 bits extra.
    assert tokens.tolist() == [0, 2, 11, 4 * 7 + 2]
    assert extra.tolist() == [200 & 31]
    assert history.tolist() == [0, 1, 64 + 3, 7]
    _, aged, _ = find_changes(now, now, history, rule)
    assert aged.tolist() == [0, 16 + 1, 16 + 64 + 3, 16 + 7]
    again, _, _ = find_changes(before, now, history, rule)
    # The change of 6 goes the other way now, turned by the sign of the last one: -6, so z is 11.
    assert again.tolist()[2] == 11
