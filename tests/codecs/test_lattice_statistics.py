"""How coarse the lattice is: pace, learning rate, sensitivity; and running statistics on it."""

import pytest
import torch

from inshrink_core.codec import FrameContext
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.testing.codecs import state_bits
from tests.builders import memory_run
from tests.codecs.lattice_chains import CODEC, chain, encode_run, frame, moving
from tests.strategies import bits, normal, spec_of

VARIANCE, MEAN, COUNT = "bn.running_var", "bn.running_mean", "bn.num_batches_tracked"


def run_of(n_steps=5, still=(), least=0.01):
    steps = {}
    for step, weights in enumerate(moving(n_steps, (40, 30))):
        at = {name: 0 if name in still else step for name in (VARIANCE, MEAN)}
        steps[step] = {
            "a.weight": weights,
            VARIANCE: normal((200,), 1, scale=1.0).square() * (1 + 0.1 * at[VARIANCE]) + least,
            MEAN: normal((200,), 2, scale=3.0) + 0.05 * at[MEAN],
            COUNT: torch.tensor(100 * step),
        }
    return memory_run(steps)


def encoded(run, **options):
    """Return the results of every frame by key."""
    return [results for _, results in encode_run(run, **options)]


def bitstreams(frames, key):
    return [found[key].block.codec for found in frames]


def test_statistics_that_move_are_on_the_lattice_and_counters_exact():
    run = run_of()
    frames = encoded(run, coarseness=4.0)
    for key in (VARIANCE, MEAN):
        assert bitstreams(frames, key) == ["lattice/1"] * 5
        for step, found in zip(run.steps, frames, strict=True):
            original = run[step][key]
            rms = float(original.square().mean().sqrt())
            error = (found[key].reference.decoded() - original).abs()
            assert 0 < float(error.max()) <= 0.86 * 2**-8 * rms
    assert bitstreams(frames, COUNT) == ["lossless/1"] * 5
    assert all(bits(f[COUNT].reference.decoded()) == bits(run[s][COUNT]) for s, f in enumerate(frames))


def test_a_variance_keeps_its_smallest_value_to_an_eighth():
    run = run_of(least=1e-5)
    for step, found in enumerate(encoded(run, coarseness=4.0)):
        original, restored = run[step][VARIANCE], found[VARIANCE].reference.decoded()
        assert float(restored.min()) > 0
        assert float(((restored - original) / original).abs().max()) < 1 / 8


def test_statistics_become_finer_with_the_weights():
    run, errors = run_of(), {}
    for coarseness in (0.02, 2.0, 8.0):
        last = encoded(run, coarseness=coarseness)[-1][MEAN]
        errors[coarseness] = float((last.reference.decoded() - run[4][MEAN]).square().mean().sqrt())
    assert errors[0.02] < 0.02 * errors[2.0]
    assert errors[8.0] == errors[2.0]


def test_a_statistic_that_never_moves_stays_exact_and_costs_a_byte():
    frames = encoded(run_of(still=(VARIANCE,)))
    assert bitstreams(frames, VARIANCE) == ["lossless/1"] * 5
    assert [len(found[VARIANCE].block.payload) for found in frames[1:]] == [1] * 4
    assert bitstreams(frames, MEAN) == ["lattice/1"] * 5


def test_without_a_look_ahead_a_statistic_is_exact_until_it_moves():
    frames = encoded(run_of(), ahead=False)
    assert bitstreams(frames, MEAN) == ["lossless/1"] + ["lattice/1"] * 4


def test_a_statistic_with_zeros_or_that_is_not_finite_is_exact():
    zeros, broken = run_of(least=0.0), run_of()
    for step in zeros.steps:
        zeros[step].source.tensors[VARIANCE][3] = 0.0
        broken[step].source.tensors[VARIANCE][3] = float("inf")
    for run in (zeros, broken):
        frames = encoded(run)
        assert bitstreams(frames, VARIANCE) == ["lossless/1"] * 5
        assert all(
            bits(f[VARIANCE].reference.decoded()) == bits(run[s][VARIANCE]) for s, f in enumerate(frames)
        )


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
