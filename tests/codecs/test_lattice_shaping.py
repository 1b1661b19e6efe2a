"""Shaped rounding in the lattice codec: where it applies, what it costs, and that every session agrees."""

from dataclasses import replace

import pytest
import torch

import inshrink_core
from inshrink_core.codec import BaseReference, FrameContext, TensorInput
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.testing.codecs import CodecSuite, state_bits
from tests.codecs.lattice_chains import frame, item_of, moving
from tests.runs import payloads_of, write_run
from tests.strategies import bits, normal, spec_of

ON, OFF = (LatticeCodec(shaping=shaping, coarseness=2.0) for shaping in ("auto", "off"))
SHAPE = (100, 120)


def moment(seed):
    """A first moment that lies in few directions of its columns, and of its rows."""
    (rows, n), found = SHAPE, normal(SHAPE, 900 + seed)
    found = (found * torch.logspace(0, -2, n)) @ torch.linalg.qr(normal((n, n), 899))[0]
    return torch.linalg.qr(normal((rows, rows), 898))[0] @ (found * torch.logspace(0, -2, rows)[:, None])


def giving(moment):
    """Decode a moment that is exact, where there is one."""
    return None if moment is None else lambda: moment


def chain(tensors, codec, moments, **beside):
    """Encode frames as a chain does; return each with the state that decoding reaches."""
    memory, reference, found = {"movement": 1e-3}, None, []
    for i, tensor in enumerate(tensors):
        context = FrameContext(learning_rates={"layer.weight": 1e-3}, memory=memory)
        extra = {"gradient": moments[i]} if i == 0 else {"moment_before": giving(moments[i - 1])}
        encoded, plan = frame(tensor, codec, reference, context=context, **extra, **beside)
        memory, reference = codec.remember(plan), encoded.reference
        found.append(encoded)
    return found


class TestShaped(CodecSuite):
    codec = LatticeCodec(shaping="auto", coarseness=3.0)
    largest = 1, 1

    def make_item(self, spec, tensor):
        if not tensor.dtype.is_floating_point or tensor.dim() < 2:
            return TensorInput(spec=spec, tensor=tensor)
        first = normal(tuple(tensor.shape), 5) * 0.1
        return item_of(spec, tensor, gradient=first, moment_before=giving(first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
def test_decoding_reaches_the_state_that_encoding_returns(dtype, exact):
    codec = replace(ON, exact=exact)
    tensors = [tensor.to(dtype) for tensor in moving(5)]
    tensors.insert(3, tensors[2])  # a frame in which nothing moves
    reference = None
    for tensor, (block, after) in zip(
        tensors, chain(tensors, codec, [moment(i) for i in range(6)]), strict=True
    ):
        reference = codec.decode(spec_of(tensor, "layer.weight"), block, reference)
        restored = reference.decoded()
        assert state_bits(reference) == state_bits(after)
        assert not exact or bits(restored) == bits(tensor)
    alone = codec.rekey(spec_of(tensor, "layer.weight"), after)
    assert bits(codec.decode(spec_of(tensor, "layer.weight"), alone, None).decoded()) == bits(restored)


def test_frames_are_smaller_and_errors_cost_less():
    tensors, always = moving(8), moment(0)
    plain, shaped = (chain(tensors, codec, [always] * 8) for codec in (OFF, ON))
    inputs, outputs = (always.T @ always).double(), (always @ always.T).double()

    def cost(found):
        errors = [(e.reference.decoded() - t).double() for e, t in zip(found, tensors, strict=True)]
        return sum(float(torch.trace(outputs @ error @ inputs @ error.T)) for error in errors)

    def size(found):
        return sum(len(encoded.block.payload) for encoded in found)

    assert size(shaped) < 0.95 * size(plain)
    assert cost(shaped) < 0.95 * cost(plain)


@pytest.mark.parametrize(
    "moments", [None, normal(SHAPE, 77), torch.full(SHAPE, float("nan")), torch.zeros(SHAPE)]
)
def test_without_a_first_moment_or_with_a_white_one_rounding_is_plain(moments):
    tensors = moving(4)
    plain, shaped = (chain(tensors, codec, [moments] * 4) for codec in (OFF, ON))
    assert [encoded.block for encoded in plain] == [encoded.block for encoded in shaped]


def test_vectors_and_narrow_matrices_are_rounded_plainly():
    for shape in ((500,), (200, 4)):
        tensor, first = normal(shape, 1), normal(shape, 2)
        blocks = [frame(tensor, codec, gradient=first)[0].block for codec in (OFF, ON)]
        assert blocks[0] == blocks[1]


def test_after_a_restore_the_movement_is_kept_within_the_feedback():
    before = chain(moving(3), ON, [moment(i) for i in range(3)])[-1].reference
    restored = before.decoded()
    movement = normal(SHAPE, 60, scale=1e-3)
    context = FrameContext(
        learning_rates={"layer.weight": 1e-3}, after_restore=True, memory={"movement": 1e-3}
    )
    (_, after), _ = frame(
        restored + movement, ON, before, context=context, restored=restored, moment_before=giving(moment(3))
    )
    arrived = after.decoded() - restored
    assert -0.01 < float((arrived * movement).sum() / movement.square().sum()) - 1 < 0.04
    assert not torch.equal(arrived.sign(), movement.sign())


def test_a_step_size_that_grows_snaps_and_shapes():
    tensors, moments = moving(3), [moment(i) for i in range(3)]
    first = chain(tensors[:2], ON, moments)[-1].reference
    coarse = replace(ON, coarseness=32.0)
    context = FrameContext(memory={"movement": 1e-3})
    (block, after), _ = frame(tensors[2], coarse, first, context=context, moment_before=giving(moments[1]))
    spec = spec_of(tensors[2], "layer.weight")
    assert state_bits(coarse.decode(spec, block, first)) == state_bits(after)
    assert after.step_size.width > 4 * first.step_size.width
    assert not (after.integers % after.step_size.units).any()


def test_no_restored_bit_depends_on_a_base():
    tensor = normal(SHAPE, 1)
    base = BaseReference(lambda: tensor + normal(SHAPE, 3, scale=1e-3))
    alone = frame(tensor, ON, gradient=moment(0))[0]
    based = frame(tensor, ON, base, gradient=moment(0))[0]
    assert len(based.block.payload) < len(alone.block.payload)
    assert bits(based.reference.decoded()) == bits(alone.reference.decoded())


def compressed(run, path, **settings):
    inshrink_core.compress(run, path, look_ahead=False, coarseness=2.0, threads=1, **settings)
    return payloads_of(path)


@pytest.mark.parametrize("optimizer", ["compressed", "exact", "drop"])
def test_two_sessions_write_the_frames_of_one(tmp_path, optimizer):
    run = inshrink_core.open(write_run(tmp_path / "run", n_steps=6))
    on = {"settings": {"shaping": "auto"}, "optimizer": optimizer}
    once = compressed(run, tmp_path / "once", **on)
    compressed(run, tmp_path / "twice", steps=run.steps[:4], **on)
    assert compressed(run, tmp_path / "twice", steps=run.steps[4:], **on) == once
    plainly = {"settings": {"shaping": "off"}, "optimizer": optimizer}
    assert compressed(run, tmp_path / "plain", **plainly) != once


@pytest.mark.parametrize("shape", [(60, 48), (40, 48), (50, 96)])
def test_a_matrix_that_is_resized_is_not_shaped_by_a_moment_from_before(tmp_path, shape):
    (tmp_path / "run").mkdir()
    originals = {}
    for step, sides in enumerate([(50, 48)] * 3 + [shape] * 3, 1):
        originals[step] = normal(sides, step // 4) + 1e-3 * normal(sides, 50 + step)
        moments = {"exp_avg": normal(sides, 100 + step), "exp_avg_sq": normal(sides, 200 + step).square()}
        optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        content = {"model": {"fc.weight": originals[step]}, "optimizer": optimizer, "step": step}
        torch.save(content, tmp_path / f"run/{step}.pt")
    run = inshrink_core.open(tmp_path / "run")
    once = compressed(run, tmp_path / "once")
    for step, original in originals.items():
        twice = compressed(run, tmp_path / "stepwise", steps=[step])
        restored = inshrink_core.open(tmp_path / "once")[step]["fc.weight"]
        assert (restored - original).norm() < 0.2 * original.norm()
    assert twice == once


def test_errors_are_said_to_last_longer_where_rounding_is_shaped():
    codec, white = ON, [normal(SHAPE, i) for i in range(6)]
    shaped, plain = (chain(moving(6), codec, of)[-1].reference for of in ([moment(0)] * 6, white))
    numel, most = SHAPE[0] * SHAPE[1], codec.error_persistence(0, 0)
    assert codec.shaped([shaped, plain]) == (numel, 2 * numel)
    assert codec.error_persistence(*codec.shaped([shaped])) == most > 1
    assert codec.error_persistence(*codec.shaped([plain])) == 1
    assert codec.error_persistence(*codec.shaped([shaped, plain])) == pytest.approx((1 + most) / 2)
    assert OFF.error_persistence(*OFF.shaped([shaped])) == 1
