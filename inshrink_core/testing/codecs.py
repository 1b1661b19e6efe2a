"""Conformance suite for codecs: subclass `CodecSuite` and set `codec`.

Override `make_item` if the codec needs auxiliary tensors (gradients, second moments).

Examples
--------
In a test file::

    class TestMyCodec(CodecSuite):
        codec = MyCodec(bits=4)
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import (
    AnyCodec,
    BaseReference,
    Encoded,
    TensorInput,
    TensorReference,
    codec_for_block,
    get_codec,
    make_codec,
)
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.ops import Backend, force_backend
from inshrink_core.testing.tensors import EDGE_TENSORS, bits, float_chains, normal, spec_of

__all__ = ["CodecSuite", "state_bits"]

_N_FLIPS = 150
"""Random damages tried per payload."""


def state_bits(state: Any) -> Any:
    """Return a state as nested tuples of bytes and numbers, so that `==` compares it bit for bit.

    Fields of a dataclass with ``compare=False``, such as private encoder state, are left out.
    """
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), bits(state)
    if isinstance(state, np.ndarray):
        return str(state.dtype), state.shape, state.tobytes()
    if dataclasses.is_dataclass(state):
        fields = [getattr(state, field.name) for field in dataclasses.fields(state) if field.compare]
        return type(state).__name__, *(state_bits(field) for field in fields)
    if isinstance(state, list | tuple):
        return tuple(state_bits(part) for part in state)
    if isinstance(state, dict):
        return tuple((key, state_bits(part)) for key, part in sorted(state.items()))
    return state


class CodecSuite:
    """Tests of the six laws of codecs and of their contract; a subclass sets `codec`."""

    codec: ClassVar[AnyCodec]
    largest: ClassVar[tuple[int, int]] = 2, 2048
    """Bound on a payload: a multiple of the tensor's bytes, plus some bytes. A subclass may lower it."""

    def make_item(self, spec: TensorSpec, tensor: Tensor) -> TensorInput:
        """Return a tensor with the auxiliary tensors that the codec needs."""
        return TensorInput(spec=spec, tensor=tensor)

    def encode_frame(
        self, tensors: Sequence[Tensor], references: Sequence[TensorReference | None], exact: bool = False
    ) -> list[Encoded]:
        """Encode tensors as one frame: observe all, plan, encode each."""
        specs = [spec_of(tensor, f"layer{i}.weight", exact=exact) for i, tensor in enumerate(tensors)]
        items = [self.make_item(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True)]
        pairs = list(zip(items, references, strict=True))
        statistics = [self.codec.observe(item, reference) for item, reference in pairs]
        plan = self.codec.plan(specs, statistics)
        return [self.codec.encode(item, plan, reference) for item, reference in pairs]

    def encode_tensor(self, tensor: Tensor, reference: TensorReference | None = None) -> Encoded:
        """Encode a frame of one tensor."""
        return self.encode_frame([tensor], [reference])[0]

    def decode_tensor(
        self, tensor: Tensor, block: Block, reference: TensorReference | None = None
    ) -> TensorReference:
        """Return the state after decoding a frame of one tensor."""
        return self.decoder(block).decode(spec_of(tensor, "layer0.weight"), block, reference)

    def decode_checked(
        self, tensor: Tensor, encoded: Encoded, reference: TensorReference | None = None
    ) -> TensorReference:
        """Decode a block; fail unless its size, the state and the values meet the contract."""
        spec = spec_of(tensor, "layer0.weight")
        assert len(encoded.block.payload) <= self.largest[0] * spec.nbytes + self.largest[1]
        decoded = self.decode_tensor(tensor, encoded.block, reference)
        assert state_bits(decoded) == state_bits(encoded.reference)
        assert bits(decoded.decoded()) == bits(encoded.reference.decoded())
        self.assert_survives(tensor, decoded.decoded())
        return decoded

    def decoder(self, block: Block) -> AnyCodec:
        """Return the codec that decodes a block: the codec under test, or its delegate."""
        return self.codec if block.codec == self.codec.bitstream else codec_for_block(block.codec)

    def drifting_frames(self, n_frames: int = 6) -> list[list[Tensor]]:
        """Return frames of a few tensors whose values move a little, a lot, and not at all."""
        base = [
            normal((64, 48), 20),
            normal((40, 3, 3, 3), 21),
            normal((70,), 22),
            normal((30, 30), 23).bfloat16(),
        ]
        frames = []
        for step in range(n_frames):
            scale = [1e-4, 1e-3, 0.0, 1e-2, 5e-2, 1e-5][step % 6]
            base = [
                t + (normal(tuple(t.shape), 100 * step + i) * scale / 0.02).to(t.dtype)
                for i, t in enumerate(base)
            ]
            frames.append([*base, torch.tensor(step), torch.arange(300) + step])
        return frames

    def assert_survives(self, tensor: Tensor, restored: Tensor) -> None:
        """Fail unless dtype, shape and special floats are restored, and every bit if lossless."""
        assert restored.dtype == tensor.dtype
        assert restored.shape == tensor.shape
        if self.codec.is_exact(self.codec.settings()) or not tensor.dtype.is_floating_point:
            assert bits(restored) == bits(tensor)
            return
        wide, before = restored.double(), tensor.double()
        assert torch.equal(wide.isnan(), before.isnan())
        assert torch.equal(wide.isposinf(), before.isposinf())
        assert torch.equal(wide.isneginf(), before.isneginf())

    # Settings and their descriptions

    def test_a_codec_is_found_by_its_name_and_made_again_from_its_settings(self) -> None:
        kind = type(self.codec)
        settings = json.loads(json.dumps(self.codec.settings()))
        assert make_codec(kind.name, settings) == self.codec
        assert make_codec(kind.name, kind().settings()) == kind()
        assert self.codec.bitstream.partition("/")[0] == self.codec.name
        assert get_codec(self.codec.name) is kind
        assert type(codec_for_block(self.codec.bitstream)) is kind

    def test_every_value_of_a_tunable_is_a_setting_from_fine_to_coarse(self) -> None:
        tuning, kind = self.codec.tuning, type(self.codec)
        if tuning is None:
            return
        for value in tuning.tunable.values:
            kind(**tuning.settings(value))
        for tunable in (tuning.tunable, *tuning.axes):
            assert len(tunable.values) > 1
            for finer, coarser in pairwise(tunable.values):
                assert tunable.is_coarser(coarser, finer)
                assert not tunable.is_coarser(finer, coarser)
                kind(**{**tuning.beside, **dict.fromkeys(tunable.settings, coarser)})

    # 1 closed loop

    def test_encoder_and_decoder_reach_the_same_state_along_a_chain(self) -> None:
        frames = self.drifting_frames()
        encoder: list[TensorReference | None] = [None] * len(frames[0])
        decoder = list(encoder)
        for tensors in frames:
            encoded = self.encode_frame(tensors, encoder)
            encoder = [frame.reference for frame in encoded]
            decoder = list(map(self.decode_checked, tensors, encoded, decoder))

    def test_a_frame_upon_a_base_model_decodes_to_the_state_the_encoder_reached(self) -> None:
        if not self.codec.uses_base:
            pytest.skip("the codec takes no base model")
        base, tensors, later = self.drifting_frames(3)
        given: list[TensorReference | None] = [BaseReference(tensor.clone) for tensor in base]
        first = self.encode_frame(tensors, given)
        with force_backend(Backend.REFERENCE):
            again = self.encode_frame(tensors[1:], given[1:])
        for item, other in zip(first[1:], again, strict=True):
            assert bytes(item.block.payload) == bytes(other.block.payload)
        second = self.encode_frame(later, [encoded.reference for encoded in first])
        for tensor, began, base_state, last, ended in zip(tensors, first, given, later, second, strict=True):
            self.decode_checked(last, ended, self.decode_checked(tensor, began, base_state))
        alone = self.encode_frame(tensors, [None] * len(tensors))
        sizes = [sum(len(item.block.payload) for item in frame) for frame in (first, alone)]
        assert sizes[0] < sizes[1]

    def test_states_do_not_alias_the_input(self) -> None:
        tensor = normal((40, 40), 1)
        encoded = self.encode_tensor(tensor)
        before = state_bits(encoded.reference)
        decoded = self.decode_tensor(tensor, encoded.block)
        tensor.fill_(7)
        assert state_bits(encoded.reference) == before
        assert state_bits(decoded) == before

    # 2 locality

    def test_one_tensor_decodes_without_the_others(self) -> None:
        frames = self.drifting_frames(2)
        first = self.encode_frame(frames[0], [None] * len(frames[0]))
        second = self.encode_frame(frames[1], [encoded.reference for encoded in first])
        for i in reversed(range(len(frames[1]))):
            expected = self.decode_tensor(frames[0][i], first[i].block)
            self.decode_checked(frames[1][i], second[i], expected)

    # 3 device independence

    def test_back_ends_produce_the_same_bytes_and_the_same_bits(self) -> None:
        # The largest tensor is left out: it takes the reference back end most of its time and adds no
        # coverage.
        frames = [tensors[1:] for tensors in self.drifting_frames(3)]
        references: list[TensorReference | None] = [None] * len(frames[0])
        for tensors in frames:
            fast = self.encode_frame(tensors, references)
            with force_backend(Backend.REFERENCE):
                plain = self.encode_frame(tensors, references)
                for tensor, pattern, other, before in zip(tensors, fast, plain, references, strict=True):
                    assert bytes(pattern.block.payload) == bytes(other.block.payload)
                    assert state_bits(pattern.reference) == state_bits(other.reference)
                    self.decode_checked(tensor, pattern, before)
            references = [encoded.reference for encoded in fast]

    def test_threads_do_not_change_the_bytes(self) -> None:
        tensors = [normal((50, 50), seed) for seed in range(8)]
        alone = [bytes(self.encode_tensor(tensor).block.payload) for tensor in tensors]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda tensor: bytes(self.encode_tensor(tensor).block.payload), tensors))
        assert alone == together

    # 4 bounded and 5 total

    @pytest.mark.parametrize("edge", EDGE_TENSORS)
    def test_edge_tensors_survive_within_the_stated_size(self, edge: str) -> None:
        tensor = EDGE_TENSORS[edge]()
        first = self.encode_tensor(tensor)
        moved = tensor.flip(0) if tensor.dim() else tensor + 1
        second = self.encode_tensor(moved, first.reference)
        self.decode_checked(moved, second, self.decode_checked(tensor, first))

    @pytest.mark.parametrize("edge", ["special_floats", "bfloat16", "transposed", "scalar", "empty", "bool"])
    def test_a_tensor_marked_exact_survives_bit_for_bit(self, edge: str) -> None:
        tensor = EDGE_TENSORS[edge]()
        encoded = self.encode_frame([tensor], [None], exact=True)[0]
        spec = spec_of(tensor, "layer0.weight", exact=True)
        assert bits(self.decoder(encoded.block).decode(spec, encoded.block, None).decoded()) == bits(tensor)

    def test_a_reference_of_another_shape_or_dtype_is_no_obstacle(self) -> None:
        tensor = normal((30, 40), 1)
        for other in (normal((40, 30), 2), normal((30, 40), 2).bfloat16(), torch.tensor(1)):
            reference = self.encode_tensor(other).reference
            self.decode_checked(tensor, self.encode_tensor(tensor, reference), reference)

    def test_an_unchanged_tensor_takes_a_few_bytes(self) -> None:
        tensor = normal((300, 300), 1)
        restored = self.encode_tensor(tensor).reference
        state = self.encode_tensor(tensor, restored).reference
        again = self.encode_tensor(tensor, state)
        # A delta without change costs at most a hundredth of a bit per value and a small header.
        assert len(again.block.payload) <= self.unchanged_bytes(tensor)

    def unchanged_bytes(self, tensor: Tensor) -> int:
        """Return the bound on the payload of a tensor that equals its reference; override with a reason."""
        return 32 + tensor.numel() // 800

    def test_what_is_said_to_be_unchanged_decodes_to_the_same_bits_and_the_chain_goes_on(self) -> None:
        edges = ("special_floats", "bfloat16", "vector", "int64", "empty", "scalar", "constant", "two_levels")
        for tensor in [normal((300, 300), 1), *(EDGE_TENSORS[name]() for name in edges)]:
            spec = spec_of(tensor, "layer0.weight")
            state = self.encode_tensor(tensor).reference
            block = self.codec.rekey(spec, state, unchanged=True)
            assert len(block.payload) <= self.unchanged_bytes(tensor)
            decoded = self.decoder(block).decode(spec, block, state)
            assert bits(decoded.decoded()) == bits(state.decoded())
            moved = tensor.flip(0) if tensor.dim() else tensor + 1
            self.decode_checked(moved, self.encode_tensor(moved, decoded), decoded)

    # 6 re-key

    def test_a_rekeyed_block_stands_alone_and_decodes_to_the_same_bits(self) -> None:
        for name in ("special_floats", "bfloat16", "vector", "int64", "empty", "scalar", "constant"):
            tensor = EDGE_TENSORS[name]()
            first = self.encode_tensor(tensor).reference
            moved = tensor.flip(0) if tensor.dim() else tensor + 1
            reference = self.encode_tensor(moved, first).reference
            spec = spec_of(tensor, "layer0.weight")
            block = self.codec.rekey(spec, reference)
            decoded = self.decoder(block).decode(spec, block, None)
            assert bits(decoded.decoded()) == bits(reference.decoded())
            for before in (decoded, reference):  # a frame written before the re-key decodes after it, too
                self.decode_checked(tensor, self.encode_tensor(tensor, before), decoded)

    # Damaged payloads

    def check_damage(self, spec: TensorSpec, block: Block, payload: bytes, reference: Any) -> bool:
        """Return whether a damaged payload was refused; if not, check that it decodes to the spec."""
        try:
            decoded = self.decoder(block).decode(spec, Block(block.codec, payload), reference)
        except DamagedError:
            return True
        assert tuple(decoded.decoded().shape) == spec.shape
        assert decoded.decoded().dtype == getattr(torch, spec.dtype)
        return False

    @pytest.mark.parametrize("with_reference", [False, True])
    @pytest.mark.parametrize("edge", ["two_levels", "bfloat16", "convolution", "vector", "scalar", "int64"])
    def test_damaged_payloads_are_refused_or_decode_to_the_spec(
        self, edge: str, with_reference: bool
    ) -> None:
        tensor = EDGE_TENSORS[edge]()
        spec = spec_of(tensor, "layer0.weight")
        moved = tensor.flip(0) if tensor.dim() else tensor + 1
        reference = self.encode_tensor(moved).reference if with_reference else None
        block = self.encode_tensor(tensor, reference).block
        payload = bytes(block.payload)
        for length in range(0, len(payload), 1 + len(payload) // 400):
            assert self.check_damage(spec, block, payload[:length], reference), f"cut at {length}"
        assert self.check_damage(spec, block, payload + b"\0", reference), "one byte more"
        rng = random.Random(edge)
        for _ in range(_N_FLIPS):
            damaged = bytearray(payload)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            self.check_damage(spec, block, bytes(damaged), reference)
        for _ in range(_N_FLIPS):
            noise = payload[: rng.randrange(4)] + rng.randbytes(rng.randrange(60))
            self.check_damage(spec, block, noise, reference)

    def test_a_delta_without_its_reference_is_refused_or_decodes_to_the_spec(self) -> None:
        tensor = normal((40, 40), 1)
        reference = self.encode_tensor(tensor + 1e-4).reference
        block = self.encode_tensor(tensor, reference).block
        self.check_damage(spec_of(tensor, "layer0.weight"), block, bytes(block.payload), None)

    # Property

    @given(frames=float_chains())
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.differing_executors],  # each subclass is a codec of its own
    )
    def test_any_chain_decodes_to_the_states_the_encoder_reached(self, frames: list[Tensor]) -> None:
        encoder = decoder = None
        for tensor in frames:
            encoded = self.encode_tensor(tensor, encoder)
            encoder, decoder = encoded.reference, self.decode_checked(tensor, encoded, decoder)
