"""The kernels of the lattice codec equal their plain-torch twins, bit for bit."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inshrink_core.codec import TensorInput
from inshrink_core.codecs.inshrinkerator.codec import InshrinkeratorCodec
from inshrink_core.codecs.lattice.step_size import StepSize, lattice_of
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.lattice import pack_extra, unpack_extra
from inshrink_core.ops.lattice import (
    EXACT,
    FIRST_LARGE,
    MAX_GRADE,
    MIN_GRADE,
    N_CONTEXTS,
    N_TOKENS,
    Lattice,
    advance,
    large_changes,
    matched_changes,
    round_to_lattice,
)
from inshrink_core.testing.codecs import state_bits
from tests.codecs.lattice_chains import moving
from tests.ops.interpreted import kernels
from tests.strategies import normal, spec_of

SIZES = [1, 2, 127, 2050]
NO_LARGE = np.zeros(0, np.int64)


def bits_of(tensor):
    return tensor.cpu().view(torch.int32) if tensor.dtype == torch.float32 else tensor.cpu()


def same(first, second):
    """Whether two results are equal in every bit, wherever their tensors are."""
    return all(
        a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def state_of(n, seed, spread=3000):
    """Integers and a history of every kind."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-spread, spread, (n,), dtype=torch.int32, generator=generator)
    context = torch.randint(0, N_CONTEXTS, (n,), dtype=torch.uint8, generator=generator)
    negative = torch.randint(0, 2, (n,), dtype=torch.uint8, generator=generator)
    return integers, context + 32 * negative * (context > 0)


def with_edges(values):
    """Put floats that are no plain numbers where there is room."""
    edges = torch.tensor(
        [float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, -1e-40, 3e38, -3e38, 2.0**-126, 127.5]
    )
    values[: edges.numel()] = edges[: values.numel()]
    return values


def agree(device, values, integers, context_state, lattice, changes=None):
    """Fail unless rounding and its inverse are those of the reference; return what rounding gave."""
    with force_backend(Backend.REFERENCE):
        expected = round_to_lattice(values, integers, context_state, lattice, changes)
    with kernels():
        found = round_to_lattice(values.to(device), integers, context_state, lattice, changes)
    assert same(found, expected)
    assert all(part.device.type == "cpu" for part in found if isinstance(part, torch.Tensor))
    z = large_changes(expected.tokens, integers, expected.integers, context_state, lattice.step_size)
    assert np.array_equal(unpack_extra(expected.tokens, pack_extra(z)), z)
    with force_backend(Backend.REFERENCE):
        again = large_changes(expected.tokens, integers, expected.integers, context_state, lattice.step_size)
        back = advance(expected.tokens, z, integers, context_state, lattice)
    with kernels():
        there = [None if part is None else part.to(device) for part in (integers, context_state)]
        onward = round_to_lattice(values.to(device), *there, lattice, changes)
        moved = advance(expected.tokens.to(device), z, *there, lattice)
    assert same(onward, expected)
    assert onward.tokens.device.type == torch.device(device).type or integers is None
    assert moved is not None
    assert same(moved, back)
    assert np.array_equal(again, z)
    assert torch.equal(moved[0].cpu(), expected.integers)
    assert torch.equal(moved[1].cpu(), expected.context_state)
    assert moved[0].device.type == torch.device(device).type
    return found


def check_plain_rounding(device):
    for n in SIZES:
        for dtype, tracked in (("float32", True), ("bfloat16", False), ("float16", True)):
            values = with_edges(normal((n,), n)).to(getattr(torch, dtype)).float()
            integers, context_state = state_of(n, n)
            agree(
                device,
                values,
                integers,
                context_state if tracked else None,
                lattice_of(StepSize(-17, 128), dtype),
            )


def check_steps_from_the_finest_to_the_coarsest(device):
    values = with_edges(normal((1000,), 1))
    integers, context_state = state_of(1000, 2)
    for step_size, scale in ((1, 1.0), (1, 30.0), (3, 1.0), (20000, 1.0), (1 << 24, 1e3)):
        lattice = Lattice(2.0**-17, step_size, float(np.float32(2.0**17 / step_size)), 2**24 - 1)
        agree(device, values * scale, integers, context_state, lattice)


def check_ties_go_to_the_even_integer(device):
    halves = torch.arange(-300, 300) * 0.5
    values = torch.cat((halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)))
    near_largest = torch.tensor([2.0**22 + 0.5, 2.0**22 + 1.5, 2.0**23 - 0.5, -(2.0**23) + 0.5, 2.0**24 - 1])
    values = torch.cat((values, near_largest))
    zeros = torch.zeros(values.numel(), dtype=torch.int32)
    rounded = agree(device, values, zeros, None, Lattice(1.0, 1, 1.0, 2**24 - 1))
    assert torch.equal(rounded.integers, values.round().int())


def check_subnormal_lattices(device):
    # The smallest unit of the format: values and their distances are subnormal float32 numbers.
    step_size = StepSize(-126, 4)
    values = torch.arange(-999, 999).float() * 2.0**-126 * 0.37
    integers = torch.arange(-999, 999, dtype=torch.int32) // 3
    agree(device, values, integers, None, lattice_of(step_size, "float32"))
    values = torch.arange(-999, 999).float() * 2.0**-140
    agree(device, values, integers * 0, None, Lattice(2.0**-126, 1, 2.0**126, 2**24 - 1))


def check_what_cannot_be_reached_is_exact(device):
    values = torch.tensor([float("nan"), float("inf"), 2.0**24, 2.0**24 - 1, 1e38, -(2.0**24) + 1, 0.0])
    context_state = torch.full((7,), 33, dtype=torch.uint8)
    rounded = agree(
        device, values, torch.zeros(7, dtype=torch.int32), context_state, Lattice(1.0, 1, 1.0, 2**24 - 1)
    )
    assert (rounded.tokens == EXACT).tolist() == [True, True, True, False, True, False, False]
    assert rounded.n_exact == 4


def check_every_size_of_a_change_has_its_token(device):
    # Beside every power of two and every quarter of an octave up to the largest change there is.
    edges = torch.tensor([(4 + quarter) << k for k in range(22) for quarter in range(4)], dtype=torch.int32)
    moves = torch.cat([sign * (edges + offset) for sign in (1, -1) for offset in (-1, 0, 1)])
    moves = moves[moves.abs() < 2**24]
    _, context_state = state_of(moves.numel(), 3)
    rounded = agree(
        device, moves.float(), torch.zeros_like(moves), context_state, Lattice(1.0, 1, 1.0, 2**24 - 1)
    )
    assert rounded.n_exact == 0
    assert torch.equal(rounded.integers, moves)


def check_matched_gain(device):
    lattice = Lattice(2.0**-17, 128, float(np.float32(2.0**10)), 2**24 - 1)
    for n in (1, 360, 3000):
        integers, context_state = state_of(n, n)
        base = integers.float() * 2.0**-17 + normal((n,), 4, 0.0001)
        values = base + normal((n,), 5, 0.0005)
        values[n // 2], base[n // 3] = float("nan"), 1e30
        for grade in (0, MIN_GRADE, 1000, MAX_GRADE, 1363):
            changes = matched_changes(values, integers, lattice, base, grade)
            agree(device, values, integers, context_state, lattice, changes)
            agree(device, values, integers, None, lattice, changes)


def check_a_state_that_leaves_its_bound_is_not_valid(device):
    tokens = torch.tensor([0] * 1500 + [126], dtype=torch.uint8, device=device)
    large = torch.tensor([FIRST_LARGE, 3, 227], dtype=torch.uint8, device=device)
    coarse, fine = Lattice(1.0, 1 << 20, 2.0**-20, 2**24 - 1), Lattice(1.0, 1, 1.0, 2**24 - 1)
    with kernels():
        assert advance(tokens, NO_LARGE, None, None, coarse) is None
        assert advance(tokens, NO_LARGE, None, None, fine) is not None
        assert advance(large, np.array([128, 1 << 20]), None, None, fine) is not None
        assert advance(large, np.array([128, (1 << 32) - 1]), None, None, fine) is None


def check_tokens_of_every_kind_in_several_blocks(device):
    generator = torch.Generator().manual_seed(1)
    n, seen = 2500, set()
    integers, context_state = state_of(n, 10)
    for highest, step_size in ((FIRST_LARGE, 3), (FIRST_LARGE + 40, 1), (N_TOKENS, 1), (N_TOKENS, 1 << 24)):
        tokens = torch.randint(0, highest, (n,), dtype=torch.uint8, generator=generator)
        tokens[::7] = EXACT
        lattice = Lattice(1.0, step_size, 1.0 / step_size, 2**24 - 1)
        z = np.random.default_rng(step_size).integers(0, 1 << 25, int((tokens >= FIRST_LARGE).sum()))
        large = z[: int(((tokens >= FIRST_LARGE) & (tokens != EXACT)).sum())]
        for state in ((None, None), (integers, None), (integers, context_state)):
            with force_backend(Backend.REFERENCE):
                expected = advance(tokens, large, *state, lattice)
            with kernels():
                there = [None if part is None else part.to(device) for part in state]
                found = advance(tokens.to(device), large, *there, lattice)
            assert (found is None) == (expected is None)
            assert expected is None or same(found, expected)
            seen.add((found is not None, large.size > 0))
    assert seen == {(True, False), (True, True), (False, True)}


def check_a_state_at_its_bound_may_not_move_on(device):
    bound = 2**24 - 1
    integers = torch.tensor([bound, -bound], dtype=torch.int32)
    context_state = torch.tensor([0, 33], dtype=torch.uint8)  # the second one's sign is turned
    for z, valid in (((1, 1), True), ((2, 1), False), ((1, 2), False)):
        tokens = torch.tensor(z, dtype=torch.uint8)
        with kernels():
            there = [part.to(device) for part in (integers, context_state)]
            found = advance(tokens.to(device), NO_LARGE, *there, Lattice(1.0, 1, 1.0, bound))
        assert (found is not None) == valid
        assert not valid or found[0].tolist() == [bound - 1, 1 - bound]


def check_large_tokens_without_their_bits_are_not_valid(device):
    tokens = torch.full((1100,), FIRST_LARGE, dtype=torch.uint8, device=device)
    with kernels():
        for n_known in (0, 1, 1099):
            large = np.full(n_known, 128, np.int64)
            assert advance(tokens, large, None, None, Lattice(1.0, 1, 1.0, 2**24 - 1)) is None


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    exponent=st.integers(-126, 20),
    step_size=st.integers(1, 2**24),
    seed=st.integers(0, 1000),
    gained=st.booleans(),
)
def any_bits_round_alike(device, words, exponent, step_size, seed, gained):
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    integers, context_state = state_of(len(words), seed, spread=2**24)
    lattice = lattice_of(StepSize(exponent, step_size), "float32")
    changes = matched_changes(values, integers, lattice, values.flip(0), 700) if gained else None
    agree(device, values, integers, context_state, lattice, changes)


def check_any_bits(device):
    any_bits_round_alike(device)


def check_a_chain_of_symbols_decodes_alike(device):
    codec, tensors = InshrinkeratorCodec(bins=8, protect=0.05), moving(2, (5, 14), 1e-2)
    spec, reference, decoded = spec_of(tensors[0], "layer.weight"), None, None
    for tensor in tensors:
        item = TensorInput(spec=spec, tensor=tensor)
        plan = codec.plan([spec], [codec.observe(item, reference)])
        block, reference = codec.encode(item, plan, reference)
        with kernels():
            decoded = codec.decode(spec, block, decoded, device)
            values = decoded.decoded()
        assert values.device.type == device
        assert torch.equal(bits_of(values), bits_of(reference.decoded()))
        assert state_bits(decoded) == state_bits(reference)
    assert bytes(codec.rekey(spec, decoded).payload) == bytes(codec.rekey(spec, reference).payload)
