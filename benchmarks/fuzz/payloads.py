"""Hostile payloads straight into every codec: what checksums of an archive would keep from it.

A case is the place of a situation (`Situation`) in two bytes, and the payload. A decoder
returns a tensor of the spec and a state that is as good as any, or it raises `DamagedError` (of a spec that
no memory holds, `TooLargeError`): nothing else, whatever the bytes.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.fuzz.mutations import mutate_bytes
from inshrink_core.checkpoint import DTYPE_SIZES, TensorRole, TensorSpec
from inshrink_core.codec import (
    AnyCodec,
    TensorInput,
    TensorReference,
    codec_for_block,
    enough_memory,
    get_codec,
)
from inshrink_core.errors import DamagedError, IncompatibleError, InshrinkError, TooLargeError
from inshrink_core.frame import Block

__all__ = ["PayloadTarget", "frames_of", "pack_case", "seeds", "situations"]

_PLACE_BYTES: Final = 2

_SMALL_NBYTES: Final = 1 << 24
"""No decoder may find too little memory for a tensor up to this size."""


_LOSSY: Final = ("float32", "bfloat16", "float16")

_SHAPES: Final = ((24, 20), (70,), (6, 4, 3, 3), (1, 1))
"""With rows and columns, without, with many dimensions, and of one element."""

_LARGE: Final = (75, 90)
"""Enough symbols for tables that are made once and looked up, for several lanes and vectors of them."""

_GIANTS: Final = ((1 << 40,), (1 << 20, 1 << 30), (1 << 62,), (1 << 63,), (1 << 21,) * 40)
"""Shapes that no memory holds, some beyond what an address can say."""

_CONFIGS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("lattice", {}),
    ("lattice", {"coarseness": 30.0}),
    ("lattice", {"exact": True}),
    ("lattice", {"coarseness": 0.01}),
    ("inshrinkerator", {"protect": 0.2}),
    ("inshrinkerator", {"bins": 4, "prune": 0.5, "protect": 0.0}),
    ("inshrinkerator", {"bins": 200, "codebook": "refit"}),
    ("lc-checkpoint", {"keyframe": "quantized"}),
    ("lc-checkpoint", {"coder": "rans", "bits": 6}),
    ("excp", {"keyframe": "quantized"}),
    ("excp", {"coder": "huffman", "bits": 8}),
    ("qd", {}),
    ("qd", {"coder": "rans", "bits": 3}),
    ("uniform", {"coder": "lzma"}),
    ("uniform", {"coder": "zstd", "grid": "refit", "vectors": "quantized"}),
    ("uniform", {"coder": "huffman", "bits": 2}),
    ("context", {"keyframe": "quantized"}),
    ("context", {}),
    ("moments", {"preset": "fidelity"}),
    ("moments", {"preset": "ratio"}),
    ("lossless", {}),
)

_ROLES: Final[Mapping[str, tuple[TensorRole, ...]]] = {
    "moments": (TensorRole.EXP_AVG_SQ, TensorRole.EXP_AVG, TensorRole.MOMENTUM),
    "excp": (TensorRole.WEIGHT, TensorRole.EXP_AVG_SQ),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decoder is given beside a payload.

    Parameters
    ----------
    codec
        Whose payload it is.
    bitstream
        One of those that the codec reads.
    spec
        What is to be decoded.
    reference
        The state of the frame before.
    sound
        Payloads that were written for this spec and codec, whatever their references.
    """

    codec: AnyCodec
    bitstream: str
    spec: TensorSpec
    reference: TensorReference | None
    sound: list[bytes] = field(default_factory=list)


@functools.cache
def situations() -> tuple[Situation, ...]:
    """Return all of them, the same in every process."""
    return tuple(_made()[0])


@functools.cache
def seeds() -> tuple[tuple[int, bytes], ...]:
    """Return sound payloads, each after the place of its situation among `situations`."""
    return tuple(_made()[1])


@functools.cache
def _made() -> tuple[list[Situation], list[tuple[int, bytes]]]:
    found: list[Situation] = []
    payloads: list[tuple[int, bytes]] = []
    for name, settings in _CONFIGS:
        codec = get_codec(name)(**settings)
        chains = [pair for number, spec in enumerate(_specs(name)) for pair in _chain(codec, spec, number)]
        heads = {payload[:64] for _, (payload,) in chains}
        for situation, written in (*chains, *_giants(codec, heads)):
            payloads += [(len(found), payload) for payload in written]
            found.append(situation)
    return found, payloads


def _specs(name: str) -> Iterator[TensorSpec]:
    """Yield the specs a codec is tried with: each dtype once, each shape once, a few more."""
    for role in _ROLES.get(name, (TensorRole.WEIGHT,)):
        for shape in (*_SHAPES, _LARGE):
            yield TensorSpec(name="fc.weight", role=role, dtype="float32", shape=shape)
        for dtype in _LOSSY[1:]:
            yield TensorSpec(name="fc.weight", role=role, dtype=dtype, shape=_SHAPES[0])
    if name == "lossless":
        for dtype in DTYPE_SIZES:
            yield TensorSpec(name="any.weight", role=TensorRole.WEIGHT, dtype=dtype, shape=(9, 14))
    yield TensorSpec(name="empty.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(3, 0))
    yield TensorSpec(name="lone.weight", role=TensorRole.WEIGHT, dtype="float16", shape=())
    yield TensorSpec(name="running_mean", role=TensorRole.BUFFER, dtype="float32", shape=(12,))


def frames_of(spec: TensorSpec, number: int) -> list[Tensor]:
    """Return values of three frames: they move a little; the last ones by as good as nothing."""
    generator = torch.Generator().manual_seed(number)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not (spec.dtype in _LOSSY or spec.dtype == "float64"):
        n_bytes = spec.nbytes
        raw = torch.randint(0, 2, (3, n_bytes), generator=generator, dtype=torch.uint8)
        return [row.view(dtype).reshape(spec.shape) for row in raw]
    values = torch.randn(spec.shape, generator=generator) * 0.02
    moved = values + torch.randn(spec.shape, generator=generator) * 0.004
    last = moved + (torch.rand(spec.shape, generator=generator) > 0.9) * 0.01
    if spec.role is TensorRole.EXP_AVG_SQ:
        values, moved, last = values.square(), moved.square(), last.square()
    return [value.to(dtype) for value in (values, moved, last)]


def _chain(codec: AnyCodec, spec: TensorSpec, number: int) -> Iterator[tuple[Situation, list[bytes]]]:
    """Yield the frames of a chain, each after the states that it may be met with."""
    reference: TensorReference | None = None
    strange = _strange_states(type(codec)(), spec, number)
    sound: list[bytes] = []
    frames = frames_of(spec, number)
    for tensor in (*frames, frames[-1]):
        item = TensorInput(spec=spec, tensor=tensor)
        if spec.dtype in _LOSSY:
            auxiliaries = {TensorRole.GRADIENT: torch.ones_like(tensor), TensorRole.EXP_AVG_SQ: tensor.abs()}
            item = TensorInput(spec=spec, tensor=tensor, auxiliaries=auxiliaries)
        plan = codec.plan([spec], [codec.observe(item, reference)])
        block, state = codec.encode(item, plan, reference)
        rekeyed = codec.rekey(spec, state)
        for written, before in ((block, reference), (rekeyed, None), (block, next(strange, None))):
            sound.append(bytes(written.payload))
            yield Situation(codec, written.codec, spec, before, sound), sound[-1:]
        reference = state


def _strange_states(codec: AnyCodec, spec: TensorSpec, number: int) -> Iterator[TensorReference]:
    """Yield states of another dtype, another shape and another codec."""
    others = {"float32": "bfloat16", "bfloat16": "float16"}
    dtype = others.get(spec.dtype, "float32")
    yield _state(codec, TensorSpec(name=spec.name, role=spec.role, dtype=dtype, shape=spec.shape), number)
    yield _state(codec, TensorSpec(name=spec.name, role=spec.role, dtype=spec.dtype, shape=(7, 3)), number)
    name = "uniform" if codec.name == "lattice" else "lattice"
    yield _state(get_codec(name)(), spec, number)
    yield _state(get_codec("context" if codec.name != "context" else "qd")(), spec, number)


def _state(codec: AnyCodec, spec: TensorSpec, number: int) -> TensorReference:
    tensor = frames_of(spec, number)[0]
    item = TensorInput(spec=spec, tensor=tensor)
    return codec.encode(item, codec.plan([spec], [codec.observe(item, None)]), None).reference


def _giants(codec: AnyCodec, heads: set[bytes]) -> Iterator[tuple[Situation, list[bytes]]]:
    """Yield specs that no memory holds, with payloads that were written for small ones."""
    for shape in _GIANTS:
        spec = TensorSpec(name="giant.weight", role=TensorRole.WEIGHT, dtype="float16", shape=shape)
        yield Situation(codec, codec.bitstream, spec, None), sorted(heads)[:: max(1, len(heads) // 2)]


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
