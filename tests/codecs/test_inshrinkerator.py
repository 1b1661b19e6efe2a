"""The Inshrinkerator codec keeps the laws, and its own promises: what is spared, changes of config, bytes."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import TensorInput
from inshrink_core.codecs.inshrinkerator.codec import InshrinkeratorCodec
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.testing.codecs import CodecSuite, state_bits
from tests.codecs.lattice_chains import encode
from tests.strategies import bits, normal, spec_of

_GOLDEN = Path(__file__).parent / "golden" / "inshrinkerator-1.json"
CODEC = InshrinkeratorCodec()


class _WithGradients(CodecSuite):
    codec = CODEC

    def make_item(self, spec, tensor):
        gradient = None
        if tensor.dtype.is_floating_point:
            gradient = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
        return TensorInput(spec=spec, tensor=tensor, auxiliaries={TensorRole.GRADIENT: gradient})


class TestDefaults(CodecSuite):
    codec = InshrinkeratorCodec()


class TestPublished(_WithGradients):
    codec = InshrinkeratorCodec(fit="published", codebook="refit", prune=0.2, protect=0.01)


class TestSensitivity(_WithGradients):
    codec = InshrinkeratorCodec(bins=254, prune=0.3, prune_metric="sensitivity", protect=0.05)


# Partition


def test_thresholds_are_pooled_over_the_tensors_of_a_layer_type():
    small, large = normal((100, 100), 0, scale=0.01), normal((100, 100), 1, scale=1.0)
    config = InshrinkeratorCodec(prune=0.4, protect=0.0)
    specs = [spec_of(small, "a.weight"), spec_of(large, "b.weight")]
    items = [TensorInput(spec=s, tensor=t) for s, t in zip(specs, (small, large), strict=True)]
    plan = config.plan(specs, [config.observe(item, None) for item in items])
    pruned = [float((config.encode(i, plan, None).reference.symbols == 0).float().mean()) for i in items]
    assert pruned == pytest.approx((0.8, 0.0), abs=0.02)


def test_protected_values_are_the_largest_by_magnitude_or_by_sensitivity():
    weights, gradient = normal((100, 100), 0), normal((100, 100), 1)
    state = encode(weights, InshrinkeratorCodec(protect=0.02), gradient=gradient).reference
    protected = (state.symbols == 1).view(100, 100)
    magnitude, sensitivity = weights.abs(), (weights * gradient).abs()
    largest = magnitude >= magnitude.quantile(0.985)
    most_sensitive = sensitivity >= sensitivity.quantile(0.985)
    assert bool(protected[largest | most_sensitive].all())
    assert not bool(
        protected[(magnitude < magnitude.quantile(0.975)) & (sensitivity < sensitivity.quantile(0.975))].any()
    )


def test_pruning_by_sensitivity_spares_small_weights_that_matter():
    weights = normal((100, 100), 0).abs() + 0.001
    gradient = 1 / weights**2
    config = InshrinkeratorCodec(prune=0.3, prune_metric="sensitivity", protect=0.0)
    state = encode(weights, config, gradient=gradient).reference
    pruned = (state.symbols == 0).view(100, 100)
    assert float(weights[pruned].min()) > float(weights[~pruned].median())


def test_embeddings_have_bins_and_pruning_of_their_own():
    config = InshrinkeratorCodec(bins=4, embedding_bins=32, prune=0.5, protect=0.0)
    weights = normal((100, 100), 0)
    embedding = encode(weights, config, spec=spec_of(weights, "wte.weight")).reference
    linear = encode(weights, config, spec=spec_of(weights, "fc.weight")).reference
    assert (embedding.codebook.numel(), linear.codebook.numel()) == (32, 4)
    assert int((embedding.symbols == 0).sum()) == 0
    assert int((linear.symbols == 0).sum()) > 4900


# Codebooks


def test_a_codebook_of_more_bins_than_asked_is_not_held():
    weights = normal((100, 100), 0)
    first = encode(weights, InshrinkeratorCodec(bins=32, protect=0.0)).reference
    assert encode(weights, InshrinkeratorCodec(bins=16, protect=0.0), first).reference.codebook.numel() == 16


CHANGES = [
    {"bins": 4},
    {"bins": 254},
    {"bins": 5, "prune": 0.5},
    {"bins": 16, "protect": 0.0},
    {"fit": "published"},
    {"prune": 0.2, "prune_metric": "sensitivity", "protect": 0.1},
    {"codebook": "refit"},
    {"embedding_bins": 8},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_setting_may_change_from_frame_to_frame(dtype):
    weights, encoder, decoder = normal((64, 64), 0), None, None
    for i, change in enumerate(CHANGES):
        weights = weights + normal((64, 64), 10 + i, scale=1e-4)
        tensor = weights.to(dtype)
        encoded = encode(tensor, InshrinkeratorCodec(**change), encoder, gradient=normal((64, 64), i))
        decoded = CODEC.decode(spec_of(tensor, "layer.weight"), encoded.block, decoder)
        assert state_bits(decoded) == state_bits(encoded.reference)
        rekeyed = CODEC.rekey(spec_of(tensor, "layer.weight"), decoded)
        alone = CODEC.decode(spec_of(tensor, "layer.weight"), rekeyed, None)
        assert state_bits(alone) == state_bits(encoded.reference)
        encoder, decoder = encoded.reference, decoded


# What the lossy rule does not cover


# Configs


def test_vectors_are_exact():
    assert encode(normal((64,), 0), CODEC).block.codec == "lossless/1"


def test_lazily_negated_values_and_gradients_are_taken_as_what_they_are():
    pair = torch.complex(normal((40, 40), 0), normal((40, 40), 1))
    negated = pair.conj().imag
    plain = -pair.imag
    config = InshrinkeratorCodec(prune=0.1, prune_metric="sensitivity")
    first = encode(negated, config, gradient=negated)
    assert bytes(first.block.payload) == bytes(encode(plain, config, gradient=plain).block.payload)


# Bytes


def _damaged(payload, message, reference=None, dtype="float32"):
    spec = TensorSpec(name="w", role=TensorRole.WEIGHT, dtype=dtype, shape=(2, 2))
    with pytest.raises(DamagedError, match=message):
        CODEC.decode(spec, Block("inshrinkerator/1", payload), reference)


def test_headers_that_contradict_themselves_are_refused():
    _damaged(b"", "cut short")
    _damaged(b"\x00", "cut short")
    _damaged(b"\x40\x00\x00", "unknown flags")
    _damaged(b"\x03\x00\x00", "unknown flags")
    _damaged(b"\x02\x00\x00", "another reference")
    _damaged(b"\x04\x00\x00", "another reference")
    _damaged(b"\x00\xff" + bytes(600), "too many centroids")
    _damaged(b"\x00\x02\x80\x3f", "cut short")
    _damaged(bytes.fromhex("0002003f80bf00"), "ascending")
    _damaged(bytes.fromhex("0001807f00"), "finite")
    _damaged(bytes.fromhex("080101003f3f00"), "unknown flags")
    _damaged(bytes.fromhex("1001803f7f00"), "cut short")


def _golden_chain():
    """Tensors whose values are exact on every platform, two frames each, and the configs of both."""
    ramp = (torch.arange(240).float() - 100).view(12, 20) / 64
    steps = (torch.arange(240).float() * 7 % 61 - 30).view(12, 20) / 32
    plain, fine = (
        InshrinkeratorCodec(bins=16, protect=0.02),
        InshrinkeratorCodec(bins=9, prune=0.2, protect=0.0),
    )
    moved = ramp + (torch.arange(240).view(12, 20) % 7 == 0) / 4
    return {
        "held": ((ramp, plain), (ramp + 1 / 512, plain)),
        "some_move": ((ramp, plain), (moved, plain)),
        "config_changes": ((ramp, plain), (steps, fine)),
        "bfloat16": ((ramp.bfloat16(), plain), (steps.bfloat16(), plain)),
        "float16": ((ramp.half(), plain), (steps.half(), fine)),
    }


def _tensor_digest(tensor):
    return hashlib.sha256(bits(tensor)).hexdigest()


def make_golden():
    """Codec, payload and digest of the decoded bits of both frames; run by hand for a new version."""
    golden = {}
    for name, frames in _golden_chain().items():
        reference, rows = None, []
        for tensor, config in frames:
            block, reference = encode(tensor, config, reference)
            rows.append([block.codec, bytes(block.payload).hex(), _tensor_digest(reference.decoded())])
        golden[name] = rows
    return golden


def test_encoding_still_writes_the_golden_bytes():
    assert make_golden() == json.loads(_GOLDEN.read_text())
