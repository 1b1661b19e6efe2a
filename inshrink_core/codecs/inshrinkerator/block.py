"""Conversion between states and payloads of ``inshrinkerator/1``; ``docs/format.md`` defines the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from inshrink_core import codec
from inshrink_core.codec import Levels, ShapedReference
from inshrink_core.codecs.exact import LosslessReference, decode_exact, encode_exact
from inshrink_core.coding.raw import in_range
from inshrink_core.coding.symbols import decode_symbols, encode_symbols
from inshrink_core.errors import DamagedError
from inshrink_core.ops.quantize import PROTECTED, PRUNED, dequantize, gather_protected
from inshrink_core.quantization.codebook import round_to_bfloat16
from inshrink_core.varint import Cursor, write_varint

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec


DELTA = 0x02
SAME_CODEBOOK = 0x04
PROTECTS = 0x10
"""Flags of a payload: symbols are relative to the reference; codebook of the reference; protected values
follow."""

_MAX_CENTROIDS = 254


def _protected_spec(spec: TensorSpec, n_protected: int) -> TensorSpec:
    dtype = "float16" if spec.dtype == "float16" else "bfloat16"
    return replace(spec, dtype=dtype, shape=(n_protected,), exact=True)


def _protected_reference(
    symbols: Tensor, previous: InshrinkeratorReference | None
) -> LosslessReference | None:
    """Return the reference's decoded values at the protected elements, most of which moved little."""
    if previous is None:
        return None
    return LosslessReference(round_to_bfloat16(previous.decoded_where_protected(symbols)))


def _before(previous: InshrinkeratorReference | None) -> tuple[Tensor | None, int]:
    """Return the symbols of the reference, and the size of their alphabet."""
    return (None, 0) if previous is None else (previous.symbols, previous.n_symbols)


def pack_quantized(
    spec: TensorSpec, state: InshrinkeratorReference, previous: InshrinkeratorReference | None
) -> bytes:
    """Return the payload that decodes to `state`, as a delta if there is a previous state."""
    flags, entries = DELTA if previous is not None else 0, b""
    bits = state.codebook.view(torch.int32)
    if previous is not None and torch.equal(bits, previous.codebook.view(torch.int32)):
        flags |= SAME_CODEBOOK
    elif spec.dtype == "float16":
        entries = state.codebook.numpy().astype("<f2").tobytes()
    else:
        entries = (bits >> 16).numpy().astype("<i2").tobytes()
    stream = encode_symbols(state.symbols, state.n_symbols, *_before(previous))
    head = bytearray((flags, state.codebook.numel())) + entries
    n_protected = state.protected.numel()
    if n_protected == 0:
        return bytes(head + stream)
    stored, before = _protected_spec(spec, n_protected), _protected_reference(state.symbols, previous)
    values = encode_exact(stored, state.protected, before).block.payload
    head[0] |= PROTECTS
    write_varint(head, len(stream))
    return b"".join((head, stream, values))


def _parse_codebook(spec: TensorSpec, entries: memoryview) -> Tensor:
    if spec.dtype == "float16":
        codebook = np.frombuffer(entries, "<f2").astype(np.float32)
    else:
        codebook = (np.frombuffer(entries, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if not np.isfinite(codebook).all() or (codebook[1:] <= codebook[:-1]).any():
        raise DamagedError("the codebook is not finite and ascending")
    return torch.from_numpy(codebook)


def parse_quantized(
    spec: TensorSpec, payload: memoryview, previous: InshrinkeratorReference | None, device: str
) -> InshrinkeratorReference:
    """Return the state after a payload, on the device of the previous state, or else on `device`.

    Raises
    ------
    DamagedError
        The payload is not valid for the spec and reference.
    """
    flags, cursor = payload[0], Cursor(payload[2:])
    n_centroids = in_range(payload[1], 0, _MAX_CENTROIDS, "too many centroids")
    previous = previous if flags & DELTA else None
    if flags & ~(DELTA | SAME_CODEBOOK | PROTECTS):
        raise DamagedError("the block has unknown flags", found=f"{flags:#x}", expected="known ones")
    if flags & DELTA and previous is None:
        raise DamagedError("the block is a delta against another reference")
    if not flags & SAME_CODEBOOK:
        codebook = _parse_codebook(spec, cursor.take(2 * n_centroids))
    elif previous is None or n_centroids != previous.codebook.numel():
        raise DamagedError("the block's codebook is that of another reference")
    else:
        codebook = previous.codebook
    stream = cursor.section() if flags & PROTECTS else cursor.rest
    n_symbols = FIRST_BIN + n_centroids
    symbols = decode_symbols(stream, spec.numel, n_symbols, *_before(previous), torch.device(device))
    n_protected = int((symbols == PROTECTED).sum())
    if bool(flags & PROTECTS) != (n_protected > 0):
        raise DamagedError("protected values and symbols disagree")
    stored = _protected_spec(spec, n_protected)
    protected = torch.empty(0, dtype=getattr(torch, stored.dtype))
    if n_protected:
        exact = decode_exact(stored, cursor.rest, _protected_reference(symbols, previous))
        protected = exact.tensor.contiguous()
    return InshrinkeratorReference(
        dtype=spec.dtype, shape=spec.shape, symbols=symbols, codebook=codebook, protected=protected
    )


FIRST_BIN = 2
"""Symbol of the lowest centroid, after pruned and protected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InshrinkeratorReference(ShapedReference):
    """State of a quantized tensor.

    Parameters
    ----------
    dtype, shape
        Stored dtype and shape.
    symbols : UInt8[Tensor, "n"]
        0 for pruned, 1 for protected, and the bins from 2, in the order of their centroids.
    codebook : Float[Tensor, "c"]
        float32 centroids, ascending, representable in the stored dtype.
    protected : Float[Tensor, "p"]
        Protected values in tensor order, as bfloat16, or float16 for float16 tensors.
    """

    symbols: Tensor
    codebook: Tensor
    protected: Tensor

    @property
    def n_symbols(self) -> int:
        """Size of the alphabet."""
        return FIRST_BIN + self.codebook.numel()

    def decoded(self) -> Tensor:
        """Return the tensor, by one table look-up for each value."""
        return dequantize(self.symbols, *self._tables()).view(self.shape)

    def decoded_where_protected(self, symbols: Tensor) -> Tensor:
        """Return the decoded values at the elements that other symbols protect, in tensor order."""
        return gather_protected(dequantize(self.symbols, *self._tables()), symbols)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Return the value of each symbol, and the protected values, in the stored dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        table = torch.zeros(256, dtype=dtype)
        table[FIRST_BIN : self.n_symbols] = self.codebook.to(dtype)
        return table, self.protected.to(dtype)

    def levels(self) -> Levels:
        """Return the centroids in use, and whether each element is pruned, quantized or protected."""
        symbols, points = self.symbols.cpu().numpy(), self.codebook.numpy().astype(np.float64)
        part_of = np.full(256, codec.QUANTIZED, np.uint8)
        part_of[PRUNED], part_of[PROTECTED] = codec.PRUNED, codec.PROTECTED
        used = np.bincount(symbols, minlength=256)[FIRST_BIN : self.n_symbols]
        return Levels("codebook", points[used > 0], parts=part_of[symbols])
