"""Published rivals keep the laws, and promises of their own: levels, widths, buckets, what the past tells."""

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch

from inshrink_core.codec import TensorInput
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite, state_bits
from inshrink_lab.published.context import ContextCodec
from inshrink_lab.published.excp import ExcpCodec
from inshrink_lab.published.lc_checkpoint import LcCheckpointCodec, promote_buckets
from inshrink_lab.published.qd import QdCodec, weighted_entropy
from inshrink_lab.published.uniform import UniformCodec
from tests.codecs.lattice_chains import encode
from tests.strategies import bits, normal, spec_of

# Uniform


class TestUniformDefaults(CodecSuite):
    codec = UniformCodec()


class TestUniformCoarse(CodecSuite):
    codec = UniformCodec(bits=3, grid="refit", coder="zstd", vectors="quantized")


def test_levels_are_evenly_spaced_between_the_extremes_and_values_go_to_the_nearest():
    values = torch.tensor([[-1.0, -0.6, -0.4, 0.2, 0.6, 2.0]]).repeat(20, 1)
    decoded = encode(values, UniformCodec(bits=2)).reference.decoded()
    assert decoded[0].tolist() == [-1.0, -1.0, 0.0, 0.0, 1.0, 2.0]


def test_a_grid_is_held_while_it_covers_the_values_and_refitted_when_it_does_not():
    values = normal((50, 50), 0)
    first = encode(values, UniformCodec()).reference
    inside = encode(values * 0.9, UniformCodec(), first).reference
    assert inside.grid == first.grid
    for moved in (values * 1.01, values * 0.5):
        assert encode(moved, UniformCodec(), first).reference.grid != first.grid
    assert encode(values * 0.9, UniformCodec(grid="refit"), first).reference.grid != first.grid


def test_the_width_may_change_along_a_chain():
    values, reference = normal((40, 40), 0), None
    for width in (8, 3, 5, 8):
        block, state = encode(values, UniformCodec(bits=width), reference)
        decoded = UniformCodec().decode(spec_of(values), block, reference)
        assert state_bits(decoded) == state_bits(state)
        reference = state


def test_vectors_are_exact_unless_the_config_says_otherwise():
    vector = normal((300,), 0)
    assert encode(vector, UniformCodec()).block.codec == "lossless/1"
    assert encode(vector, UniformCodec(vectors="quantized")).block.codec == "uniform/1"


def test_bounds_beyond_the_dtype_are_refused():
    payload = bytes([0, 2]) + struct.pack("<ff", -1.0, 1e5) + b"\1\0"
    with pytest.raises(DamagedError, match="bounds"):
        UniformCodec().decode(spec_of(torch.zeros(2, 2).half()), Block("uniform/1", payload), None)


# QD


def encode_layers(tensors, config, references=None):
    references = references or [None] * len(tensors)
    specs = [spec_of(tensor, f"layer{i}.weight") for i, tensor in enumerate(tensors)]
    items = [TensorInput(spec=s, tensor=t) for s, t in zip(specs, tensors, strict=True)]
    pairs = list(zip(items, references, strict=True))
    plan = config.plan(specs, [config.observe(item, before) for item, before in pairs])
    return [config.encode(item, plan, before) for item, before in pairs]


class TestQdDefaults(CodecSuite):
    codec = QdCodec()


class TestQdNarrow(CodecSuite):
    codec = QdCodec(bits=1, spread=7, grid="held", coder="rans", vectors="exact")


def test_weighted_entropy_counts_a_symbol_by_the_importance_of_its_values():
    symbols = np.array([0, 0, 0, 1], np.uint8)
    assert weighted_entropy(symbols, np.ones(4)) == pytest.approx(0.8113, abs=1e-4)
    # All importance with the rare symbol: its information alone, two bits.
    assert weighted_entropy(symbols, np.array([0, 0, 0, 5.0])) == 2.0
    assert weighted_entropy(symbols, np.zeros(4)) == 0.0


def test_a_layer_with_less_than_half_of_the_entropy_gets_fewer_bits():
    rich = normal((100, 100), 0)
    poor = (normal((100, 100), 1) > 0).float()
    widths = [e.reference.grid.bits for e in encode_layers([rich, poor], QdCodec(bits=6, spread=2))]
    assert widths == [6, 4]
    assert [e.reference.grid.bits for e in encode_layers([rich, poor], QdCodec(bits=6, spread=0))] == [6, 6]


def test_a_layer_keeps_its_width_along_a_chain_and_follows_its_range():
    rich, poor = normal((100, 100), 0), (normal((100, 100), 1) > 0).float()
    config = QdCodec(bits=6, spread=2)
    first = [e.reference for e in encode_layers([rich, poor], config)]
    second = [e.reference for e in encode_layers([rich * 0.9, normal((100, 100), 2)], config, first)]
    assert [state.grid.bits for state in second] == [6, 4]
    assert second[0].grid.high == pytest.approx(0.9 * first[0].grid.high)


def test_a_width_outside_the_config_is_given_up():
    values = normal((50, 50), 0)
    (first,) = encode_layers([values], QdCodec(bits=8, spread=0))
    (second,) = encode_layers([values], QdCodec(bits=5, spread=1), [first.reference])
    assert second.reference.grid.bits == 5
    decoded = QdCodec().decode(spec_of(values, "layer0.weight"), second.block, first.reference)
    assert state_bits(decoded) == state_bits(second.reference)


# LC-Checkpoint


class TestLcDefaults(CodecSuite):
    codec = LcCheckpointCodec()


class TestLcOneBucket(CodecSuite):
    codec = LcCheckpointCodec(
        bits=1, representative="mean", coder="zstd", keyframe="quantized", vectors="exact"
    )

    def unchanged_bytes(self, tensor):
        # What a quantized keyframe lost is a residual like any other.
        return 1030 + tensor.numel()


# Residuals by bucket: +8: {9, 15}; -8: {-8, -12}; +4: {4.5, 7.5}; -2: {-3}; +1: {1}; rest below.
_RESIDUALS = np.array([9, 15, -8, -12, 4.5, 7.5, -3, 1, 0.3, -0.2, 0.1, 0], np.float32)


def test_buckets_are_of_one_sign_and_exponent_and_stand_for_their_midrange():
    quantized = promote_buckets(_RESIDUALS, 8, "midrange")
    assert quantized.codebook.tolist() == pytest.approx([-10, -3, -0.2, 0.1, 0.3, 1, 6, 12])
    assert quantized.symbols.tolist() == [8, 8, 1, 1, 7, 7, 2, 6, 5, 3, 4, 0]


def test_priority_goes_to_the_largest_exponents_and_the_rest_becomes_zero():
    quantized = promote_buckets(_RESIDUALS, 2, "midrange")
    assert quantized.codebook.tolist() == [-10, 6, 12]
    assert quantized.symbols.tolist() == [3, 3, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0]


def test_subnormal_residuals_have_buckets_too():
    tiny = np.array([1e-45, -1e-40], np.float32)
    assert promote_buckets(tiny, 3, "midrange").codebook.tolist() == sorted(tiny.tolist())


def test_the_first_checkpoint_is_exact_and_what_follows_closes_the_loop():
    values, config = normal((50, 50), 0), LcCheckpointCodec()
    first = encode(values, config)
    assert first.block.codec == "lossless/1"
    goal, reference, errors = values + normal((50, 50), 1, 1e-3), first.reference, []
    for _ in range(6):
        reference = encode(goal, config, reference).reference
        errors.append(float((reference.decoded() - goal).abs().max()))
    # A bucket's midrange is within a third of every member: each frame leaves less than half.
    assert all(after < 0.6 * before for before, after in pairwise(errors))


def test_sums_beyond_the_dtype_stop_at_its_largest_number():
    largest = torch.full((10, 10), 65000.0).half()
    reference = encode(largest, LcCheckpointCodec()).reference
    payload = bytes([1, 1]) + struct.pack("<e", 1000.0) + b"\1\1"
    decoded = LcCheckpointCodec().decode(spec_of(largest), Block("lc-checkpoint/1", payload), reference)
    assert decoded.decoded().unique().tolist() == [65504.0]


# Context modelling


SECOND = torch.full((200, 200), 1e-9)


def coded(values, reference=None):
    """Return the state after values, under second moments that prune little."""
    return encode(values, ContextCodec(), reference, second_moment=torch.full(values.shape, 1e-9)).reference


class TestContextWide(CodecSuite):
    codec = ContextCodec(bits=8, keyframe="quantized", vectors="exact")

    def unchanged_bytes(self, tensor):
        # What a quantized keyframe lost is a residual like any other: 255 centroids at worst.
        return 1030 + tensor.numel()


def test_values_are_those_of_excp():
    values, moved = normal((80, 90), 0), normal((80, 90), 0) + normal((80, 90), 1, 1e-3)
    second = torch.full(values.shape, 1e-9)
    ours, theirs = (
        encode(moved, codec, encode(values, codec).reference, second_moment=second).reference
        for codec in (ContextCodec(), ExcpCodec())
    )
    assert bits(ours.decoded()) == bits(theirs.decoded())


def _moves(seed):
    """Moves of which whole regions are large or small, the same ones in every frame."""
    scale = torch.kron((normal((10, 10), 7) > 0).float() + 0.02, torch.ones(20, 20))
    return normal((200, 200), seed, 1e-3) * scale


def test_regions_that_moved_before_tell_which_move_now():
    values = normal((200, 200), 0)
    start = coded(values)
    first = coded(values + _moves(1), start)
    goal = values + _moves(1) + _moves(2)
    informed = encode(goal, ContextCodec(), first, second_moment=SECOND).block.payload
    # The same decoded values without their symbols: nothing is known of the regions.
    blind = encode(goal, ContextCodec(), coded(first.decoded()), second_moment=SECOND).block.payload
    assert len(informed) < 0.9 * len(blind)


def test_symbols_of_a_tensor_without_centroids_are_refused():
    # delta, no centroids; which symbols are zero: none (a constant 1); no values
    payload = bytes([1, 0, 2, 1, 1, 0])
    reference = coded(torch.zeros(2, 2))
    with pytest.raises(DamagedError, match="alphabet"):
        ContextCodec().decode(spec_of(torch.zeros(2, 2)), Block("context/1", payload), reference)


# What contradicts itself

BOUNDS = struct.pack("<ff", -1.0, 2.0)
UNIFORM = [
    *(bytes([4, 2]) + BOUNDS + b"\1\0", bytes([2, 2]) + b"\1\0", bytes([1, 2]) + BOUNDS + b"\1\0"),
    *(bytes([0, 9]) + BOUNDS + b"\1\0", bytes([0, 0]) + BOUNDS + b"\1\0", bytes([0, 2]) + BOUNDS[:5]),
    *(bytes([0, 2]) + BOUNDS + b"\1\4", bytes([0, 2]) + BOUNDS + b"\7\0"),
    bytes([0, 2]) + struct.pack("<ff", 2.0, -1.0) + b"\1\0",
    bytes([0, 2]) + struct.pack("<ff", float("nan"), 2.0) + b"\1\0",
]
LC_CHECKPOINT = [
    *(b"", b"\0", bytes([8, 0, 1, 0]), bytes([5, 0]) + bytes(4) + b"\1\0", bytes([1, 0, 1, 0])),
    *(bytes([0, 2, 0, 0, 0]), bytes([0, 2]) + struct.pack("<ee", 1.0, 1.0) + b"\1\0", bytes([0, 0, 1, 1])),
    bytes([0, 1]) + struct.pack("<e", float("inf")) + b"\1\0",
    bytes([4, 0]) + struct.pack("<f", float("nan")) + b"\1\0",
]


@pytest.mark.parametrize(
    ("codec", "payload"),
    [*((UniformCodec(), one) for one in UNIFORM), *((LcCheckpointCodec(), one) for one in LC_CHECKPOINT)],
    ids=range(len(UNIFORM) + len(LC_CHECKPOINT)),
)
def test_headers_that_contradict_themselves_are_refused(codec, payload):
    with pytest.raises(DamagedError):
        codec.decode(spec_of(torch.zeros(2, 2)), Block(codec.bitstream, payload), None)
