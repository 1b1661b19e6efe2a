"""Exact steps of the lattice codec: bit for bit, and the chain goes on as if they were ordinary ones."""

import pytest
import torch

from inshrink_core.codec import FrameContext
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.errors import ConfigError, DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from tests.codecs.lattice_chains import CODEC, frame, moving
from tests.strategies import bits, normal, spec_of


class TestExact(CodecSuite):
    codec = LatticeCodec(exact=True, coarseness=0.01)
    largest = 1, 1


def encode(tensor, reference, memory, exact):
    context = FrameContext(learning_rates={"layer.weight": 1e-3}, memory=memory)
    encoded, plan = frame(tensor, LatticeCodec(exact=exact), reference, context=context)
    return *encoded, CODEC.remember(plan)


def chain(exact_at):
    """Encode frames of a tensor that moves; those in `exact_at` exactly."""
    reference, memory, frames = None, None, []
    for t, tensor in enumerate(moving(5, (64, 80))):
        block, reference, memory = encode(tensor, reference, memory, t in exact_at)
        frames.append((tensor, block, reference))
    return frames


def test_the_frames_after_an_exact_step_are_those_of_a_chain_without_it():
    plain, mixed = chain(set()), chain({2})
    assert [len(block.payload) for _, block, _ in plain[:2]] == [len(b.payload) for _, b, _ in mixed[:2]]
    assert len(mixed[2][1].payload) > len(plain[2][1].payload)
    for (_, before, _), (_, after, _) in zip(plain[3:], mixed[3:], strict=True):
        assert before.payload == after.payload


def test_an_unchanged_tensor_after_an_exact_step_returns_to_its_lattice_points():
    tensor = normal((64, 80), 0)
    _, first, memory = encode(tensor, None, None, False)
    _, exact, memory = encode(tensor, first, memory, True)
    block, after, _ = encode(tensor, exact, memory, False)
    decoded = CODEC.decode(spec_of(tensor, "layer.weight"), block, exact).decoded()
    assert torch.equal(decoded, first.decoded())
    assert torch.equal(after.decoded(), first.decoded())


def test_a_rekeyed_exact_step_is_still_exact_and_still_on_its_lattice():
    frames = chain({2})
    tensor, _, reference = frames[2]
    spec = spec_of(tensor, "layer.weight")
    state = CODEC.decode(spec, CODEC.rekey(spec, reference), None)
    decoded = state.decoded()
    assert bits(decoded) == bits(tensor)
    later = CODEC.decode(spec, frames[3][1], state).decoded()
    assert torch.equal(later, frames[3][2].decoded())


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x13\x01\x00", "has no flags"),
        (b"\x03\x05\x00", "cut short"),
        (b"\x03\x03\x03\x01\x00\x01", "holds another"),
        (b"\x03\x00", "is empty"),
        (b"\x03\x01\x00", "no reference"),
    ],
)
def test_exact_blocks_that_contradict_themselves_are_refused(payload, message):
    spec = spec_of(normal((8, 8), 0), "layer.weight")
    with pytest.raises(DamagedError, match=message):
        CODEC.decode(spec, Block("lattice/1", payload), None)


def test_exact_is_a_switch():
    with pytest.raises(ConfigError, match="'exact' is a switch"):
        LatticeCodec(exact=1)
