"""Sound payloads of every codec, and the situations in which a decoder may meet them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from inshrink_core.checkpoint import DTYPE_SIZES, TensorRole, TensorSpec
from inshrink_core.codec import AnyCodec, TensorInput, TensorReference, get_codec
from inshrink_core.frame import Block

__all__ = ["Situation", "frames_of", "seeds", "situations"]

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
        for number, spec in enumerate(_specs(name)):
            _add_chain(found, payloads, codec, spec, number)
        _add_giants(found, payloads, codec)
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


def _add_chain(
    found: list[Situation],
    payloads: list[tuple[int, bytes]],
    codec: AnyCodec,
    spec: TensorSpec,
    number: int,
) -> None:
    """Add the frames of a chain, each after the states that it may be met with."""
    reference: TensorReference | None = None
    strange = _strange_states(type(codec)(), spec, number)
    sound: list[bytes] = []
    frames = frames_of(spec, number)
    for tensor in (*frames, frames[-1]):
        item = TensorInput(spec=spec, tensor=tensor)
        if spec.dtype in _LOSSY:
            companions = {TensorRole.GRADIENT: torch.ones_like(tensor), TensorRole.EXP_AVG_SQ: tensor.abs()}
            item = TensorInput(spec=spec, tensor=tensor, companions=companions)
        plan = codec.plan([spec], [codec.observe(item, reference)])
        block, state = codec.encode(item, plan, reference)
        rekeyed = codec.rekey(spec, state)
        for written, before in ((block, reference), (rekeyed, None), (block, next(strange, None))):
            _add(found, payloads, codec, written, spec, before, sound)
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


def _add(
    found: list[Situation],
    payloads: list[tuple[int, bytes]],
    codec: AnyCodec,
    block: Block,
    spec: TensorSpec,
    reference: TensorReference | None,
    sound: list[bytes],
) -> None:
    """Add a payload for each bitstream that may be said to be its own."""
    payload = bytes(block.payload)
    sound.append(payload)
    found.append(Situation(codec, block.codec, spec, reference, sound))
    payloads.append((len(found) - 1, payload))


def _add_giants(found: list[Situation], payloads: list[tuple[int, bytes]], codec: AnyCodec) -> None:
    """Add specs that no memory holds, with payloads that were written for small ones."""
    heads = {payload[:64] for number, payload in payloads if found[number].codec is codec}
    for shape in _GIANTS:
        spec = TensorSpec(name="giant.weight", role=TensorRole.WEIGHT, dtype="float16", shape=shape)
        found.append(Situation(codec, codec.bitstream, spec, None))
        payloads += [(len(found) - 1, head) for head in sorted(heads)[:: max(1, len(heads) // 2)]]
