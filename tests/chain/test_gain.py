"""Restore gain and noise of one step, on codecs whose figures are known beforehand."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inshrink_core.chain import ChainConfig, ChainState
from inshrink_core.chain.gain import step_gain
from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import Encoded, FrameContext, TensorInput, TensorReference, get_codec
from inshrink_core.codecs.lossless import LosslessCodec
from inshrink_core.frame import Block
from tests.builders import memory_checkpoint, seeded


@dataclass(frozen=True)
class State(TensorReference):
    tensor: Any

    def decoded(self):
        return self.tensor


def chain_of(codec):
    return ChainConfig(config=codec)


@dataclass(frozen=True, kw_only=True)
class Damped(LosslessCodec):
    """Keeps a share of every movement, and remembers what it was given."""

    share: float = 1.0
    items: list = field(default_factory=list)
    contexts: list = field(default_factory=list)

    def plan(self, specs, statistics, context=None):
        self.contexts.append(context)

    def encode(self, item, plan, reference):
        self.items.append(item)
        before = reference.decoded()
        arrived = before + self.share * (item.tensor - before)
        return Encoded(Block("damped/1", arrived.numpy().tobytes()), State(arrived))

    def decode(self, spec, block, reference, device="cpu"):
        values = torch.frombuffer(bytearray(block.payload), dtype=torch.float32).view(spec.shape)
        return State(values)


@dataclass
class Case:
    """Two originals, and decoded values that differ from the first by a known error."""

    weights: tuple = ("w",)
    extra: dict = field(default_factory=dict)
    error: float = 0.25

    def measure(self, codec, memory=None, rates=None):
        old = {name: seeded((6, 5), 1) for name in self.weights}
        new = {name: value + 0.125 * seeded((6, 5), 2) for name, value in old.items()}
        before, after = memory_checkpoint(1, old), memory_checkpoint(2, new | self.extra)
        after = replace(after, hyperparameters=rates or {})
        states = {name: State(value + self.error) for name, value in old.items()}
        return step_gain(chain_of(codec), before, after, ChainState(references=states, memory=memory))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_codec_that_keeps_a_share_of_the_movement_has_that_gain(share):
    found = Case().measure(Damped(share=share))
    assert found.step == 2
    assert found.gain == pytest.approx(share, abs=1e-5)
    assert found.noise == pytest.approx((1 - share) ** 2, abs=1e-5)


def test_the_movement_is_added_to_the_decoded_values_not_to_the_originals():
    codec = Damped(share=1.0)
    Case(error=100.0).measure(codec)
    item = codec.items[0]
    assert (item.tensor - 100).abs().max() < 10
    assert torch.allclose(item.tensor - item.restored, 0.125 * seeded((6, 5), 2), atol=1e-4)


def test_the_encoder_is_told_of_the_restore_and_what_it_may_look_at():
    codec = Damped(share=1.0)
    second, first = seeded((6, 5), 3).square(), seeded((6, 5), 4)
    case = Case(extra={"w@exp_avg_sq": second, "w@exp_avg": first})
    case.measure(codec, memory={"a": 1}, rates={"w": {"lr": 0.1}})
    assert codec.contexts == [FrameContext(learning_rates={"w": 0.1}, memory={"a": 1}, after_restore=True)]
    assert torch.equal(codec.items[0].auxiliary(TensorRole.EXP_AVG_SQ), second)
    assert torch.equal(codec.items[0].auxiliary(TensorRole.GRADIENT, TensorRole.EXP_AVG), first)
    assert [item.spec.key for item in codec.items] == ["w"]


def test_a_step_is_pooled_by_movement_not_by_tensor():
    class Selective(Damped):
        def encode(self, item, plan, reference):
            return Damped(share=1.0 if item.spec.key == "a" else 0.0).encode(item, plan, reference)

    found = Case(weights=("a", "b")).measure(Selective())
    gains = {row.key: row.gain for row in found.tensors}
    assert gains == {"a": pytest.approx(1.0, abs=1e-5), "b": pytest.approx(0.0, abs=1e-5)}
    assert found.gain == pytest.approx(0.5, abs=1e-5)


def test_what_does_not_move_has_no_gain():
    frozen = memory_checkpoint(1, {"w": seeded((4, 4), 1)}), memory_checkpoint(2, {"w": seeded((4, 4), 1)})
    codec = LosslessCodec()
    state = codec.encode(_item(frozen[0], "w"), None, None).reference
    found = step_gain(chain_of(codec), *frozen, ChainState(references={"w": state}))
    assert (found.gain, found.noise, found.tensors[0].gain) == (None, None, None)


def test_values_that_are_not_finite_count_for_nothing():
    old = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    new = torch.tensor([2.0, 1.0, float("nan"), 5.0])
    before, after = memory_checkpoint(1, {"w": old}), memory_checkpoint(2, {"w": new})
    found = step_gain(chain_of(Damped(share=1.0)), before, after, ChainState(references={"w": State(old)}))
    assert (found.gain, found.noise) == (1.0, 0.0)
    assert found.tensors[0].movement == 1.0


def test_buffers_integers_and_tensors_that_are_new_are_left_out():
    before = memory_checkpoint(1, {"w": seeded((4,), 1), "bn.running_mean": seeded((4,), 2)})
    tensors = {"w": seeded((4,), 3), "bn.running_mean": seeded((4,), 4), "new": seeded((4,), 5)}
    after = memory_checkpoint(2, tensors | {"count": torch.tensor([3])})
    states = {key: State(before[key]) for key in before}
    found = step_gain(chain_of(Damped(share=1.0)), before, after, ChainState(references=states))
    assert [row.key for row in found.tensors] == ["w"]


@pytest.mark.parametrize("name", ["lossless", "lattice"])
def test_half_precision_weights_are_measured_too(name):
    codec = get_codec(name)()
    before = memory_checkpoint(1, {"w": seeded((40, 50), 1, torch.bfloat16)})
    after = memory_checkpoint(2, {"w": seeded((40, 50), 2, torch.bfloat16)})
    item = _item(before, "w")
    plan = codec.plan([item.spec], [codec.observe(item, None)])
    state = codec.encode(item, plan, None).reference
    found = step_gain(chain_of(codec), before, after, ChainState(references={"w": state}))
    assert found.gain == pytest.approx(1.0, abs=0.3)


def _item(checkpoint, key):
    return TensorInput(spec=checkpoint.spec(key), tensor=checkpoint[key])
