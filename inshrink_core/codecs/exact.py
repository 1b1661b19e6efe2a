"""Bit-exact coding of tensors: the payloads of ``lossless/1``, and the fallback of every lossy codec.

``docs/format.md`` (lossless/1) defines the bytes: a mode byte, then the mode's data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import PROTECTED, Encoded, Levels, TensorReference
from inshrink_core.coding.changes import ChangePlan, decode_changes, encode_changes, plan_changes, sampled
from inshrink_core.coding.rans import decode_rans, encode_rans, estimate_bits_of_counts
from inshrink_core.coding.raw import in_range, of_length
from inshrink_core.coding.zstd import zstd_compress, zstd_decompress
from inshrink_core.errors import DamagedError
from inshrink_core.execution.resources import new_buffer
from inshrink_core.frame import Block
from inshrink_core.ops.cpu.changes import HISTORIES
from inshrink_core.ops.cpu.planes import Transform, merge_planes, split_planes
from inshrink_core.ops.cpu.symbols import count_groups
from inshrink_core.varint import Cursor, write_section, write_varint

BITSTREAM = "lossless/1"

DEFAULT_LEVEL = 1
"""On byte planes of weights, faster and smaller than levels 3 and 6, whose longer searches find nothing."""

_CHUNK = 1 << 18
"""Words in a chunk: its planes fit the second-level cache (1 MB of float32)."""

_TINY_BYTES = 64
"""Below this size, the header of an entropy coder takes more than it saves."""

_MAX_PLANE_HEADER = 4
"""Size of a plane's header, a varint of the kind and a length up to `_CHUNK`, with one byte to spare."""

_PATTERNS = frozenset({"bool", "float8_e8m0fnu", "float4_e2m1fn_x2"})
"""Dtypes whose words are not transformed: they have one sign, or contain two numbers."""

_SMALL = 1 << 15
"""Words up to which integer tensors are encoded in both forms. Larger ones are chosen by histograms, which do
not account for repetition."""

_MANTISSAS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Mantissa bits of the dtypes with deltas coded as changes."""


_WITH_HISTORY = frozenset({"bfloat16", "float16"})
"""Dtypes with context states; for 32 bits they save too little (a sixtieth) for a byte an element."""


class _Mode(IntEnum):
    """First byte of a payload."""

    RAW = 0
    UNCHANGED = 1
    CONSTANT = 2
    PLANES = 3
    DELTA_PLANES = 4
    CHANGES = 5
    HISTORY = 6


_RELATIVE = frozenset({_Mode.UNCHANGED, _Mode.DELTA_PLANES, _Mode.CHANGES})
"""Modes that require a reference."""


class _Plane(IntEnum):
    """Lowest two bits of a plane's header; the rest is a length, or the value of a constant plane."""

    CONSTANT = 0
    RAW = 1
    ZSTD = 2
    RANS = 3


@dataclass(frozen=True, slots=True, eq=False)
class LosslessReference(TensorReference):
    """The tensor itself, on the CPU.

    Parameters
    ----------
    tensor
        Values in the stored dtype and shape, contiguous or one element expanded. Read-only.
    context_state : UInt8[Tensor, "n"] or None
        When and how each 16-bit element last changed (`inshrink_core.ops.cpu.changes`); None: no changes.
    """

    tensor: Tensor
    context_state: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return the tensor, which is read-only."""
        return self.tensor

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return tensor and context state, which are read-only."""
        return self.tensor, self.context_state

    def levels(self) -> Levels:
        """Return levels that mark every value as exact."""
        return Levels("exact", parts=PROTECTED)


def worst_case_exact_bytes(spec: TensorSpec) -> int:
    """Return the largest payload size of a tensor: its bytes and the mode."""
    return 1 + spec.nbytes


def encode_exact(
    spec: TensorSpec,
    tensor: Tensor,
    reference: TensorReference | None,
    level: int = DEFAULT_LEVEL,
    *,
    owned: bool = False,
) -> Encoded:
    """Encode a tensor bit for bit, relative to a reference if that is smaller.

    Parameters
    ----------
    spec
        Dtype and shape.
    tensor
        The values, on any device, with any strides.
    reference
        State after the previous frame, from any codec; ignored if its dtype or shape differs.
    level
        Compression level of zstd.
    owned
        True if the new state may hold `tensor` without a copy (`TensorInput.owned`).

    Returns
    -------
    Encoded
        A ``lossless/1`` block of at most `worst_case_exact_bytes`, and the tensor as the new state.

    Raises
    ------
    InputError
        The tensor does not have the dtype and shape of the spec.

    Notes
    -----
    A delta of 16-bit or 32-bit floats is coded as changes (`inshrink_core.coding.changes`). A delta of other
    dtypes is the difference of integers modulo 2^w (order-preserving integers for floats), in zigzag form and
    split into byte planes. Without a reference, floats have their sign rotated to the end and signed integers
    are in zigzag form, split into byte planes. Planes are coded by zstd or rANS.
    """
    now = _host(spec, tensor)
    before, context_state = _usable(spec, reference)
    words = _words(now)
    earlier = None if before is None else _words(before)
    if earlier is not None and spec.numel and torch.equal(words, earlier):
        known = reference if isinstance(reference, LosslessReference) else None
        state = known or _state(now, tensor, owned, context_state)
        return Encoded(Block(BITSTREAM, bytes([_Mode.UNCHANGED])), state)
    payload, after = _encode_words(spec, words, earlier, context_state, level)
    if payload is None or len(payload) > now.numel() * now.element_size():
        payload, after = b"".join((bytes([_Mode.RAW]), words.numpy().view(np.uint8).data)), None
    return Encoded(Block(BITSTREAM, payload), _state(now, tensor, owned, after))


def _state(now: Tensor, tensor: Tensor, owned: bool, contexts: Tensor | None = None) -> LosslessReference:
    """Return a state with the host tensor; copy it if the caller may still modify it."""
    shared = now.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return LosslessReference(now.clone() if shared and not owned else now, contexts)


def rekey_exact(spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
    """Return a standalone ``lossless/1`` block that decodes to a full state, including the context state.

    With `unchanged`, the block is relative to the reference and records no change. A block with a context
    state may exceed `worst_case_exact_bytes` by slightly more than a byte an element.
    """
    if unchanged:
        return encode_exact(spec, reference.decoded(), reference).block
    tensor, context_state = reference.exact_state()
    block = encode_exact(spec, tensor, None).block
    if context_state is None:
        return block
    head = bytearray((_Mode.HISTORY,))
    write_section(head, encode_rans(context_state, None, HISTORIES))
    return Block(BITSTREAM, bytes(head) + block.payload)


def decode_exact(
    spec: TensorSpec, payload: bytes | memoryview, reference: TensorReference | None
) -> LosslessReference:
    """Return the state after a ``lossless/1`` payload.

    Parameters
    ----------
    spec
        Dtype and shape.
    payload
        The bytes.
    reference
        The state given to `encode_exact`.

    Raises
    ------
    DamagedError
        The payload is not valid for the tensor. Nothing larger than the tensor is allocated.
    """
    view = memoryview(payload)
    if len(view) == 0:
        raise DamagedError("a lossless payload is empty")
    mode = _Mode(in_range(view[0], 0, max(_Mode), "a lossless payload has no known mode"))
    body = view[1:]
    if mode is _Mode.HISTORY:
        return _decode_context_state(spec, body)
    before, context_state = _usable(spec, reference) if mode in _RELATIVE else (None, None)
    if before is None and mode in _RELATIVE:
        raise DamagedError("a lossless delta has no reference of its dtype and shape")
    n_bytes = spec.nbytes
    implied = {_Mode.RAW: n_bytes, _Mode.UNCHANGED: 0, _Mode.CONSTANT: n_bytes // max(spec.numel, 1)}
    if mode in implied:
        of_length(body, implied[mode], "a lossless payload has the wrong length")
    if mode is _Mode.CHANGES and before is not None:
        mantissa = _MANTISSAS.get(spec.dtype)
        if mantissa is None or spec.numel == 0:
            raise DamagedError("a tensor of this kind has no changes")
        changed, after = decode_changes(body, _words(before), context_state, mantissa)
        tensor = changed.view(before.dtype).reshape(spec.shape)
        return LosslessReference(tensor, after if spec.dtype in _WITH_HISTORY else None)
    if mode is _Mode.UNCHANGED and before is not None:
        return reference if isinstance(reference, LosslessReference) else LosslessReference(before.clone())
    out = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    words = _words(out)
    if mode not in (_Mode.RAW, _Mode.CONSTANT):
        _decode_planes(body, words, None if before is None else _words(before), spec)
    elif words.numel():
        stored = torch.from_numpy(np.frombuffer(body, np.uint8).copy()).view(words.dtype)
        words.reshape(-1, stored.numel()).copy_(stored)
    if not _are_bools(out):
        raise DamagedError("a bool is neither false nor true", expected="bytes 0 and 1")
    if mode is _Mode.CONSTANT and out.numel():
        # A constant tensor is held as one expanded element.
        element = out.reshape(-1)[:1].clone().reshape((1,) * out.dim())
        return LosslessReference(element.expand(spec.shape))
    return LosslessReference(out)


def _decode_context_state(spec: TensorSpec, body: memoryview) -> LosslessReference:
    cursor = Cursor(body)
    section, inner = cursor.section(), cursor.rest
    if spec.dtype not in _WITH_HISTORY or len(inner) == 0 or inner[0] in (*_RELATIVE, _Mode.HISTORY):
        raise DamagedError("a lossless payload with a context state holds no tensor")
    context_state = decode_rans(section, spec.numel, HISTORIES)
    return LosslessReference(decode_exact(spec, inner, None).tensor, context_state)


def _host(spec: TensorSpec, tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with conjugation and negation resolved; may alias the caller's."""
    spec.check(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain if _are_bools(plain) else plain.view(torch.uint8).ne(0)


def _are_bools(tensor: Tensor) -> bool:
    """Whether every byte of a bool tensor is 0 or 1; PyTorch does not define other values."""
    return tensor.dtype != torch.bool or tensor.numel() == 0 or int(tensor.view(torch.uint8).max()) <= 1


def _usable(
    spec: TensorSpec, reference: TensorReference | None
) -> tuple[Tensor, Tensor | None] | tuple[None, None]:
    """Return the reference's tensor and context state if a delta against it is defined."""
    if reference is None:
        return None, None
    before, context_state = reference.exact_state()
    if tuple(before.shape) != spec.shape or before.dtype != getattr(torch, spec.dtype):
        return None, None
    return before.detach().to("cpu").contiguous(), context_state


_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: Tensor) -> Tensor:
    """View the bits of a contiguous tensor as a flat integer tensor; a complex number is two words."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WORD_TYPES[flat.element_size()])


def _transforms(spec: TensorSpec) -> tuple[Transform, Transform]:
    """Return the transforms of a tensor without and with a reference."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.dtype in _PATTERNS or spec.dtype.startswith("uint"):
        return Transform.NONE, Transform.DELTA
    if dtype.is_floating_point or dtype.is_complex:
        return Transform.ROTATE, Transform.ORDERED_DELTA
    return Transform.ZIGZAG, Transform.DELTA


_Form = tuple[bytes | memoryview, Tensor | None]
"""A payload, and the context state after it."""


def _encode_words(
    spec: TensorSpec, words: Tensor, earlier: Tensor | None, context_state: Tensor | None, level: int
) -> _Form | tuple[None, None]:
    """Return the smallest form other than raw and unchanged; None if no such form is smaller than raw."""
    if spec.numel > 1 and _is_constant(words, spec):
        return bytes([_Mode.CONSTANT]) + words[: words.numel() // spec.numel].numpy().tobytes(), None
    if spec.nbytes <= _TINY_BYTES:
        return None, None
    alone, against = _transforms(spec)

    def planes(past: Tensor | None) -> _Form:
        return _encode_planes(words, past, alone if past is None else against, level), None

    if earlier is None:
        return planes(None)
    forms: list[tuple[float, Callable[[], _Form]]] = []
    mantissa = _MANTISSAS.get(spec.dtype)
    if mantissa is not None:
        plan = plan_changes(words, earlier, context_state, mantissa)
        forms.append((plan.bits, partial(_encode_changed, earlier, context_state, plan)))
        # For 16-bit words, neither planes nor raw words take less than half their size.
        if words.element_size() == 2 and plan.bits < 8 * words.numel():
            return forms[0][1]()
    elif words.numel() <= _SMALL:
        return min((planes(None), planes(earlier)), key=lambda form: len(form[0]))
    forms.append((_plane_bits(words, None, alone), partial(planes, None)))
    forms.append((_plane_bits(words, earlier, against), partial(planes, earlier)))
    return min(forms, key=lambda form: form[0])[1]()


def _encode_changed(earlier: Tensor, context_state: Tensor | None, plan: ChangePlan) -> _Form:
    payload = b"".join((bytes((_Mode.CHANGES,)), encode_changes(earlier, context_state, plan)))
    return payload, plan.changes.context_state if earlier.element_size() == 2 else None


def _plane_bits(words: Tensor, earlier: Tensor | None, transform: Transform) -> float:
    """Return the estimated size of planes in bits, from histograms of a sample."""
    past = None if earlier is None else sampled(earlier)
    part = split_planes(sampled(words), past, transform).numpy()
    bits = [estimate_bits_of_counts(count_groups(plane)[None]) for plane in part]
    return float(sum(bits) * words.numel() / part.shape[1])


def _is_constant(words: Tensor, spec: TensorSpec) -> bool:
    """Whether all elements have the same bits; a sample usually suffices to disprove it."""
    rows = words.reshape(spec.numel, -1)
    probe = rows[:: max(1, spec.numel // 64)]
    return bool(
        torch.equal(probe, probe[:1].expand_as(probe)) and torch.equal(rows, rows[:1].expand_as(rows))
    )


def _encode_planes(words: Tensor, earlier: Tensor | None, transform: Transform, level: int) -> memoryview:
    """Return the mode, followed by the planes of each chunk, least significant first."""
    # Allocate the worst-case size once, mode included: growing the buffer or prepending the mode would
    # copy up to gigabytes, while pages that are never written take no memory.
    n_planes = words.element_size() * -(-words.numel() // _CHUNK)
    bound = 1 + words.numel() * words.element_size() + _MAX_PLANE_HEADER * n_planes
    out = new_buffer(bound)
    out[0] = _Mode.PLANES if earlier is None else _Mode.DELTA_PLANES
    end = 1
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        past = None if earlier is None else earlier[start : start + _CHUNK]
        for plane in split_planes(chunk, past, transform).numpy():
            for piece in _encode_plane(plane, level):
                out[end : end + len(piece)] = piece
                end += len(piece)
    return out[:end].toreadonly()


def _encode_plane(plane: NDArray[np.uint8], level: int) -> tuple[bytes | bytearray | memoryview, ...]:
    """Return header and body of one plane in its smallest form: constant, zstd, rANS or raw."""
    header = bytearray()
    if np.all(plane[:64] == plane[0]) and np.all(plane == plane[0]):
        write_varint(header, int(plane[0]) << 2 | _Plane.CONSTANT)
        return (header,)
    kind, body = _Plane.ZSTD, zstd_compress(plane, level)
    if estimate_bits_of_counts(count_groups(plane)[None]) < 8 * min(len(body), plane.size):
        kind, body = _Plane.RANS, encode_rans(torch.from_numpy(plane), None, 256)
    if len(body) < plane.size:
        write_varint(header, len(body) << 2 | kind)
        return header, body
    header.append(_Plane.RAW)
    return header, plane.data


def _decode_planes(body: memoryview, out: Tensor, earlier: Tensor | None, spec: TensorSpec) -> None:
    """Fill the words of a tensor; inverse of `_encode_planes`."""
    transform, cursor = _transforms(spec)[earlier is not None], Cursor(body)
    for start in range(0, out.numel(), _CHUNK):
        chunk = out[start : start + _CHUNK]
        past = None if earlier is None else earlier[start : start + _CHUNK]
        planes = np.empty((out.element_size(), chunk.numel()), np.uint8)
        for plane in planes:
            _decode_plane(cursor, plane)
        merge_planes(torch.from_numpy(planes), past, transform, chunk)
    of_length(cursor.rest, 0, "bytes follow the planes of a lossless payload")


def _decode_plane(cursor: Cursor, plane: NDArray[np.uint8]) -> None:
    """Fill one plane."""
    header = cursor.varint()
    kind, length = header & 3, header >> 2
    if kind == _Plane.CONSTANT and length < 256:
        plane[:] = length
    elif kind == _Plane.RAW and length in (0, plane.size):
        plane[:] = np.frombuffer(cursor.take(plane.size), np.uint8)
    elif kind == _Plane.ZSTD:
        plane[:] = np.frombuffer(zstd_decompress(cursor.take(length), plane.size), np.uint8)
    elif kind == _Plane.RANS:
        plane[:] = decode_rans(cursor.take(length), plane.size, 256).numpy()
    else:
        raise DamagedError("a byte plane is of no known kind", found=str(header))
