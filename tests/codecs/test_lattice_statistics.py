"""Running statistics on the lattice: which buffers are, from when on, and how far from zero they stay."""

import pytest
import torch

from inshrink_core.chain import ChainConfig, ChainState, FramePlan, look_ahead
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import make_codec
from inshrink_core.codecs.lattice.block import is_statistic
from tests.builders import memory_run
from tests.codecs.lattice_chains import moving
from tests.strategies import bits, normal

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


def encoded(run, ahead=True, **settings):
    """Return the results of every frame by key."""
    chain = ChainConfig(config=make_codec("lattice", settings), optimizer="drop")
    memory = look_ahead(chain, run.steps, run.__getitem__) if ahead else None
    references, frames = {}, []
    for step in run.steps:
        state = ChainState(references=references, memory=memory)
        plan = FramePlan(chain, run[step], state, run[step].specs)
        memory = plan.memory
        frames.append({result.spec.key: result for result in plan.encode(run[step].specs)})
        references = {key: result.reference for key, result in frames[-1].items()}
    return frames


def bitstreams(frames, key):
    return [found[key].block.codec for found in frames]


@pytest.mark.parametrize(
    ("name", "shape", "role", "is_one"),
    [
        ("bn.running_mean", (8,), "buffer", True),
        ("running_var", (8,), "buffer", True),
        ("norm.moving_variance", (8,), "buffer", True),
        ("bn.running_mean", (8,), "weight", False),
        ("bn.running_mean", (8, 2), "buffer", False),
        ("bn.running_mean", (), "buffer", False),
        ("bn.num_batches_tracked", (8,), "buffer", False),
        ("rope.inv_freq", (8,), "buffer", False),
        ("running_mean_mask", (8,), "buffer", False),
        ("ema.shadow", (8,), "buffer", False),
    ],
)
def test_only_running_means_and_variances_are_statistics(name, shape, role, is_one):
    spec = TensorSpec(name=name, role=TensorRole(role), dtype="float32", shape=shape)
    assert is_statistic(spec) is is_one


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
