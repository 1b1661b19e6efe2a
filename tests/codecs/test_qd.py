"""The QD codec keeps the laws, and its own promises: a width per layer, ranges that follow it."""

import numpy as np
import pytest

from inshrink_core.codec import TensorInput
from inshrink_core.testing.codecs import CodecSuite, state_bits
from inshrink_lab.published.qd import QdCodec, weighted_entropy
from tests.strategies import normal, spec_of

CODEC = QdCodec()


def encode(tensors, config, references=None):
    references = references or [None] * len(tensors)
    specs = [spec_of(tensor, f"layer{i}.weight") for i, tensor in enumerate(tensors)]
    items = [TensorInput(spec=s, tensor=t) for s, t in zip(specs, tensors, strict=True)]
    pairs = list(zip(items, references, strict=True))
    plan = config.plan(specs, [config.observe(item, before) for item, before in pairs])
    return [config.encode(item, plan, before) for item, before in pairs]


class TestQdDefaults(CodecSuite):
    codec = QdCodec()


class TestQdNarrow(CodecSuite):
    codec = QdCodec(bits=1, spread=7, grid="held", coder="rans", vectors="exact")


def test_weighted_entropy_counts_a_symbol_by_the_importance_of_its_values():
    symbols = np.array([0, 0, 0, 1], np.uint8)
    assert weighted_entropy(symbols, np.ones(4)) == pytest.approx(0.8113, abs=1e-4)
    # All importance with the rare symbol: its information alone, two bits.
    assert weighted_entropy(symbols, np.array([0, 0, 0, 5.0])) == 2.0
    assert weighted_entropy(symbols, np.zeros(4)) == 0.0


def test_a_layer_with_less_than_half_of_the_entropy_gets_fewer_bits():
    rich = normal((100, 100), 0)
    poor = (normal((100, 100), 1) > 0).float()
    widths = [e.reference.grid.bits for e in encode([rich, poor], QdCodec(bits=6, spread=2))]
    assert widths == [6, 4]
    assert [e.reference.grid.bits for e in encode([rich, poor], QdCodec(bits=6, spread=0))] == [6, 6]


def test_a_layer_keeps_its_width_along_a_chain_and_follows_its_range():
    rich, poor = normal((100, 100), 0), (normal((100, 100), 1) > 0).float()
    config = QdCodec(bits=6, spread=2)
    first = [e.reference for e in encode([rich, poor], config)]
    second = [e.reference for e in encode([rich * 0.9, normal((100, 100), 2)], config, first)]
    assert [state.grid.bits for state in second] == [6, 4]
    assert second[0].grid.high == pytest.approx(0.9 * first[0].grid.high)


def test_a_width_outside_the_config_is_given_up():
    values = normal((50, 50), 0)
    (first,) = encode([values], QdCodec(bits=8, spread=0))
    (second,) = encode([values], QdCodec(bits=5, spread=1), [first.reference])
    assert second.reference.grid.bits == 5
    decoded = CODEC.decode(spec_of(values, "layer0.weight"), second.block, first.reference)
    assert state_bits(decoded) == state_bits(second.reference)
