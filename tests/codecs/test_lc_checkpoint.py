"""The LC-Checkpoint codec keeps the laws, and its own promises: buckets of exponents, the largest kept."""

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch

from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from inshrink_lab.published.lc_checkpoint import LcCheckpointCodec, promote_buckets
from tests.codecs.lattice_chains import encode
from tests.strategies import normal, spec_of

CODEC = LcCheckpointCodec()


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


def test_headers_that_contradict_themselves_are_refused():
    spec = spec_of(torch.zeros(2, 2))
    for payload in (
        b"",
        b"\0",
        bytes([8, 0, 1, 0]),
        bytes([5, 0]) + bytes(4) + b"\1\0",
        bytes([1, 0, 1, 0]),
        bytes([0, 2, 0, 0, 0]),
        bytes([0, 2]) + struct.pack("<ee", 1.0, 1.0) + b"\1\0",
        bytes([0, 1]) + struct.pack("<e", float("inf")) + b"\1\0",
        bytes([4, 0]) + struct.pack("<f", float("nan")) + b"\1\0",
        bytes([0, 0, 1, 1]),
    ):
        with pytest.raises(DamagedError):
            CODEC.decode(spec, Block("lc-checkpoint/1", payload), None)


def test_sums_beyond_the_dtype_stop_at_its_largest_number():
    largest = torch.full((10, 10), 65000.0).half()
    reference = encode(largest, LcCheckpointCodec()).reference
    payload = bytes([1, 1]) + struct.pack("<e", 1000.0) + b"\1\1"
    decoded = CODEC.decode(spec_of(largest), Block("lc-checkpoint/1", payload), reference)
    assert decoded.decoded().unique().tolist() == [65504.0]
