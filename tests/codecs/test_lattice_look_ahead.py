"""Looking ahead at a run: one plan for the whole chain, kept in its memory, and runs that tell nothing."""

import math
from dataclasses import replace

import pytest
import torch

from inshrink_core.chain import ChainConfig, ChainState, FrameEncoder
from inshrink_core.codec import FrameContext, TensorInput, make_codec
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.codecs.lattice.spacing import Memory
from inshrink_core.errors import DamagedError
from tests.builders import memory_checkpoint, memory_run
from tests.codecs.lattice_chains import frame, item_of, moving
from tests.strategies import normal, spec_of

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


def initial_memory(run, chain=None):
    return FrameEncoder(chain or chain_of()).look_ahead(run.steps, run.__getitem__)


def widths(run, **settings):
    """Encode a run as a chain; return the spacing of every tensor at every step, and the memories."""
    encoder, memory = FrameEncoder(chain_of(**settings)), initial_memory(run, chain_of(**settings))
    references, found, memories = {}, [], []
    for step in run.steps:
        memory, results = encoder.encode(run[step], ChainState(references=references, memory=memory))
        references = {result.spec.key: result.reference for result in results}
        found.append(
            {key: state.spacing.width for key, state in references.items() if hasattr(state, "spacing")}
        )
        memories.append(memory)
    return found, memories


@pytest.mark.parametrize(("n_steps", "n_pairs"), [(0, 0), (1, 0), (2, 1), (3, 2), (9, 8), (10, 8), (1000, 8)])
def test_sights_are_spread_pairs_of_neighbours(n_steps, n_pairs):
    places = [sight.place for sight in LatticeCodec().look_ahead_steps(n_steps)]
    assert places == sorted(set(places))
    assert sum(place + 1 in places for place in places) >= n_pairs
    assert len(places) <= 2 * n_pairs
    if n_pairs:
        assert (places[0], places[-1]) == (0, n_steps - 1)
        assert 0 < sum(sight.companions for sight in LatticeCodec().look_ahead_steps(n_steps)) <= 5


def test_all_frames_have_the_spacing_that_the_whole_run_asks_for():
    run = walk(6, exp_avg_sq=lambda step, at: 4.0**-at * (1 + step))
    found, memories = widths(run, coarseness=2.0, sensitivity=0.5)
    assert all(row == found[0] for row in found)
    assert all(memory == memories[0] for memory in memories)
    # Factors of 2 and of 1/2 around the geometric mean: a quarter of the second moment is twice the spacing.
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


def test_second_moments_of_zero_and_frozen_layers_leave_the_others_their_spacing():
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


def test_one_exploding_step_does_not_decide_the_spacing_of_all_others():
    run = walk(9)
    run[4].source.tensors["a.weight"] *= 1e6
    run[7].source.tensors["b.weight"][0, 0] = float("nan")
    assert Memory.parse(initial_memory(run)).movement < 5 * PACE


def test_what_cannot_be_looked_at_is_planned_as_it_comes():
    assert initial_memory(walk(1)) is None
    still = walk(3, pace=0.0)
    assert initial_memory(still) is None
    assert FrameEncoder(chain_of("uniform")).look_ahead(still.steps, still.__getitem__) is None


def test_a_step_that_cannot_be_read_is_passed_over():
    run = walk(5)

    def read(step):
        if step in (1, 3):
            raise DamagedError("rotten")
        return run[step]

    encoder = FrameEncoder(chain_of())
    assert encoder.look_ahead(run.steps, read) is None
    run[2].source.tensors.pop("a.weight")
    run.checkpoints[2] = replace(run[2], specs=tuple(s for s in run[2].specs if s.name != "a.weight"))
    assert Memory.parse(encoder.look_ahead(run.steps, run.__getitem__)).movement == pytest.approx(
        PACE, rel=0.1
    )


def test_a_run_of_other_shapes_and_learning_rates_has_a_plan():
    rates = [{}, {"a.weight": {"lr": 4e-3}}, {"a.weight": {"lr": 3e-3}}]
    tensors = moving(3, (40, 30))
    run = memory_run({0: {"a.weight": tensors[0]}})
    for step in (1, 2):
        run.checkpoints[step] = memory_checkpoint(
            step, {"a.weight": tensors[step], "new.weight": normal((3, 3), step)}, rates[step]
        )
    memory = Memory.parse(initial_memory(run))
    assert memory.rate == pytest.approx(math.sqrt((16e-6 + 9e-6) / 2))
    assert "new.weight" not in memory.settled


def test_what_is_held_of_tensors_settles_their_spacings_and_else_each_frame_does():
    memory = {"movement": 1e-3, "rate": 1e-3}
    config = LatticeCodec(coarseness=4.0)
    specs = [spec_of(normal((30, 30), i), f"layer{i}.weight") for i in range(2)]
    vector = spec_of(normal((300,), 0, scale=1.0), "norm.weight")

    def plan(seconds, memory):
        items = [
            item_of(spec, normal((30, 30), i), second_moment=torch.full((30, 30), seconds[i]))
            for i, spec in enumerate(specs)
        ]
        items.append(TensorInput(spec=vector, tensor=normal((300,), 0, scale=1.0)))
        seen = [config.observe(item, None) for item in items]
        return config.plan([*specs, vector], seen, FrameContext(memory=memory))

    first, second = plan((1.0, 16.0), memory), plan((16.0, 1.0), memory)
    assert first.tensors["layer0.weight"].width > first.tensors["layer1.weight"].width
    assert second.tensors["layer0.weight"].width < second.tensors["layer1.weight"].width
    assert second.memory["held"] == {}
    settled = {"held": {"layer0.weight": 512, "layer1.weight": -512}}
    third, fourth = (plan(seconds, memory | settled) for seconds in ((1.0, 16.0), (16.0, 1.0)))
    assert [plan.width for plan in third.tensors.values()] == [plan.width for plan in fourth.tensors.values()]
    for plan_of_frame in (first, third):
        assert plan_of_frame.tensors["norm.weight"].width == pytest.approx(0.25 * 4e-3)


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
