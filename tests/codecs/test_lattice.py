"""The lattice codec keeps the laws, and its own promises: closed loop, matched gain, re-keying."""

import pytest
import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import BaseReference, FrameContext
from inshrink_core.codecs.exact import encode_exact
from inshrink_core.codecs.lattice.block import LatticeReference
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.frame import Block
from inshrink_core.ops.sample import sample
from inshrink_core.testing.codecs import CodecSuite, state_bits
from tests.codecs.lattice_chains import CODEC, chain, frame, item_of, moving
from tests.strategies import normal, spec_of


class TestDefaults(CodecSuite):
    codec = LatticeCodec()
    largest = 1, 1


class TestRestored(TestDefaults):
    codec = LatticeCodec(coarseness=3.0)

    def make_item(self, spec, tensor):
        restored = None
        if tensor.dtype.is_floating_point:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)) * 0.001
            restored = (tensor.float() + noise).to(tensor.dtype)
        return item_of(spec, tensor, restored=restored, second_moment=restored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_error_builds_up_along_a_chain(dtype):
    frames = [tensor.to(dtype) for tensor in moving(12)]
    config = LatticeCodec(coarseness=2.0)
    _, reference, _ = chain(frames, config)
    error = (reference.decoded().float() - frames[-1].float()).abs().max()
    rounding = 0.1 * 2.0**-8 if dtype is not torch.float32 else 0.0
    assert float(error) <= 0.51 * reference.step_size.width + rounding
    assert reference.decoded().dtype == dtype


@pytest.mark.parametrize(("config", "bits"), [(LatticeCodec(), 3.4), (LatticeCodec(coarseness=2.5), 1.4)])
def test_a_delta_takes_three_bits_a_weight_by_default_and_one_where_it_is_coarser(config, bits):
    blocks, _, _ = chain(moving(6, (300, 300)), config, second_moment=torch.rand(300, 300))
    assert len(blocks[-1].payload) * 8 < bits * 90_000


def test_rows_and_columns_of_unlike_size_are_coded_in_contexts():
    scale = torch.logspace(-2, 0, 100)
    unlike = normal((100, 200), 0) * scale[:, None]
    shuffled = unlike.flatten()[torch.randperm(20_000, generator=torch.Generator().manual_seed(1))]
    config = LatticeCodec(coarseness=0.5)
    sizes = [len(frame(t, config)[0].block.payload) for t in (unlike, shuffled.view(100, 200))]
    assert sizes[0] < 0.95 * sizes[1]


def test_negative_zero_becomes_zero():
    tensor = torch.full((20, 20), -0.0)
    tensor[0] = 1.0
    restored = frame(tensor)[0].reference.decoded()
    assert not bool(torch.signbit(restored[1:]).any())


def test_outliers_are_kept_as_they_are():
    tensor = normal((60, 60), 0)
    tensor[3, 4] = 1e20
    first = frame(normal((60, 60), 0))[0].reference
    (block, after), _ = frame(tensor, None, first)
    decoded = CODEC.decode(spec_of(tensor), block, first)
    assert float(decoded.decoded()[3, 4]) == float(tensor[3, 4])
    assert state_bits(decoded) == state_bits(after)


def test_vectors_have_a_fine_lattice():
    vector = normal((300,), 0, scale=1.0)
    restored = frame(vector)[0].reference.decoded()
    assert 0 < float((restored - vector).abs().max()) <= 0.51 * 2**-11 * 1.2


# After a restore


def test_after_a_restore_the_movement_is_kept():
    _, reference, plans = chain(moving(4), LatticeCodec(coarseness=4.0))
    base = reference.decoded()
    movement = normal((100, 120), 77, scale=1e-3)
    arrived = {}
    for restored in (None, base):
        context = FrameContext(
            learning_rates={"layer.weight": 1e-3},
            memory=CODEC.remember(plans[-1]),
            after_restore=restored is not None,
        )
        config = LatticeCodec(coarseness=4.0)
        encoded, _ = frame(base + movement, config, reference, context=context, restored=restored)
        decoded = CODEC.decode(spec_of(base), encoded.block, reference)
        assert state_bits(decoded) == state_bits(encoded.reference)
        arrived[restored is not None] = float(
            ((decoded.decoded() - base) * movement).sum() / (movement * movement).sum()
        )
    assert arrived[True] == pytest.approx(1.0, abs=0.05)
    assert arrived[False] < 0.95


def test_after_a_restore_the_step_is_halved_until_the_movement_shows():
    _, reference, _ = chain(moving(3), LatticeCodec(coarseness=4.0))
    base = reference.decoded()
    movement = normal((100, 120), 5, scale=1e-5)
    encoded, _ = frame(base + movement, LatticeCodec(coarseness=4.0), reference, restored=base)
    assert encoded.reference.step_size.width < 20e-5
    arrived = encoded.reference.decoded() - base
    assert float((arrived * movement).sum() / (movement * movement).sum()) == pytest.approx(1.0, abs=0.1)


def test_restored_values_that_are_not_finite_are_ignored_and_unlike_ones_refused():
    weights = normal((30, 30), 0)
    reference = frame(weights)[0].reference
    nan = torch.full((30, 30), float("nan"))
    plain = frame(weights + 1e-3, None, reference)[0].block.payload
    assert frame(weights + 1e-3, None, reference, restored=nan)[0].block.payload == plain
    with pytest.raises(InputError, match="differs"):
        frame(weights, None, reference, restored=weights[:2])


# Re-keying, bytes, configs


def test_a_payload_put_together_by_hand_decodes():
    # Stands alone, unit 2^-2, step 3, four tokens; rANS mode 0 packs 2 bits each: 0, 1, 2, 3.
    payload = bytes([0x01, 0xFE, 3, 3, 0, 0b11100100])
    spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype="float32", shape=(2, 2))
    decoded = CODEC.decode(spec, Block("lattice/1", payload), None)
    assert decoded.decoded().tolist() == [[0.0, -0.75], [0.75, -1.5]]
    # A delta of the same tokens, unit halved, step 1; nothing tracked.
    payload = bytes([0x02, 1, 1, 3, 0, 0b11100100])
    moved = CODEC.decode(spec, Block("lattice/1", payload), decoded)
    assert moved.decoded().tolist() == [[0.0, -0.875], [0.875, -1.75]]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "empty"),
        (b"\x06", "no known kind"),
        (b"\x05", "needs a base model"),
        (b"\x00", "no reference"),
        (b"\x02\x00\x01", "no reference"),
        (b"\x01", "cut short"),
        (b"\x01\x7f\x01\x01", "exponent"),
        (b"\x01\x00\x00\x01", "step size"),
        (b"\x11\x00\x01\x01", "context state"),
        (b"\x01\x00\x01\xff\x00", "too many tokens"),
        (b"\x21\x00\x01\x01\x00", "classes"),
        (b"\x41\x00\x01\x7f\x00", "cut short"),
        (b"\x81\x00\x01\x01\x00\x01\x00\x05", "belong to no token"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(payload, message):
    spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype="float32", shape=(2, 2))
    with pytest.raises(DamagedError, match=message):
        CODEC.decode(spec, Block("lattice/1", payload), None)


def test_a_state_takes_five_bytes_a_weight():
    _, reference, _ = chain(moving(3))
    assert isinstance(reference, LatticeReference)
    assert reference.context_state is not None
    tensors = (reference.integers, reference.context_state, reference.exact_at, reference.exact_values)
    assert sum(tensor.nbytes for tensor in tensors) == 5 * 12_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_seen_of_a_sample_is_what_is_seen_of_the_whole(dtype):
    codec, shape = LatticeCodec(), (300, 100)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype=dtype, shape=shape)
    beside = {"second_moment": values.float().square(), "momentum": values.float() / 7}
    full = item_of(spec, values, **beside)
    plan = codec.plan([spec], [codec.observe(full, None)])
    samples = {name: sample(tensor.view(-1)) for name, tensor in beside.items()}
    item = item_of(spec, sample(values.view(-1)), **samples)
    moved = item_of(spec, values + 0.01, **beside)
    for reference in (None, codec.encode(moved, plan, None).reference):
        assert codec.observe(item, reference) == codec.observe(full, reference)
    assert codec.look_ahead(spec, iter([(0, item)])) == codec.look_ahead(spec, iter([(0, full)]))


def test_the_distance_that_a_state_tells_is_that_to_what_it_decodes_to():
    tensor = normal((1100, 1000), 1, scale=1.0)
    (_, reference), plan = frame(tensor)
    away = (tensor - reference.decoded()).double()
    error, norm = reference.distance(tensor)
    assert error == pytest.approx(float(away.square().sum()), rel=1e-9)
    assert norm == pytest.approx(float(tensor.double().square().sum()), rel=1e-9)
    assert reference.distance(tensor.half()) is None
    far = item_of(spec_of(tensor, "layer.weight"), tensor.index_fill(1, torch.tensor([3]), 1e30))
    assert CODEC.encode(far, plan, None).reference.distance(far.tensor) is None


def test_block_upon_a_base_is_refused_without_it_and_reaches_the_points_of_one_that_stands_alone():
    base = normal((64, 64), 1, scale=1.0)
    tensor = base + normal((64, 64), 2, scale=1e-3)
    base[0, 0], base[0, 1] = torch.nan, 1e30
    spec = spec_of(tensor, "layer.weight")
    block, reference = frame(tensor, None, BaseReference(base.clone))[0]
    alone = frame(tensor)[0]
    assert block.codec == alone.block.codec == "lattice/1"
    assert len(block.payload) < 0.5 * len(alone.block.payload)
    assert torch.equal(reference.decoded(), alone.reference.decoded())
    with pytest.raises(DamagedError, match="needs a base model"):
        CODEC.decode(spec, block, None)
    rekeyed = CODEC.rekey(spec, reference)
    assert rekeyed.codec == "lattice/1"
    assert torch.equal(CODEC.decode(spec, rekeyed, None).decoded(), reference.decoded())


def test_base_of_no_use_is_left_alone():
    tensor, other = normal((64, 64), 3, scale=1.0), normal((64, 64), 4, scale=40.0)
    assert frame(tensor, None, BaseReference(other.clone))[0].block == frame(tensor)[0].block


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pace", [1e-6, 1e-4])
@pytest.mark.parametrize("coarseness", [0.01, 4.0])
def test_numbers_of_16_bits_never_take_more_than_the_exact_codec_stores(dtype, pace, coarseness):
    tensors = [tensor.to(getattr(torch, dtype)) for tensor in moving(5, pace=pace)]
    codec, spec = LatticeCodec(coarseness=coarseness), spec_of(tensors[0], "layer.weight")
    state, exact, total, exact_total = None, None, 0, 0
    memory = {"movement": pace}  # what a look at the run finds
    for tensor in tensors:
        (block, after), plan = frame(tensor, codec, state, context=FrameContext(memory=memory))
        beside = encode_exact(spec, tensor, state)
        assert len(block.payload) <= len(beside.block.payload)
        encoded = encode_exact(spec, tensor, exact)
        state, exact, memory = after, encoded.reference, codec.remember(plan)
        total, exact_total = total + len(block.payload), exact_total + len(encoded.block.payload)
    assert total <= exact_total
