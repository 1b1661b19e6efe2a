"""The moments codec keeps the laws, and its own promises about scale."""

import dataclasses

import pytest
import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput
from inshrink_core.codecs.moments.codec import MomentsCodec, MomentsPlan
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from tests.strategies import normal

CODEC = MomentsCodec()


def spec_of(tensor, role=TensorRole.EXP_AVG):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name="w", role=role, dtype=dtype, shape=tuple(tensor.shape))


def item_of(tensor, role, second=None):
    return TensorInput(spec=spec_of(tensor, role), tensor=tensor, auxiliaries={TensorRole.EXP_AVG_SQ: second})


def encode(tensor, role, preset="fidelity", reference=None, second=None):
    return MomentsCodec(preset=preset).encode(item_of(tensor, role, second), None, reference)


class _OfRole(CodecSuite):
    codec = MomentsCodec()
    role = TensorRole.EXP_AVG

    def make_item(self, spec, tensor):
        return TensorInput(spec=dataclasses.replace(spec, role=self.role), tensor=tensor)


class TestFirstMoment(_OfRole):
    pass


class _Positive(_OfRole):
    role = TensorRole.EXP_AVG_SQ

    def make_item(self, spec, tensor):
        positive = tensor.dtype.is_floating_point and not spec.exact
        return super().make_item(spec, tensor.abs() if positive else tensor)


class TestSecondMomentFactored(_Positive):
    def assert_survives(self, tensor, restored):
        super().assert_survives(tensor.abs() if tensor.dtype.is_floating_point else tensor, restored)


class TestSecondMomentRankOne(TestSecondMomentFactored):
    codec = MomentsCodec(preset="ratio")


def second_moments(seed, shape=(200, 50)):
    """Return squares of normal values on a rank-one scale: what Adam gathers of a linear layer."""
    rows, columns = torch.logspace(-9, -6, shape[0]), torch.logspace(-1, 1, shape[1])
    return normal(shape, seed).square() * rows[:, None] * columns[None, :]


def test_a_second_moment_is_within_half_an_octave_and_zero_only_where_it_was_zero():
    second = second_moments(0)
    second[3, 4] = 0
    second[5, 6] = 1e-38
    second[7] = 0
    decoded = encode(second, TensorRole.EXP_AVG_SQ).reference.decoded()
    assert torch.equal(decoded == 0, second == 0)
    ratio = decoded[second > 1e-30] / second[second > 1e-30]
    assert float(ratio.max()) <= 2**0.5 * 1.0001
    assert float(ratio.min()) >= 2**-0.5 * 0.9999


def test_a_second_moment_stays_within_an_octave_over_a_chain_and_never_becomes_zero():
    second, reference = second_moments(1), None
    for step in range(6):
        second = 0.6 * second + 0.4 * second_moments(10 + step) * 0.8**step
        reference = encode(second, TensorRole.EXP_AVG_SQ, reference=reference).reference
        ratio = reference.decoded() / second
        assert float(ratio.min()) >= 0.499
        assert float(ratio.max()) <= 2.002


def restored_and_true(shape, decay, every, steps=40):
    """Return second moments, restored at every so many saves, and the logarithms they go to.

    Between two saves they keep a share of `decay`, and the rest is that of new gradients, about their goal.
    """
    generator = torch.Generator().manual_seed(3)
    goal, started = torch.randn(2, *shape, generator=generator).unbind()
    restored = true = 1e-6 * started.exp2()
    reference = None
    for step in range(steps):
        plan = MomentsPlan(after_restore=step > 0 and (step - 1) % every == 0)
        item = item_of(restored.contiguous(), TensorRole.EXP_AVG_SQ)
        reference = CODEC.encode(item, plan, reference).reference
        if step % every == 0:
            restored = reference.decoded()
        new = 1e-6 * (goal + 0.5 * torch.randn(shape, generator=generator)).exp2()
        restored, true = (decay * one + (1 - decay) * new for one in (restored, true))
    return restored, true, goal


def slope_of(restored, true, goal):
    """Return how far the logarithms of restored moments stay behind, over how far they go."""
    behind = (true / restored).log2()
    return float((behind * goal).sum() / goal.square().sum())


@pytest.mark.parametrize(("every", "decay"), [(1, 0.6), (1, 0.95), (3, 0.8)])
@pytest.mark.parametrize("shape", [(64, 96), (3000,)])
def test_second_moments_get_where_they_go_however_often_training_is_restored(shape, decay, every):
    restored, true, goal = restored_and_true(shape, decay, every)
    assert abs(slope_of(restored, true, goal)) < 0.06
    assert abs(float((restored / true).log2().mean())) < 0.12


def test_octaves_that_were_drawn_are_drawn_alike_by_another_session():
    second, plan = second_moments(4), MomentsPlan(after_restore=True)
    spec = spec_of(second, TensorRole.EXP_AVG_SQ)
    first = CODEC.encode(item_of(second, TensorRole.EXP_AVG_SQ), None, None)
    for nth in (1, 2):
        # So near to the codes that no threshold would move what moves steadily.
        near = item_of(first.reference.decoded() * 1.01, TensorRole.EXP_AVG_SQ)
        drawn = CODEC.encode(near, plan, first.reference)
        assert drawn.reference.dither_seed == nth
        again = CODEC.decode(spec, drawn.block, first.reference)
        later = item_of(second * 1.1, TensorRole.EXP_AVG_SQ)
        blocks = [CODEC.encode(later, None, one).block for one in (drawn.reference, again)]
        assert blocks[0] == blocks[1]
        first = first._replace(reference=again)
    assert CODEC.encode(later, None, None).reference.dither_seed == 0


def test_a_second_moment_that_has_not_moved_since_a_restore_keeps_its_octaves():
    first = encode(second_moments(5), TensorRole.EXP_AVG_SQ)
    same = item_of(first.reference.decoded(), TensorRole.EXP_AVG_SQ)
    after = CODEC.encode(same, MomentsPlan(after_restore=True), first.reference)
    moved = after.reference.codes.elements != first.reference.codes.elements
    assert float(moved.float().mean()) < 0.05  # Where a row or column has another factor.


@pytest.mark.parametrize("change", [{1: 0xA4, 4: 0}, {1: 0x62}, {1: 0x23}])
def test_a_draw_that_no_encoder_writes_is_refused(change):
    first = encode(second_moments(6), TensorRole.EXP_AVG_SQ).reference
    near = item_of(first.decoded() * 1.01, TensorRole.EXP_AVG_SQ)
    payload = bytearray(CODEC.encode(near, MomentsPlan(after_restore=True), first).block.payload)
    assert payload[1] == 0xA4
    for at, byte in change.items():
        payload[at] = byte
    with pytest.raises(DamagedError):
        CODEC.decode(near.spec, Block("moments/1", bytes(payload)), first)


def test_a_second_moment_that_drifts_as_a_whole_costs_its_rows_and_columns_alone():
    second = second_moments(2)
    first = encode(second, TensorRole.EXP_AVG_SQ)
    drifted = encode(second * 0.25, TensorRole.EXP_AVG_SQ, reference=first.reference)
    assert len(drifted.block.payload) < 60
    assert float((drifted.reference.decoded() / first.reference.decoded() - 0.25).abs().max()) == 0


def test_rank_one_factors_reproduce_a_rank_one_matrix_within_half_an_octave_and_are_never_zero():
    rows, columns = torch.logspace(-9, -3, 40), torch.logspace(-1, 1, 30)
    second = rows[:, None] * columns[None, :]
    encoded = encode(second, TensorRole.EXP_AVG_SQ, "ratio")
    ratio = encoded.reference.decoded() / second
    assert float(ratio.min()) > 2**-0.51
    assert float(ratio.max()) < 2**0.51
    assert len(encoded.block.payload) < 120


@pytest.mark.parametrize(
    ("role", "preset"),
    [(TensorRole.EXP_AVG, "fidelity"), (TensorRole.MOMENTUM, "fidelity"), (TensorRole.MOMENTUM, "ratio")],
)
def test_a_first_moment_keeps_its_projection_on_itself(role, preset):
    scale = torch.logspace(-4, 0, 60)[:, None]
    first, second = normal((60, 80), 1) * 0.2 * scale, (scale * torch.ones(60, 80)) ** 2
    decoded = encode(first, role, preset, second=second).reference.decoded()
    relative, left = first / scale, decoded / scale
    assert float((relative * left).sum() / relative.square().sum()) == pytest.approx(1, abs=0.05)


def test_a_first_moment_without_a_usable_second_takes_its_units_from_itself():
    first, second = normal((40, 40), 7), torch.ones(40, 40)
    alone = encode(first, TensorRole.EXP_AVG).block.payload
    for broken in (second * 0, second * float("nan"), second - 2):
        assert encode(first, TensorRole.EXP_AVG, second=broken).block.payload == alone
    assert encode(first, TensorRole.EXP_AVG, second=second).block.payload != alone


def test_a_first_moment_refers_to_the_units_of_the_one_before_alone():
    scale = torch.logspace(-4, 0, 300)[:, None]
    one, other = (normal((300, 40), seed) * scale for seed in (8, 9))
    before = encode(one, TensorRole.EXP_AVG, second=scale.square().expand(300, 40)).reference
    alone = encode(other, TensorRole.EXP_AVG, second=scale.square().expand(300, 40))
    delta = encode(other, TensorRole.EXP_AVG, second=scale.square().expand(300, 40), reference=before)
    assert len(delta.block.payload) < len(alone.block.payload) - 100
    decoded = CODEC.decode(spec_of(other), delta.block, before).decoded()
    assert torch.equal(decoded, alone.reference.decoded())


def test_the_ratio_preset_leaves_out_the_first_moment_but_never_a_momentum_buffer():
    values = normal((30, 30), 3)
    assert not encode(values, TensorRole.EXP_AVG, "ratio").reference.decoded().any()
    assert encode(values, TensorRole.MOMENTUM, "ratio").reference.decoded().any()


def test_a_negative_second_moment_is_stored_exactly():
    values = normal((10, 10), 5)
    encoded = encode(values, TensorRole.EXP_AVG_SQ)
    assert encoded.block.codec == "lossless/1"
    assert torch.equal(encoded.reference.decoded(), values)


@pytest.mark.parametrize(
    "payload",
    ["0184", "02010000", "01060000", "018100000102", "01800000", "0100000000", "01c40000", "01040000ff"],
)
def test_damaged_blocks_are_refused(payload):
    spec = TensorSpec(name="w", role=TensorRole.EXP_AVG_SQ, dtype="float32", shape=(3, 4))
    with pytest.raises(DamagedError):
        CODEC.decode(spec, Block("moments/1", bytes.fromhex(payload)), None)


BLOCKS = [
    ("01013aff030083c80400a2a23e002120bfdedf41", [[1.0, 0.5, 0.0], [4.0, 8.0, 2.0]]),
    ("01813aff00000200000200", [[1.0, 2.0, 0.0], [4.0, 32.0, 2.0]]),
    ("01023bff0300c3c90080817d", [[0.5, 0.5**0.5, 0.5**2.5], [4.0, 32**0.5, 2**0.5]]),
    ("01823bff0300020300fd02fd", [[0.5**1.5, 8**0.5, 0.125], [4.0, 32.0, 2**0.5]]),
    ("010337ff0300c6c904007e817e007a7d75848480", [[-(1.125**0.5), -1.5, -1.9445436], [2.0, 32**0.5, 0.0]]),
]
"""Blocks, and what they decoded to; the second and fourth refer to the one before."""


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_blocks_decode_to_the_values_they_always_had(place):
    spec = TensorSpec(name="w", role=TensorRole.EXP_AVG_SQ, dtype="float32", shape=(2, 3))
    block, before = Block("moments/1", bytes.fromhex(BLOCKS[place][0])), None
    if place in (1, 3):
        before = CODEC.decode(spec, Block("moments/1", bytes.fromhex(BLOCKS[place - 1][0])), None)
    decoded = CODEC.decode(spec, block, before).decoded()
    assert torch.allclose(decoded, torch.tensor(BLOCKS[place][1]), rtol=1e-6, atol=0)


def test_a_delta_of_another_base_or_form_is_refused():
    second = second_moments(3, (20, 20))
    before = encode(second, TensorRole.EXP_AVG_SQ).reference
    delta = encode(second * 1.5, TensorRole.EXP_AVG_SQ, reference=before)
    spec = spec_of(second, TensorRole.EXP_AVG_SQ)
    for other in (
        dataclasses.replace(before, codes=before.codes._replace(base=before.codes.base + 1)),
        encode(second, TensorRole.EXP_AVG).reference,
    ):
        with pytest.raises(DamagedError):
            CODEC.decode(spec, delta.block, other)


def test_values_of_any_size_have_a_unit():
    values = normal((20, 30), 11)
    for scale in (1e-44, 1e-30, 1e30, 3e37):
        decoded = encode(values * scale, TensorRole.MOMENTUM).reference.decoded()
        assert bool(decoded.isfinite().all())
        if scale > 1e-40:
            assert float((decoded * values).sum()) > 0
    values[3] *= 1e36
    assert bool(encode(values, TensorRole.MOMENTUM).reference.decoded().isfinite().all())


@pytest.mark.parametrize("preset", ["fidelity", "ratio"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_second_moment_of_half_precision_never_becomes_zero(dtype, preset):
    second, reference = (second_moments(12, (40, 30)) * 10).clamp_min(6e-8), None
    for _ in range(3):
        second = (second * 0.7).clamp_min(6e-8)
        reference = encode(second.to(dtype), TensorRole.EXP_AVG_SQ, preset, reference).reference
        assert bool((reference.decoded() > 0).all())


def test_the_second_version_writes_these_bytes():
    second = torch.tensor([[1.0, 0.5, 0.0], [4.0, 8.0, 2.0]])
    later = second * torch.tensor([1.0, 9.0, 1.0])
    first = torch.tensor([[0.5, -0.25, 0.0], [3.0, -1.0, 0.125]])
    alone = CODEC.encode_lossy(item_of(second, TensorRole.EXP_AVG_SQ), None, None)
    assert alone.block.payload.hex() == "01043bff0300c3c9040080817d00818000808080"
    delta = CODEC.encode_lossy(item_of(later, TensorRole.EXP_AVG_SQ), None, alone.reference)
    assert delta.block.payload.hex() == "01843bff030004050400fb02fb0100"
    alone = CODEC.encode_lossy(item_of(first, TensorRole.EXP_AVG, later + 0.5), None, None)
    assert alone.block.payload.hex() == "01033cff0300c5c904007e817d00818080818080"
    item = item_of(first * -2, TensorRole.EXP_AVG, later + 0.75)
    delta = CODEC.encode_lossy(item, None, alone.reference)
    assert delta.block.payload.hex() == "01833eff020100020100007f80807f8080"


def moved_by_rounding(reach, step_size, role=TensorRole.EXP_AVG):
    """Return what rounding a first moment moves its weights by in the end, as a root mean square."""
    torch.manual_seed(0)
    second = torch.rand(64, 1).exp() * torch.rand(1, 128).exp() * 1e-4
    root = second.sqrt() if role is TensorRole.EXP_AVG else torch.ones(())
    first = torch.randn(64, 128) * 0.23 * second.sqrt()
    context = FrameContext(expected_updates={"w": reach}, step_sizes={"w": step_size})
    item = item_of(first, role, second if role is TensorRole.EXP_AVG else None)
    encoded = CODEC.encode_lossy(item, CODEC.plan([], [], context), None)
    off = (encoded.reference.decoded() - first) / root
    return float((reach * off).square().mean().sqrt()), len(encoded.block.payload)


@pytest.mark.parametrize("role", [TensorRole.EXP_AVG, TensorRole.MOMENTUM])
def test_first_moments_are_as_fine_as_the_weights_they_still_move(role):
    reach = 0.02 if role is TensorRole.EXP_AVG else 1.0
    step_sizes = [0.006, 0.012, 0.024]
    errors, sizes = zip(*(moved_by_rounding(reach, one, role) for one in step_sizes), strict=True)
    for step_size, error in zip(step_sizes, errors, strict=True):
        # An error spread evenly over half a step size is .14 of it; keeping the projection costs the rest.
        assert 0.1 * step_size < error < 0.3 * step_size
    assert sizes[0] > 1.2 * sizes[1] > 1.2 * 1.2 * sizes[2]
    # The same momentum under a smaller learning rate moves weights less, so that it may be coarser.
    assert moved_by_rounding(reach / 2, 0.012, role)[1] == pytest.approx(sizes[2], rel=0.1)


def test_units_of_first_moments_stay_within_bounds_whatever_the_step_size():
    finest, coarsest = moved_by_rounding(1.0, 1e-9)[1], moved_by_rounding(1e-9, 1.0)[1]
    assert moved_by_rounding(1.0, 1e-12)[1] == finest > 2 * coarsest
    assert moved_by_rounding(1e-12, 1.0)[1] == coarsest > 64


def test_a_first_moment_without_a_second_keeps_its_unit():
    """It is not Adam's (Lion's is another), and what it moves a weight by is not known."""
    first = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    plain = CODEC.encode_lossy(item_of(first, TensorRole.EXP_AVG), None, None)
    planned = CODEC.encode_lossy(item_of(first, TensorRole.EXP_AVG), MomentsPlan({"w": 1e-6}), None)
    assert plain.block == planned.block
