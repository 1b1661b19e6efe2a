"""Published rivals keep the laws and refuse what contradicts itself; `test_rival_goldens` has their rules."""

import struct

import pytest
import torch

from inshrink_core.codec import TensorInput
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from inshrink_lab.published.context import ContextCodec
from inshrink_lab.published.lc_checkpoint import LcCheckpointCodec
from inshrink_lab.published.qd import QdCodec
from inshrink_lab.published.uniform import UniformCodec
from tests.codecs.lattice_chains import encode
from tests.strategies import normal, spec_of

# Uniform


class TestUniformDefaults(CodecSuite):
    codec = UniformCodec()


class TestUniformCoarse(CodecSuite):
    codec = UniformCodec(bits=3, grid="refit", coder="zstd", vectors="quantized")


def test_bounds_beyond_the_dtype_are_refused():
    payload = bytes([0, 2]) + struct.pack("<ff", -1.0, 1e5) + b"\1\0"
    with pytest.raises(DamagedError, match="bounds"):
        UniformCodec().decode(spec_of(torch.zeros(2, 2).half()), Block("uniform/1", payload), None)


# QD


class TestQdDefaults(CodecSuite):
    codec = QdCodec()


class TestQdNarrow(CodecSuite):
    codec = QdCodec(bits=1, spread=7, grid="held", coder="rans", vectors="exact")


def widths_of(tensors, codec):
    """Return the width that each layer of a frame gets."""
    specs = [spec_of(tensor, f"layer{i}.weight") for i, tensor in enumerate(tensors)]
    items = [TensorInput(spec=s, tensor=t) for s, t in zip(specs, tensors, strict=True)]
    plan = codec.plan(specs, [codec.observe(item, None) for item in items])
    return [codec.encode(item, plan, None).reference.grid.bits for item in items]


def test_a_layer_with_less_than_half_of_the_entropy_gets_fewer_bits():
    layers = normal((100, 100), 0), (normal((100, 100), 1) > 0).float()
    assert widths_of(layers, QdCodec(bits=6, spread=2)) == [6, 4]
    assert widths_of(layers, QdCodec(bits=6, spread=0)) == [6, 6]


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


def test_sums_beyond_the_dtype_stop_at_its_largest_number():
    largest = torch.full((10, 10), 65000.0).half()
    reference = encode(largest, LcCheckpointCodec()).reference
    payload = bytes([1, 1]) + struct.pack("<e", 1000.0) + b"\1\1"
    decoded = LcCheckpointCodec().decode(spec_of(largest), Block("lc-checkpoint/1", payload), reference)
    assert decoded.decoded().unique().tolist() == [65504.0]


# Context modelling


class TestContextWide(CodecSuite):
    codec = ContextCodec(bits=8, keyframe="quantized", vectors="exact")

    def unchanged_bytes(self, tensor):
        # What a quantized keyframe lost is a residual like any other: 255 centroids at worst.
        return 1030 + tensor.numel()


def test_symbols_of_a_tensor_without_centroids_are_refused():
    # delta, no centroids; which symbols are zero: none (a constant 1); no values
    payload = bytes([1, 0, 2, 1, 1, 0])
    reference = encode(torch.zeros(2, 2), ContextCodec()).reference
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
