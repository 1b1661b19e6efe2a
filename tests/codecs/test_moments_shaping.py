"""Shaped rounding of first moments: smaller where the loss is flat, and the same in every session."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import PastFrame, TensorInput
from inshrink_core.codecs.moments.codec import MomentsCodec, MomentsPlan
from inshrink_core.codecs.shaping import grown
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from tests.codecs.test_moments import spec_of
from tests.strategies import normal

PLAIN, SHAPED = MomentsCodec(), MomentsCodec(preset="shaped")
SHAPE = (100, 120)
SECOND = torch.full(SHAPE, 1e-4)


def moment(seed: int) -> torch.Tensor:
    """A first moment of few directions, the same ones for every seed."""
    (rows, n), found = SHAPE, normal(SHAPE, 900 + seed)
    along, down = (torch.linalg.qr(normal((k, k), 899))[0] * torch.logspace(0, -3, k) for k in (n, rows))
    return down @ found @ along.T


class TestShapedFirstMoment(CodecSuite):
    codec = SHAPED

    def make_item(self, spec, tensor):
        return TensorInput(spec=replace(spec, role=TensorRole.EXP_AVG), tensor=tensor)


class TestShapedMomentum(CodecSuite):
    codec = SHAPED

    def make_item(self, spec, tensor):
        return TensorInput(spec=replace(spec, role=TensorRole.MOMENTUM), tensor=tensor)


def chain(codec, moments, second=SECOND):
    """Encode first moments as a chain does."""
    reference, found = None, []
    for one in moments:
        item = TensorInput(spec=spec_of(one), tensor=one, second_moment=second)
        found.append(codec.encode(item, MomentsPlan(), reference))
        reference = found[-1].reference
    return found


def size(found):
    return sum(len(one.block.payload) for one in found)


def error_of(encoded, true):
    return (encoded.reference.decoded() - true).double()


def test_first_moments_are_smaller_and_their_errors_cost_no_more():
    moments = [moment(i) for i in range(9)]
    plain, shaped = chain(PLAIN, moments), chain(SHAPED, moments)
    # Judged by moments that no encoder has seen.
    others = [moment(i).double() for i in range(20, 40)]
    inputs, outputs = sum(m.T @ m for m in others), sum(m @ m.T for m in others)

    def cost(found):
        errors = [error_of(*pair) for pair in zip(found, moments, strict=True)]
        return sum(float(torch.trace(outputs @ error @ inputs @ error.T)) for error in errors[1:])

    assert shaped[0].reference.codes.elements.equal(plain[0].reference.codes.elements)
    assert size(shaped[1:]) < 0.85 * size(plain[1:])
    assert cost(shaped) < cost(plain)
    for encoded, true in zip(shaped, moments, strict=True):
        kept = float((encoded.reference.decoded() * true).sum() / true.square().sum())
        assert 0.98 < kept < 1.05


def test_a_state_knows_how_much_of_it_is_errors():
    for encoded, true in zip(
        chain(SHAPED, [moment(i) for i in range(4)]), map(moment, range(4)), strict=True
    ):
        share = float(
            error_of(encoded, true).square().sum() / encoded.reference.decoded().double().square().sum()
        )
        assert encoded.reference.noise == pytest.approx(share, abs=0.05)
        assert 0.05 < encoded.reference.noise < 0.95
    assert chain(PLAIN, [moment(0)])[0].reference.noise == 0


def test_what_coarse_moments_say_is_nearly_what_fine_ones_say():
    decoded, blind, true = None, None, None
    for i in range(8):
        (encoded,) = chain(SHAPED, [moment(i)])
        state = encoded.reference
        decoded = grown(decoded, lambda state=state: (state.decoded(), state.noise))
        blind = grown(blind, lambda state=state: (state.decoded(), 0.0))
        true = grown(true, lambda i=i: (moment(i), 0.0))
    for found, at_sight, expected in (
        (decoded.columns, blind.columns, true.columns),
        (decoded.rows, blind.rows, true.rows),
    ):
        share, known = found.factors[1.0].share, expected.factors[1.0].share
        assert abs(share - known) < 0.7 * (at_sight.factors[1.0].share - known)


@pytest.mark.parametrize(
    "moments", [[normal(SHAPE, i) for i in range(3)], [normal((500,), i) for i in range(3)]]
)
def test_where_nothing_is_gained_integers_are_those_of_plain_rounding(moments):
    second = torch.full_like(moments[0], 1e-4)
    plain, shaped = (chain(codec, moments, second) for codec in (PLAIN, SHAPED))
    for one, other in zip(plain, shaped, strict=True):
        assert one.reference.codes.elements.equal(other.reference.codes.elements)


def test_values_no_unit_can_project_are_rounded_plainly():
    spiked = [moment(i) for i in range(3)]
    spiked[2] = torch.zeros(SHAPE)
    spiked[2][3, 4] = 1.0
    found = chain(SHAPED, spiked)[-1]
    kept = float((found.reference.decoded() * spiked[2]).sum())
    assert 0.9 < kept < 1.1


def test_a_recalled_state_holds_what_the_encoder_held():
    moments = [moment(i) for i in range(6)]
    moments[4] = moments[3]
    found = chain(SHAPED, moments)
    found.append(SHAPED.unchanged(spec_of(moments[0]), found[-1].reference))
    found.append(
        SHAPED.encode(
            TensorInput(spec=spec_of(moments[5]), tensor=moment(6), second_moment=SECOND),
            MomentsPlan(),
            found[-1].reference,
        )
    )
    past = [PastFrame(found[0].block, {}, None)]
    past += [
        PastFrame(
            after.block,
            {},
            lambda before=before: (before.reference.decoded(), before.reference.noise),
        )
        for before, after in itertools.pairwise(found)
    ]
    recalled = SHAPED.recall(replace(found[-1].reference, shaping=None), past).shaping
    held = found[-1].reference.shaping
    assert (
        recalled.n_seen == held.n_seen == 6
    )  # of eight frames the first has none before it, and one repeats
    for one, other in ((recalled.columns, held.columns), (recalled.rows, held.rows)):
        assert np.array_equal(one.sketch, other.sketch)
        assert one.noise == other.noise > 0


@pytest.mark.parametrize("change", [{1: 0x14}, {4: 0}, {1: 0x53}])
def test_errors_that_no_encoder_writes_are_refused(change):
    (first,) = chain(SHAPED, [moment(0)])
    payload = bytearray(first.block.payload)
    assert payload[1] == 0x13
    for at, byte in change.items():
        payload[at] = byte
    with pytest.raises(DamagedError):
        SHAPED.decode(spec_of(moment(0)), Block("moments/1", bytes(payload)), first.reference)
