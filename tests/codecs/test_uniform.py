"""The uniform codec keeps the laws, and its own promises: evenly spaced levels, grids held while they fit."""

import struct

import pytest
import torch

from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite, state_bits
from inshrink_lab.published.uniform import UniformCodec
from tests.codecs.lattice_chains import encode
from tests.strategies import normal, spec_of

CODEC = UniformCodec()


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
        decoded = CODEC.decode(spec_of(values), block, reference)
        assert state_bits(decoded) == state_bits(state)
        reference = state


def test_vectors_are_exact_unless_the_config_says_otherwise():
    vector = normal((300,), 0)
    assert encode(vector, UniformCodec()).block.codec == "lossless/1"
    assert encode(vector, UniformCodec(vectors="quantized")).block.codec == "uniform/1"


def test_headers_that_contradict_themselves_are_refused():
    spec = spec_of(torch.zeros(2, 2))
    bounds = struct.pack("<ff", -1.0, 2.0)
    for payload in (
        bytes([4, 2]) + bounds + b"\1\0",
        bytes([2, 2]) + b"\1\0",
        bytes([1, 2]) + bounds + b"\1\0",
        bytes([0, 9]) + bounds + b"\1\0",
        bytes([0, 0]) + bounds + b"\1\0",
        bytes([0, 2]) + struct.pack("<ff", 2.0, -1.0) + b"\1\0",
        bytes([0, 2]) + struct.pack("<ff", float("nan"), 2.0) + b"\1\0",
        bytes([0, 2]) + bounds + b"\1\4",
        bytes([0, 2]) + bounds + b"\7\0",
        bytes([0, 2]) + bounds[:5],
    ):
        with pytest.raises(DamagedError):
            CODEC.decode(spec, Block("uniform/1", payload), None)


def test_bounds_beyond_the_dtype_are_refused():
    payload = bytes([0, 2]) + struct.pack("<ff", -1.0, 1e5) + b"\1\0"
    with pytest.raises(DamagedError, match="bounds"):
        CODEC.decode(spec_of(torch.zeros(2, 2).half()), Block("uniform/1", payload), None)
