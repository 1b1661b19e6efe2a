"""The ExCP codec keeps the laws, and its own promises: joint pruning, few centroids, LZMA."""

import numpy as np
import pytest
import torch

from inshrink_core.checkpoint import MODEL_ROLES, TensorRole
from inshrink_core.codec import TensorInput
from inshrink_core.testing.codecs import CodecSuite, state_bits
from inshrink_lab.published.excp import ExcpCodec, surviving_moments, surviving_residuals
from tests.strategies import bits, normal, spec_of

CODEC = ExcpCodec()
MOMENTS = (TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ)


class _WithSecondMoment(CodecSuite):
    codec = CODEC

    def make_item(self, spec, tensor):
        second = None
        if tensor.dtype.is_floating_point:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
            second = (noise * 1e-4) ** 2
        return TensorInput(spec=spec, tensor=tensor, auxiliaries={TensorRole.EXP_AVG_SQ: second})


class TestExcpDefaults(_WithSecondMoment):
    codec = ExcpCodec()


class TestExcpByElement(CodecSuite):
    codec = ExcpCodec(indicator="element", bits=8, keyframe="quantized", coder="rans", vectors="exact")

    def unchanged_bytes(self, tensor):
        # What a quantized keyframe lost is a residual like any other: 255 centroids at worst.
        return 1030 + tensor.numel()


# Pruning


def test_the_threshold_is_the_published_factor_times_the_median_of_the_residual():
    residual = np.array([0.1, -0.2, 0.3, -0.4, 0.5], np.float32)  # median .3
    config = ExcpCodec()
    for root_mean, expected in ((1e-4, [0, 1, 1, 1, 1]), (4e-5, [0, 0, 0, 1, 1]), (3e-5, [0, 0, 0, 0, 0])):
        # factors .5, 1.25 and 1.67: thresholds .15, .375 and .5
        second = np.full(5, root_mean**2, np.float32)
        assert surviving_residuals(residual, second, config).tolist() == [
            bool(survives) for survives in expected
        ]


def test_the_factor_is_capped_at_two_and_a_half():
    residual = np.array([1.0, 1.0, 1.0, 2.4, 2.6], np.float32)
    for second in (np.zeros(5, np.float32), np.full(5, 1e-20, np.float32), None):
        assert surviving_residuals(residual, second, ExcpCodec()).tolist() == [False] * 4 + [True]


def test_the_papers_indicator_is_one_threshold_an_element():
    residual = np.full(4, 1.0, np.float32)
    second = np.array([1e-8, 2.4e-9, 2.6e-9, 0], np.float32)  # factors .5, 1.02, .98, cap
    survives = surviving_residuals(residual, second, ExcpCodec(indicator="element"))
    assert survives.tolist() == [True, False, True, False]


def test_a_first_moment_is_kept_above_twice_the_mean_magnitude():
    first = np.array([1.0, -1.0, 0.0, 6.0, -2.0], np.float32)  # mean 2
    assert surviving_moments(first, ExcpCodec()).tolist() == [False, False, False, True, False]


# Moments


def frames():
    """Weight and moments of one parameter, by role, at two steps."""
    weight = normal((64, 64), 0)
    for seed, moved in ((1, torch.zeros(64, 64)), (4, normal((64, 64), 3, 1e-4))):
        yield {
            TensorRole.WEIGHT: weight + moved,
            TensorRole.EXP_AVG: normal((64, 64), seed, 1e-3),
            TensorRole.EXP_AVG_SQ: normal((64, 64), seed + 1, 1e-3) ** 2,
        }


def encode_roles(codec, tensors, references, config):
    """Encode one frame of weight and moments the way a chain does."""
    specs = {role: spec_of(tensor, "fc.weight", role) for role, tensor in tensors.items()}
    second = tensors[TensorRole.EXP_AVG_SQ]
    items = {
        role: TensorInput(
            spec=specs[role],
            tensor=tensor,
            auxiliaries={TensorRole.EXP_AVG_SQ: second} if role is TensorRole.WEIGHT else {},
        )
        for role, tensor in tensors.items()
    }
    seen = [config.observe(item, references.get(role)) for role, item in items.items()]
    plan = config.plan(list(specs.values()), seen)
    return {role: config.encode(item, plan, references.get(role)) for role, item in items.items()}


def test_moments_survive_where_residual_and_first_moment_do():
    first, second = frames()
    config = ExcpCodec(beta=1.0)
    start = encode_roles(CODEC, first, {}, config)
    assert {encoded.block.codec for encoded in start.values()} == {"lossless/1"}
    references = {role: encoded.reference for role, encoded in start.items()}
    done = encode_roles(CODEC, second, references, config)
    residual = (second[TensorRole.WEIGHT] - first[TensorRole.WEIGHT]).numpy().reshape(-1)
    moment = second[TensorRole.EXP_AVG].numpy().reshape(-1)
    survives = surviving_residuals(residual, second[TensorRole.EXP_AVG_SQ].numpy().reshape(-1), config)
    survives &= surviving_moments(moment, config)
    assert 0.05 < survives.mean() < 0.5
    for role in MOMENTS:
        decoded = done[role].reference.decoded().numpy().reshape(-1)
        assert ((decoded != 0) == survives).all()
        assert decoded[survives] == pytest.approx(
            second[role].numpy().reshape(-1)[survives], rel=1.2, abs=1e-4
        )


def test_moments_decode_without_weight_plan_or_reference():
    first, second = frames()
    config = ExcpCodec()
    references = {r: e.reference for r, e in encode_roles(CODEC, first, {}, config).items()}
    for role, encoded in encode_roles(CODEC, second, references, config).items():
        reference = references[role] if role is TensorRole.WEIGHT else None
        spec = spec_of(second[role], "fc.weight", role)
        decoded = CODEC.decode(spec, encoded.block, reference)
        assert state_bits(decoded) == state_bits(encoded.reference)
        assert len(encoded.block.payload) <= 1 + spec.nbytes


def test_moments_may_be_left_to_others():
    roles = MODEL_ROLES | set(MOMENTS)
    assert CODEC.takes() == roles
    assert ExcpCodec(moments="exact").takes() == MODEL_ROLES
    tensor = normal((64, 64), 0)
    spec = spec_of(tensor, "fc.weight", TensorRole.EXP_AVG)
    plan = ExcpCodec(moments="exact").plan([], [])
    reference = ExcpCodec(moments="exact").encode(TensorInput(spec=spec, tensor=tensor), plan, None).reference
    encoded = ExcpCodec(moments="exact").encode(TensorInput(spec=spec, tensor=tensor + 1), plan, reference)
    assert bits(encoded.reference.decoded()) == bits(tensor + 1)


# Coding


def test_residuals_near_the_largest_float_are_left_out_without_a_word():
    residual = np.array([3e38, -3.2e38, 3.3e38, 1.0], np.float32)
    assert not surviving_residuals(residual, None, ExcpCodec()).any()
