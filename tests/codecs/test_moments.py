"""The moments codec keeps the laws, and its own promises about scale."""

import dataclasses

import pytest
import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import TensorInput
from inshrink_core.codecs.moments import MomentsCodec, MomentsConfig
from inshrink_core.errors import ConfigError, DamagedError
from inshrink_core.frame import Block
from tests.codec_suite import CodecSuite
from tests.strategies import normal

CODEC = MomentsCodec()


def encode(tensor, role, preset="fidelity", reference=None, second=None):
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = TensorSpec(name="w", role=role, dtype=dtype, shape=tuple(tensor.shape))
    item = TensorInput(spec=spec, tensor=tensor, second_moment=second)
    return CODEC.encode(item, MomentsConfig(preset=preset), reference)


class _OfRole(CodecSuite):
    codec = CODEC
    config = MomentsConfig()
    role = TensorRole.EXP_AVG

    def make_item(self, spec, tensor):
        return TensorInput(spec=dataclasses.replace(spec, role=self.role), tensor=tensor)


class TestFirstMoment(_OfRole):
    pass


class TestMomentum(_OfRole):
    config = MomentsConfig(preset="ratio")
    role = TensorRole.MOMENTUM


class _Positive(_OfRole):
    role = TensorRole.EXP_AVG_SQ

    def make_item(self, spec, tensor):
        positive = tensor.dtype.is_floating_point and not spec.exact
        return super().make_item(spec, tensor.abs() if positive else tensor)


class TestSecondMomentOctaves(_Positive):
    def assert_survives(self, tensor, restored):
        super().assert_survives(tensor.abs() if tensor.dtype.is_floating_point else tensor, restored)


class TestSecondMomentRankOne(TestSecondMomentOctaves):
    config = MomentsConfig(preset="ratio")


def test_a_second_moment_is_within_half_an_octave_and_zero_only_where_it_was_zero():
    second = normal((200, 50), 0).square() * 1e-6
    second[3, 4] = 0
    second[5, 6] = 1e-38
    decoded = encode(second, TensorRole.EXP_AVG_SQ).reference.decoded()
    assert torch.equal(decoded == 0, second == 0)
    ratio = decoded[second > 1e-30] / second[second > 1e-30]
    assert float(ratio.max()) <= 2**0.5 * 1.0001
    assert float(ratio.min()) >= 2**-0.5 * 0.9999


def test_rank_one_factors_reproduce_a_rank_one_matrix_within_half_an_octave_and_are_never_zero():
    rows, columns = torch.logspace(-9, -3, 40), torch.logspace(-1, 1, 30)
    second = rows[:, None] * columns[None, :]
    encoded = encode(second, TensorRole.EXP_AVG_SQ, "ratio")
    ratio = encoded.reference.decoded() / second
    assert float(ratio.min()) > 2**-0.51
    assert float(ratio.max()) < 2**0.51
    assert len(encoded.block.payload) < 120


def test_a_first_moment_is_within_a_quarter_of_the_root_of_its_second():
    scale = torch.logspace(-4, 0, 60)[:, None]
    first, second = normal((60, 80), 1) * 0.2 * scale / 0.02, (scale * torch.ones(60, 80)) ** 2
    decoded = encode(first, TensorRole.EXP_AVG, second=second).reference.decoded()
    assert float(((decoded - first).abs() / scale).max()) <= 0.25 * 2**0.25 * 1.01


def test_a_spike_makes_the_unit_of_its_row_coarser_and_of_no_other():
    first = normal((20, 30), 2)
    plain = encode(first, TensorRole.MOMENTUM).reference.decoded()
    first[4, 4] = 1e4
    decoded = encode(first, TensorRole.MOMENTUM).reference.decoded()
    assert float(decoded[4, 4]) == pytest.approx(1e4, rel=0.2)
    assert float((decoded[5] - first[5]).abs().max()) < 4 * float((plain[5] - first[5]).abs().max()) + 0.5


def test_the_ratio_preset_leaves_out_the_first_moment_but_never_a_momentum_buffer():
    values = normal((30, 30), 3)
    assert not encode(values, TensorRole.EXP_AVG, "ratio").reference.decoded().any()
    assert encode(values, TensorRole.MOMENTUM, "ratio").reference.decoded().any()


def test_slow_second_moments_cost_next_to_nothing_in_a_delta():
    second = normal((300, 300), 4).square()
    first = encode(second, TensorRole.EXP_AVG_SQ)
    again = encode(second * 1.01, TensorRole.EXP_AVG_SQ, reference=first.reference)
    assert len(again.block.payload) < len(first.block.payload) / 10


def test_a_negative_second_moment_is_stored_exactly():
    values = normal((10, 10), 5)
    encoded = encode(values, TensorRole.EXP_AVG_SQ)
    assert encoded.block.codec == "lossless/1"
    assert torch.equal(encoded.reference.decoded(), values)


def test_a_preset_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="preset"):
        MomentsConfig(preset="tiny")


@pytest.mark.parametrize(
    "payload", ["0184", "02010000", "01050000", "018100000102", "01800000", "0100000000"]
)
def test_damaged_blocks_are_refused(payload):
    spec = TensorSpec(name="w", role=TensorRole.EXP_AVG_SQ, dtype="float32", shape=(3, 4))
    with pytest.raises(DamagedError):
        CODEC.decode(spec, Block("moments/1", bytes.fromhex(payload)), None)
