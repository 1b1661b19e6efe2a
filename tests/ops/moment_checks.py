"""The kernels of the moments codec equal their plain-torch twins, bit for bit."""

import math

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import TensorInput
from inshrink_core.codecs.moments.codec import MomentsCodec
from inshrink_core.ops import Backend, force_backend, moments
from inshrink_core.ops.moments import BAND, LINE, Units
from inshrink_core.testing.codecs import state_bits
from tests.ops.interpreted import kernels
from tests.ops.test_moment_kernels import assert_same_bits, codes_of, units_of, values_of
from tests.strategies import normal

SHAPES = [(1, 1), (3, 8), (BAND + 4, 5), (1, LINE + 17)]
"""Of one program and of several, with rows of several slices and columns of several bands."""


def moved(part, device):
    return part.to(device) if isinstance(part, torch.Tensor) else part


def agree(device, function, *arguments):
    """Fail unless a function returns what its reference does, tensors on the device; return that."""
    with force_backend(Backend.REFERENCE):
        expected = function(*arguments)
    with kernels():
        found = function(*(moved(part, device) for part in arguments))
    if isinstance(found, torch.Tensor):
        assert found.device.type == torch.device(device).type
    assert_same_bits(moved(found, "cpu"), expected)
    return expected


def check_kinds_of_values(device):
    for special in (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, *(math.nan, -math.nan, math.inf, -math.inf)):
        for place in (0, 1500):
            values = torch.zeros(1501)
            values[place] = special
            agree(device, moments.kinds_of, values)


def check_second_moments_cover_values(device):
    seen = set()
    for square in (0.0, -0.0, 1e-42, 3.0, -1e-42, math.inf, -math.inf, math.nan):
        for value in (0.0, -0.0, 1e-42, -2.0, math.nan):
            squares, values = torch.ones(1100), torch.ones(1100)
            squares[1099], values[1099] = square, value
            seen.add(agree(device, moments.squares_cover, squares, values))
    assert seen == {False, True}


def check_sums(device):
    for shape in SHAPES:
        agree(device, moments.sum_sides, values_of(shape), shape[0], False)
        agree(device, moments.relative_square, values_of(shape), units_of(shape))
    agree(device, moments.sum_sides, values_of((3, 140)), 3, True)
    sums = agree(device, moments.sum_sides, torch.full((600,), -0.0), 300, False)
    assert not np.signbit(sums.rows).any()


def check_rounding_to_units(device):
    for shape in SHAPES:
        values, units = values_of(shape), units_of(shape)
        agree(device, moments.row_reaches, values, shape[0], units.columns)
        counts = agree(device, moments.count_magnitudes, values, units)
        assert int(counts.sum()) == values.numel()
        agree(device, moments.round_in_units, values, units, 77)


def check_magnitudes_next_to_every_edge(device):
    # A share that is not rounded as it should be falls on the other side of an edge.
    edges = torch.arange(1, 700, 7).double() / 256 * moments.half_octave_values(np.array([3])).item()
    values = torch.cat([torch.nextafter(edges.float(), edges.float() + sign) for sign in (-1, 0, 1)])
    values = torch.cat((values, -values, torch.tensor([3e38, -3e38, 1e-45, 2.0**-126])))
    for k in (3, 252, -900):
        units = Units(np.array([k]), np.zeros(values.numel(), np.int64))
        agree(device, moments.count_magnitudes, values, units)
        agree(device, moments.round_in_units, values, units, 91)


def check_rounding_to_octaves(device):
    for shape in SHAPES:
        values, units = values_of(shape).abs(), units_of(shape)
        first = agree(device, moments.round_to_octaves, values, units, None, 1.0)
        agree(device, moments.round_to_octaves, values, units, codes_of(values.numel()), 0.75)
        near = (first.int() + codes_of(values.numel()) % 5 - 2).clamp(0, 255).to(torch.uint8)
        for held in (0.5, 1.0):
            agree(device, moments.round_to_octaves, values, units, near, held)


def check_octaves_next_to_every_edge(device):
    edges = torch.cat((torch.arange(-149.0, 128.0), torch.arange(-126.5, 127.5))).double().exp2().float()
    values = torch.cat((torch.nextafter(edges, edges * 0), edges, torch.nextafter(edges, edges * math.inf)))
    units = Units(np.arange(-3, 4), np.zeros(values.numel(), np.int64))
    lines = values.repeat(7)
    first = agree(device, moments.round_to_octaves, lines, units, None, 1.0)
    for shift in (-1, 1):
        near = (first.int() + shift).clamp(0, 255).to(torch.uint8)
        agree(device, moments.round_to_octaves, lines, units, near, 1.0)


def check_decoding(device):
    for shape in SHAPES:
        rows, columns, elements = map(codes_of, (*shape, shape[0] * shape[1]), range(3))
        rows[::4], elements[::3] = 0, 0
        for base in (-1024, -201, 1024):
            agree(device, moments.expand_units, rows, columns, None, base, False)
            agree(device, moments.expand_units, rows, columns, elements, base, False)
            agree(device, moments.expand_units, rows, columns, elements, base, True)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    row=st.integers(-300, 300),
    columns=st.lists(st.integers(-128, 127), min_size=40, max_size=40),
    threshold=st.integers(26, 128),
    held=st.sampled_from([0.5, 0.75, 1.0, 3.25, 64.0]),
)
def any_bits_are_treated_alike(device, words, row, columns, threshold, held):
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    agree(device, moments.kinds_of, values)
    agree(device, moments.squares_cover, values, values.flip(0).contiguous())
    values = torch.where(values.isfinite(), values, 1.0)
    units = Units(np.array([row]), np.array(columns[: len(words)]))
    agree(device, moments.row_reaches, values, 1, units.columns)
    agree(device, moments.round_in_units, values, units, threshold)
    agree(device, moments.round_to_octaves, values, units, codes_of(len(words)), held)


def check_any_bits(device):
    any_bits_are_treated_alike(device)


def check_chains_of_optimizer_state(device):
    """Values on the device, the state there or in host memory: the payloads, states and bits of the CPU."""
    shape = (3, 4) if device == "cpu" else (300, 257)
    second = normal(shape, 1).square() * torch.logspace(-6, 2, shape[0])[:, None]
    first = normal(shape, 2) * second.sqrt()
    for role, preset, values in (
        (TensorRole.EXP_AVG, "fidelity", first),
        (TensorRole.EXP_AVG_SQ, "fidelity", second),
        (TensorRole.EXP_AVG_SQ, "ratio", second),
        (TensorRole.EXP_AVG_SQ, "fidelity", second[0]),
        (TensorRole.EXP_AVG, "ratio", first),
    ):
        codec, before, there = MomentsCodec(preset=preset), None, None
        spec = TensorSpec(name="w", role=role, dtype="float32", shape=tuple(values.shape))
        squares = second if role is TensorRole.EXP_AVG else None
        for scale in (1.0, 0.6):
            tensor, squares = (moved(one, device) for one in (values * scale, squares))
            item = TensorInput(spec=spec, tensor=values * scale, second_moment=moved(squares, "cpu"))
            expected = codec.encode_lossy(item, None, before)
            item = TensorInput(spec=spec, tensor=tensor, second_moment=squares)
            with kernels():
                for state in (there,) if device == "cpu" else (there, before):
                    found = codec.encode_lossy(item, None, state)
                    assert bytes(found.block.payload) == bytes(expected.block.payload)
                    assert state_bits(found.reference) == state_bits(expected.reference)
                decoded, there = codec.decode(spec, expected.block, there, device)
            before = expected.reference
            assert decoded.device.type == there.device.type == torch.device(device).type
            assert state_bits(there) == state_bits(before)
            assert state_bits(decoded) == state_bits(before.decoded())
