"""Hostile payloads straight into every codec: what checksums of an archive would keep from it.

A case is the place of a situation (`benchmarks.fuzz.payload_seeds`) in two bytes, and the payload. A decoder
returns a tensor of the spec and a state that is as good as any, or it raises `DamagedError` (of a spec that
no memory holds, `TooLargeError`): nothing else, whatever the bytes.
"""

from __future__ import annotations

import functools
import random
import zlib
from typing import Final

import torch
from torch import Tensor

from benchmarks.fuzz.bytewise import mutate_bytes
from benchmarks.fuzz.payload_seeds import Situation, frames_of, seeds, situations
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import AnyCodec, TensorInput, TensorReference, codec_for_block, enough_memory
from inshrink_core.errors import DamagedError, IncompatibleError, InshrinkError, TooLargeError
from inshrink_core.frame import Block

__all__ = ["PayloadTarget", "pack_case"]

_PLACE_BYTES: Final = 2

_SMALL_NBYTES: Final = 1 << 24
"""No decoder may find too little memory for a tensor up to this size."""


def pack_case(place: int, payload: bytes) -> bytes:
    """Return the bytes of a case: a payload for the situation at a place."""
    return place.to_bytes(_PLACE_BYTES, "little") + payload


class PayloadTarget:
    """Every codec's decoder.

    Examples
    --------
    >>> target = PayloadTarget()
    >>> target.execute(target.seeds()[0])
    """

    name: str = "payloads"

    def seeds(self) -> list[bytes]:
        """Return sound cases, each of which decodes or belongs to another reference."""
        return [pack_case(place, payload) for place, payload in seeds()]

    def mutate(self, rng: random.Random) -> bytes:
        """Return one hostile case: the same for the same state of `rng`."""
        place, payload = rng.choice(seeds())
        if rng.random() < 0.1:
            place = rng.randrange(len(situations()))
        return pack_case(place, mutate_bytes(rng, payload, _payloads(), near_start=0.5))

    def execute(self, data: bytes) -> None:
        """Decode a case, and go on from what it decodes to.

        Raises
        ------
        DamagedError, IncompatibleError, TooLargeError
            The payload was refused.
        AssertionError
            A result is not what the spec says, or an error is not the decoder's to raise.
        """
        all_of_them = situations()
        situation = all_of_them[int.from_bytes(data[:_PLACE_BYTES], "little") % len(all_of_them)]
        payload = data[_PLACE_BYTES:]
        decoded = _decoded(situation, payload, situation.reference)
        spec, state = situation.spec, decoded
        bits = _bits(decoded.decoded())
        assert _bits(_of_spec(state.decoded(), spec)) == bits, "the state decodes to another tensor"
        chance = zlib.crc32(data)
        _check_rekeyed((situation.codec, _codecs()[chance % len(_codecs())]), spec, state, bits)
        following = [payload, *situation.sound[chance % 3 :: 3]]
        for entry in following[:3]:
            try:
                _decoded(situation, entry, state)
            except (DamagedError, IncompatibleError):
                continue
        if chance % 8 == 0:
            _check_continued(situation, state)
        assert _bits(_of_spec(state.decoded(), spec)) == bits, "a state changed while others were decoded"


@functools.cache
def _payloads() -> tuple[bytes, ...]:
    return tuple(payload for _, payload in seeds())


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _of_spec(tensor: Tensor, spec: TensorSpec) -> Tensor:
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    assert found == (spec.dtype, spec.shape), f"decoded to {found} instead of {(spec.dtype, spec.shape)}"
    return tensor


def _decoded(situation: Situation, payload: bytes, reference: TensorReference | None) -> TensorReference:
    """Decode, and let pass what a decoder may raise; anything else of ours is a wrong answer."""
    spec = situation.spec
    try:
        with enough_memory(spec):
            decoded = situation.codec.decode(spec, Block(situation.bitstream, payload), reference)
            _of_spec(decoded.decoded(), spec)
    except (DamagedError, IncompatibleError):
        raise
    except TooLargeError as error:
        if spec.nbytes > _SMALL_NBYTES:
            raise
        raise AssertionError(f"a small tensor took too much memory: {error}") from error
    except InshrinkError as error:
        raise AssertionError(f"a payload was taken for a mistake of the caller: {error}") from error
    return decoded


def _check_rekeyed(
    codecs: tuple[AnyCodec, ...], spec: TensorSpec, state: TensorReference, bits: bytes
) -> None:
    """A hostile state is stored again as any other, by its own codec and by one that takes over from it."""
    for codec in codecs:
        block = codec.rekey(spec, state)
        again = codec_for_block(block.codec).decode(spec, block, None)
        assert _bits(_of_spec(again.decoded(), spec)) == bits, f"{codec.name} re-keyed other bits"


@functools.cache
def _codecs() -> tuple[AnyCodec, ...]:
    return tuple({entry.codec.name: entry.codec for entry in situations()}.values())


def _check_continued(situation: Situation, state: TensorReference) -> None:
    """A chain goes on from a hostile state, and decodes to what its encoder said."""
    codec, spec = situation.codec, situation.spec
    item = TensorInput(spec=spec, tensor=frames_of(spec, 0)[1])
    plan = codec.plan([spec], [codec.observe(item, state)])
    block, after = codec.encode(item, plan, state)
    again = codec_for_block(block.codec).decode(spec, block, state)
    assert _bits(again.decoded()) == _bits(after.decoded()), "a chain does not go on from a hostile state"
