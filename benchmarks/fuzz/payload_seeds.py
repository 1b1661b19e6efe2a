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
