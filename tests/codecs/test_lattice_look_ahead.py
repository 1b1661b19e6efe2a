"""Looking ahead at a run: one plan for the whole chain, kept in its memory, and runs that tell nothing."""

import math
from dataclasses import replace

import pytest
import torch

from inshrink_core.chain import ChainConfig, look_ahead
from inshrink_core.codec import FrameContext, make_codec
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.codecs.lattice.step_size import Memory
from inshrink_core.errors import DamagedError
from tests.builders import memory_run
from tests.codecs.lattice_chains import encode_run, frame, moving

PACE = 1e-3


def chain_of(codec="lattice", **settings):
    return ChainConfig(config=make_codec(codec, settings), optimizer="drop")


def walk(n_steps, tensors=("a.weight", "b.weight"), pace=PACE, **roles):
    """Return a run of matrices on random walks; `roles` are functions of step and place by role."""
    steps = {}
    for at, name in enumerate(tensors):
        for step, tensor in enumerate(moving(n_steps, (40, 30), pace)):
            here = steps.setdefault(step, {})
            here[name] = tensor + at
            for role, make in roles.items():
                here[f"{name}@{role}"] = torch.full((40, 30), make(step, at))
    return memory_run(steps, hyperparameters={name: {"lr": 1e-3} for name in tensors})


def initial_memory(run):
    return look_ahead(chain_of(), run.steps, run.__getitem__)


def widths(run, **settings):
    """Encode a run as a chain; return the step size of every tensor at every step, and the memories."""
    found, memories = [], []
    for plan, results in encode_run(run, **settings):
        states = {key: result.reference for key, result in results.items()}
        found.append(
            {key: state.step_size.width for key, state in states.items() if hasattr(state, "step_size")}
        )
        memories.append(plan.memory)
    return found, memories


def test_all_frames_have_the_step_size_that_the_whole_run_asks_for():
    run = walk(6, exp_avg_sq=lambda step, at: 4.0**-at * (1 + step))
    found, memories = widths(run, coarseness=2.0, sensitivity=0.5)
    assert all(row == found[0] for row in found)
    assert all(memory == memories[0] for memory in memories)
    # Factors of 2 and of 1/2 around the geometric mean: a quarter of the second moment doubles the step.
    assert found[0]["b.weight"] / found[0]["a.weight"] == pytest.approx(2.0, rel=0.01)
    assert math.sqrt(found[0]["a.weight"] * found[0]["b.weight"]) == pytest.approx(2 * PACE, rel=0.05)


@pytest.mark.parametrize("role", ["momentum", None])
def test_without_second_moments_momentum_tells_what_is_sensitive_and_without_that_movement(role):
    if role is None:
        run = walk(5)
        for step in run.steps:
            source = run[step].source
            source.tensors["b.weight"] = 3 + (source.tensors["b.weight"] - 1) * 4
    else:
        run = walk(5, momentum=lambda step, at: 4.0**at)
    found, _ = widths(run, sensitivity=0.5)
    assert found[0]["a.weight"] / found[0]["b.weight"] == pytest.approx(4.0, rel=0.02)


def test_second_moments_of_zero_and_frozen_layers_leave_the_others_their_step_size():
    zero = walk(4, exp_avg_sq=lambda step, at: 0.0)
    assert widths(zero)[0] == [{}] * 4
    some = walk(4, exp_avg_sq=lambda step, at: float(at))
    found, _ = widths(some, coarseness=1.0)
    assert set(found[0]) == {"b.weight"}
    assert found[0]["b.weight"] == pytest.approx(PACE, rel=0.05)
    frozen = walk(4)
    for step in frozen.steps:
        frozen[step].source.tensors["a.weight"] = torch.ones(40, 30)
    assert widths(frozen)[0][0]["b.weight"] > 0


def test_one_exploding_step_does_not_decide_the_step_size_of_all_others():
    run = walk(9)
    run[4].source.tensors["a.weight"] *= 1e6
    run[7].source.tensors["b.weight"][0, 0] = float("nan")
    assert Memory.parse(initial_memory(run)).movement < 5 * PACE


def test_what_cannot_be_looked_at_is_planned_as_it_comes():
    assert initial_memory(walk(1)) is None
    still = walk(3, pace=0.0)
    assert initial_memory(still) is None
    assert look_ahead(chain_of("uniform"), still.steps, still.__getitem__) is None


def test_a_step_that_cannot_be_read_is_passed_over():
    run = walk(5)

    def read(step):
        if step in (1, 3):
            raise DamagedError("rotten")
        return run[step]

    assert look_ahead(chain_of(), run.steps, read) is None
    run[2].source.tensors.pop("a.weight")
    run.checkpoints[2] = replace(run[2], specs=tuple(s for s in run[2].specs if s.name != "a.weight"))
    assert Memory.parse(initial_memory(run)).movement == pytest.approx(PACE, rel=0.1)


def test_a_chain_that_cannot_look_ahead_settles_at_its_second_frame():
    frames = moving(5)
    memory, reference, found = None, None, []
    for step, tensor in enumerate(frames):
        context = FrameContext(learning_rates={"layer.weight": 1e-3 / (1 + step)}, memory=memory)
        second = torch.full(tensor.shape, 10.0**-step)
        (_, reference), plan = frame(tensor, None, reference, context=context, second_moment=second)
        memory = LatticeCodec().remember(plan)
        found.append((plan.tensors["layer.weight"].width, memory))
    assert all(plan_of_frame == found[1] for plan_of_frame in found[2:])
    assert found[1][0] == pytest.approx(0.5 * PACE, rel=0.35)
