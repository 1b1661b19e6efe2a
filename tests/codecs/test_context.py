"""The context-modelling codec keeps the laws, and its own promises: the past tells what comes."""

import pytest
import torch

from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite
from inshrink_lab.published.context import ContextCodec
from inshrink_lab.published.excp import ExcpCodec
from tests.codecs.lattice_chains import encode
from tests.strategies import bits, normal, spec_of

CODEC = ContextCodec()
SECOND = torch.full((200, 200), 1e-9)


def coded(values, reference=None):
    """Return the state after values, under second moments that prune little."""
    return encode(values, CODEC, reference, second_moment=torch.full(values.shape, 1e-9)).reference


class TestContextWide(CodecSuite):
    codec = ContextCodec(bits=8, keyframe="quantized", vectors="exact")

    def unchanged_bytes(self, tensor):
        # What a quantized keyframe lost is a residual like any other: 255 centroids at worst.
        return 1030 + tensor.numel()


def test_values_are_those_of_excp():
    values, moved = normal((80, 90), 0), normal((80, 90), 0) + normal((80, 90), 1, 1e-3)
    second = torch.full(values.shape, 1e-9)
    ours, theirs = (
        encode(moved, codec, encode(values, codec).reference, second_moment=second).reference
        for codec in (CODEC, ExcpCodec())
    )
    assert bits(ours.decoded()) == bits(theirs.decoded())


def _moves(seed):
    """Moves of which whole regions are large or small, the same ones in every frame."""
    scale = torch.kron((normal((10, 10), 7) > 0).float() + 0.02, torch.ones(20, 20))
    return normal((200, 200), seed, 1e-3) * scale


def test_regions_that_moved_before_tell_which_move_now():
    values = normal((200, 200), 0)
    start = coded(values)
    first = coded(values + _moves(1), start)
    goal = values + _moves(1) + _moves(2)
    informed = encode(goal, CODEC, first, second_moment=SECOND).block.payload
    # The same decoded values without their symbols: nothing is known of the regions.
    blind = encode(goal, CODEC, coded(first.decoded()), second_moment=SECOND).block.payload
    assert len(informed) < 0.9 * len(blind)


def test_symbols_of_a_tensor_without_centroids_are_refused():
    # delta, no centroids; which symbols are zero: none (a constant 1); no values
    payload = bytes([1, 0, 2, 1, 1, 0])
    reference = coded(torch.zeros(2, 2))
    with pytest.raises(DamagedError, match="alphabet"):
        CODEC.decode(spec_of(torch.zeros(2, 2)), Block("context/1", payload), reference)
