"""How coarse the lattice is: pace, learning rate, sensitivity, and steps that change."""

import pytest
import torch

from inshrink_core.codec import FrameContext
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.testing.codecs import state_bits
from tests.codecs.lattice_chains import CODEC, chain, frame, moving
from tests.strategies import bits, normal, spec_of


def test_the_step_is_the_coarseness_times_the_movement():
    frames = moving(3)
    for coarseness in (1.0, 4.0):
        _, reference, plans = chain(frames, LatticeCodec(coarseness=coarseness), second_moment=frames[0] ** 2)
        assert plans[-1].tensors["layer.weight"].width == pytest.approx(coarseness * 1e-3, rel=0.35)
        assert reference.step_size.width == pytest.approx(coarseness * 1e-3, rel=1.0)


def test_the_step_follows_the_learning_rate():
    frames = moving(2)
    _, reference, plans = chain(frames)
    config, widths = LatticeCodec(gamma=0.5), []
    for rate in (1e-3, 2.5e-4):
        context = FrameContext(learning_rates={"layer.weight": rate}, memory=CODEC.remember(plans[-1]))
        _, plan = frame(frames[-1] + 1e-3, config, reference, context=context)
        widths.append(plan.tensors["layer.weight"].width)
    assert widths[1] == pytest.approx(widths[0] / 2)


def test_a_step_is_held_but_for_powers_of_two_except_after_a_restore():
    frames = moving(3)
    _, reference, plans = chain(frames[:2])
    memory = CODEC.remember(plans[-1])

    def next_width(rate, after_restore=False):
        context = FrameContext(
            learning_rates={"layer.weight": rate}, memory=memory, after_restore=after_restore
        )
        (_, state), _ = frame(frames[2], LatticeCodec(gamma=0.5), reference, context=context)
        return state.step_size.width / reference.step_size.width

    ratios = [next_width(rate) for rate in (1e-3, 9e-4, 1e-4)]
    assert all(ratio in (2.0, 1.0, 0.5, 0.25) for ratio in ratios)
    assert ratios[2] < ratios[0]
    assert next_width(9e-4, after_restore=True) != next_width(1e-3, after_restore=True)


@pytest.mark.parametrize("coarseness", [16.0, 64.0])
def test_a_step_that_grows_loses_no_movement(coarseness):
    weights = normal((128, 128), 0)
    first = frame(weights, LatticeCodec(coarseness=0.5))[0].reference
    moved = weights + 0.2 * first.step_size.width
    spec = spec_of(moved, "layer.weight")
    (block, after), _ = frame(moved, LatticeCodec(coarseness=coarseness), first)
    assert after.step_size.width >= 2 * first.step_size.width
    assert state_bits(CODEC.decode(spec, block, first)) == state_bits(after)
    # As well as on a lattice that begins with that step: evenly spread errors, none of them on one side.
    error = after.decoded() - moved
    assert float(error.abs().max()) <= 0.51 * after.step_size.width
    assert abs(float(error.mean())) < 0.02 * after.step_size.width
    assert float(error.square().mean()) == pytest.approx(after.step_size.width**2 / 12, rel=0.1)


def test_steps_may_become_finer_than_the_unit_the_chain_began_with():
    weights = normal((60, 60), 0)
    state = frame(weights, LatticeCodec(coarseness=8.0))[0].reference
    for t in range(1, 12):
        weights = weights + normal((60, 60), t, scale=0.02 * 0.3**t)
        (block, after), _ = frame(weights, LatticeCodec(coarseness=0.5), state)
        decoded = CODEC.decode(spec_of(weights, "layer.weight"), block, state)
        assert state_bits(decoded) == state_bits(after)
        state = after
    error = float((state.decoded() - weights).abs().max())
    assert error <= 0.51 * state.step_size.width
    assert state.step_size.width < 2e-5


def test_a_tensor_without_gradients_is_exact_once_and_then_unchanged():
    weights = normal((50, 50), 0)
    blocks, reference, _ = chain([weights, weights], second_moment=torch.zeros(50, 50))
    assert bits(reference.decoded()) == bits(weights)
    assert [block.codec for block in blocks] == ["lossless/1", "lossless/1"]
    assert len(blocks[1].payload) == 1


def test_what_a_chain_remembers_is_small_and_survives_damage():
    frames = moving(3)
    _, reference, plans = chain(frames, second_moment=frames[0] ** 2)
    assert set(plans[-1].memory) == {"movement", "rate", "held"}
    damaged = (
        {"movement": "x", "rate": None, "probes": 3},
        {"probes": {"layer.weight": b"1"}},
        {"movement": 1e-3, "held": 3},
        {"movement": 1e-3, "held": {"layer.weight": 10**18, 3: 4}},
        7,
        [],
    )
    for memory in damaged:
        context = FrameContext(memory=memory)
        encoded, _ = frame(frames[2], None, reference, context=context)
        assert CODEC.decode(spec_of(frames[2]), encoded.block, reference).decoded().shape == (100, 120)
