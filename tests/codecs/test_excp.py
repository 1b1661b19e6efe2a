"""The ExCP codec keeps the laws, and its own promises: moments without the weight, and no overflow."""

import numpy as np
import torch

from inshrink_core.checkpoint import MODEL_ROLES, TensorRole
from inshrink_core.codec import TensorInput
from inshrink_core.testing.codecs import CodecSuite, state_bits
from inshrink_lab.published.excp import ExcpCodec, surviving_residuals
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
