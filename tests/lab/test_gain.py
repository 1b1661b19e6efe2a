"""Restore gain and noise: of one step, on codecs whose figures are known beforehand, and of archives."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inshrink_core.chain import Archive, ChainConfig, ChainState
from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import Encoded, FrameContext, TensorInput, TensorReference, get_codec
from inshrink_core.codecs.lossless import LosslessCodec
from inshrink_core.errors import InputError
from inshrink_core.formats import open_run
from inshrink_core.frame import Block
from inshrink_core.verbs.compress import compress
from inshrink_lab.bench.gain import RestoreGain, restore_gain, step_gain
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
    found = RestoreGain.of(Case().measure(Damped(share=share)).values())
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
    gains = {key: RestoreGain.of([row]).gain for key, row in found.items()}
    assert gains == {"a": pytest.approx(1.0, abs=1e-5), "b": pytest.approx(0.0, abs=1e-5)}
    assert RestoreGain.of(found.values()).gain == pytest.approx(0.5, abs=1e-5)


def test_what_does_not_move_has_no_gain():
    frozen = memory_checkpoint(1, {"w": seeded((4, 4), 1)}), memory_checkpoint(2, {"w": seeded((4, 4), 1)})
    codec = LosslessCodec()
    state = codec.encode(_item(frozen[0], "w"), None, None).reference
    found = step_gain(chain_of(codec), *frozen, ChainState(references={"w": state}))
    assert RestoreGain.of(found.values()) == (None, None)


def test_values_that_are_not_finite_count_for_nothing():
    old = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    new = torch.tensor([2.0, 1.0, float("nan"), 5.0])
    before, after = memory_checkpoint(1, {"w": old}), memory_checkpoint(2, {"w": new})
    found = step_gain(chain_of(Damped(share=1.0)), before, after, ChainState(references={"w": State(old)}))
    assert RestoreGain.of(found.values()) == (1.0, 0.0)
    assert found["w"].squared_before == 1.0


def test_buffers_integers_and_tensors_that_are_new_are_left_out():
    before = memory_checkpoint(1, {"w": seeded((4,), 1), "bn.running_mean": seeded((4,), 2)})
    tensors = {"w": seeded((4,), 3), "bn.running_mean": seeded((4,), 4), "new": seeded((4,), 5)}
    after = memory_checkpoint(2, tensors | {"count": torch.tensor([3])})
    states = {key: State(before[key]) for key in before}
    found = step_gain(chain_of(Damped(share=1.0)), before, after, ChainState(references=states))
    assert list(found) == ["w"]


@pytest.mark.parametrize("name", ["lossless", "lattice"])
def test_half_precision_weights_are_measured_too(name):
    codec = get_codec(name)()
    before = memory_checkpoint(1, {"w": seeded((40, 50), 1, torch.bfloat16)})
    after = memory_checkpoint(2, {"w": seeded((40, 50), 2, torch.bfloat16)})
    item = _item(before, "w")
    plan = codec.plan([item.spec], [codec.observe(item, None)])
    state = codec.encode(item, plan, None).reference
    found = step_gain(chain_of(codec), before, after, ChainState(references={"w": state}))
    assert RestoreGain.of(found.values()).gain == pytest.approx(1.0, abs=0.3)


def _item(checkpoint, key):
    return TensorInput(spec=checkpoint.spec(key), tensor=checkpoint[key])


# Archives


STEPS = (5, 10, 15, 20)


@pytest.fixture(scope="module")
def run(run_path):
    return open_run(run_path)


def measured(run, tmp_path, codec, **settings):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec=codec, config=settings)
    return restore_gain(Archive.open(target), run)


def pooled(found):
    return RestoreGain.of(row for step in found.values() for row in step.values())


def test_a_lossless_archive_keeps_every_movement(run, tmp_path):
    found = measured(run, tmp_path, "lossless")
    assert tuple(found) == STEPS[1:]
    assert pooled(found).gain == pytest.approx(1.0, abs=1e-5)
    assert pooled(found).noise < 1e-9


def test_a_coarse_grid_rolls_training_back_where_matched_gain_does_not(run, tmp_path):
    coarse = pooled(measured(run, tmp_path / "u", "uniform", bits=3))
    matched = pooled(measured(run, tmp_path / "l", "lattice", coarseness=4))
    assert coarse.gain < 0.5
    assert matched.gain == pytest.approx(1.0, abs=0.05)
    # A step is halved before rms(r) is below .05, where gain 1 costs a noise of about 9.
    assert 0.01 < matched.noise < 10


def test_each_step_is_measured_with_the_config_of_its_own_frame(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec="uniform", config={"bits": 8, "grid": "refit"}, steps=STEPS[:3])
    compress(run, target, codec="uniform", config={"bits": 2, "grid": "refit"})
    found = restore_gain(Archive.open(target), run)
    assert RestoreGain.of(found[STEPS[2]].values()).noise < 0.1
    assert RestoreGain.of(found[STEPS[3]].values()).noise > 1


@pytest.mark.parametrize("selector", [{"match": "[04].*"}, {"layer_type": "linear"}])
def test_tensors_with_an_override_are_measured_with_the_settings_of_their_override(run, tmp_path, selector):
    settings = {"bits": 8, "grid": "refit"}
    overridden = measured(run, tmp_path / "o", "uniform", **settings, overrides=[selector | {"bits": 2}])
    fine = measured(run, tmp_path / "f", "uniform", **settings)
    coarse = measured(run, tmp_path / "c", "uniform", **settings | {"bits": 2})
    noise = [
        RestoreGain.of(step["4.weight"] for step in found.values()).noise
        for found in (overridden, coarse, fine)
    ]
    assert noise[0] == noise[1] > 10 * noise[2]


def test_a_single_step_has_no_movement_to_measure(run, tmp_path):
    target = tmp_path / "a.inshrink"
    compress(run, target, steps=STEPS[:1])
    with pytest.raises(InputError, match="consecutive"):
        restore_gain(Archive.open(target), run)


def test_without_optimizer_state_the_encoder_sees_none(run, tmp_path):
    with_moments, dropped = tmp_path / "k.inshrink", tmp_path / "d.inshrink"
    compress(run, with_moments, codec="excp", config={"moments": "exact", "alpha": 1.0}, optimizer="exact")
    compress(run, dropped, codec="excp", config={"moments": "exact", "alpha": 1e-9}, optimizer="drop")
    # Without second moments ExCP prunes as much as it can, whatever its alpha.
    gains = [pooled(restore_gain(Archive.open(path), run)).gain for path in (dropped, with_moments)]
    assert gains[0] == pytest.approx(gains[1], rel=0.05)
