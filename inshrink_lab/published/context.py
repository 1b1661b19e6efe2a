"""The context-modelling codec: ExCP's symbols, coded with those of the last checkpoint as context.

Kim and Belyaev, "Prediction and context modelling for checkpoint compression" (arXiv:2506.12000, 2025):
weights and optimizer states are pruned and quantized, and adaptive arithmetic coding takes its context
from the values of the previously saved checkpoint around the same place.

Notes
-----
Only the abstract of the paper was available, so these points are assumptions. Pruning and quantization are
those of ExCP (`inshrink_lab.published.excp`) with its defaults. The context is the 3 × 3 neighbourhood of the
previous frame's symbols, in the matrix whose rows are the first dimension. Tables of estimates for a few
contexts replace the learned predictor of the paper, in two passes. The first pass codes which symbols are
zero, given whether the co-located symbol was zero and how many of its eight neighbours were not. The second
pass codes the other symbols, given the sign of the co-located symbol and the number of nonzero neighbours.
Contexts use nothing outside the tensor, and nothing of the current frame except the estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from inshrink_core.codec import TensorReference
from inshrink_core.codecs.exact import decode_exact, encode_exact
from inshrink_core.coding.raw import of_length
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.varint import Cursor, write_section
from inshrink_lab.published.adaptive import decode_adaptive, encode_adaptive
from inshrink_lab.published.excp import ExcpCodec
from inshrink_lab.published.flat import Symbols
from inshrink_lab.published.residual import Quantized

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec

__all__ = ["ContextCodec", "ContextReference"]

_STATE = 0x80
"""First byte of a payload with a complete state: symbols, then the exact tensor."""


_ZERO_CONTEXTS, _VALUE_CONTEXTS = 2 * 9, 3 * 3
"""Number of contexts. For zeros: whether the co-located symbol was zero, and how many of eight neighbours
were not. For other symbols: zero, negative or positive, and three classes of neighbours."""

_BUSY = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2], np.uint8)
"""Class by number of nonzero neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextReference(TensorReference):
    """Decoded tensor and its symbols.

    Parameters
    ----------
    tensor
        Contiguous on the CPU, in the stored dtype and shape.
    symbols : UInt8[Tensor, "n"]
        0, or 1 + the index of a centroid.
    n_symbols, n_negative
        Size of the alphabet, and number of negative centroids.
    """

    tensor: torch.Tensor
    symbols: torch.Tensor
    n_symbols: int
    n_negative: int

    def decoded(self) -> torch.Tensor:
        """Return the tensor; do not write to it."""
        return self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCodec(ExcpCodec):
    """ExCP's quantization under an adaptive arithmetic coder with contexts of the previous frame.

    Parameters
    ----------
    coder
        ``adaptive`` alone; the other settings are ExCP's.

    Examples
    --------
    >>> codec = ContextCodec()
    >>> codec.bitstream, codec.bits
    ('context/1', 4)
    """

    name = "context"
    bitstream = "context/1"
    words: ClassVar = {**ExcpCodec.words, "coder": ("adaptive",)}
    label = "Context"
    compared = (("Context", {}),)

    coder: str = "adaptive"

    def pack_symbols(self, quantized: Quantized, spec: TensorSpec, before: TensorReference | None) -> bytes:
        """Return two streams: which symbols are zero, then the others."""
        zeros, values = _contexts(spec, before)
        symbols = quantized.symbols
        nonzero = symbols != 0
        flags = encode_adaptive(nonzero.astype(np.uint8), zeros, 2, _ZERO_CONTEXTS)
        alphabet = max(quantized.codebook.size, 1)
        rest = encode_adaptive(symbols[nonzero] - np.uint8(1), values[nonzero], alphabet, _VALUE_CONTEXTS)
        out = bytearray()
        write_section(out, flags)
        write_section(out, rest)
        return bytes(out)

    def parse_symbols(
        self, stream: memoryview, spec: TensorSpec, n_symbols: int, before: TensorReference | None
    ) -> Symbols:
        """Undo `pack_symbols`."""
        zeros, values = _contexts(spec, before)
        cursor = Cursor(stream)
        flags, rest = cursor.section(), cursor.section()
        of_length(cursor.rest, 0, "bytes follow the symbols")
        symbols = decode_adaptive(flags, spec.numel, 2, zeros, _ZERO_CONTEXTS)
        nonzero = symbols != 0
        n_kept = int(np.count_nonzero(nonzero))
        if n_kept and n_symbols < 2:
            raise DamagedError("a symbol is outside the alphabet")
        alphabet = max(n_symbols - 1, 1)
        symbols[nonzero] = 1 + decode_adaptive(rest, n_kept, alphabet, values[nonzero], _VALUE_CONTEXTS)
        return symbols

    def state_of(self, tensor: torch.Tensor, quantized: Quantized) -> TensorReference:
        """Return the decoded tensor and its symbols."""
        return ContextReference(
            tensor=tensor,
            symbols=torch.from_numpy(quantized.symbols),
            n_symbols=1 + quantized.codebook.size,
            n_negative=int(np.count_nonzero(quantized.codebook < 0)),
        )

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> TensorReference:
        """Return the state of a payload, of whole states too."""
        if payload[0] == _STATE:
            return _parse_state(spec, payload)
        return ExcpCodec.decode_lossy(self, spec, payload, reference, device)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a block of the whole state: the next frame's contexts need the symbols too."""
        if unchanged or not isinstance(reference, ContextReference):
            return ExcpCodec.rekey(self, spec, reference, unchanged=unchanged)
        stream = encode_adaptive(reference.symbols.numpy(), None, reference.n_symbols)
        head = bytearray((_STATE, reference.n_symbols - 1, reference.n_negative))
        write_section(head, stream)
        exact = encode_exact(spec, reference.tensor, None).block.payload
        return Block(self.bitstream, b"".join((head, exact)))


def _parse_state(spec: TensorSpec, payload: memoryview) -> ContextReference:
    """Return the state of a payload that `ContextCodec.rekey` wrote."""
    cursor = Cursor(payload[1:])
    largest, n_negative = cursor.take(2)
    n_symbols, stream = largest + 1, cursor.section()
    if n_negative >= n_symbols:
        raise DamagedError("a state has more negative centroids than centroids")
    symbols = decode_adaptive(stream, spec.numel, n_symbols)
    return ContextReference(
        tensor=decode_exact(spec, cursor.rest, None).tensor.contiguous(),
        symbols=torch.from_numpy(symbols),
        n_symbols=n_symbols,
        n_negative=n_negative,
    )


def _contexts(spec: TensorSpec, reference: TensorReference | None) -> tuple[Symbols, Symbols]:
    """Return the context of every value in both passes; all zero where no symbols are known."""
    n = spec.numel
    if not isinstance(reference, ContextReference) or tuple(reference.tensor.shape) != spec.shape:
        return np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    symbols = reference.symbols.numpy().reshape(rows, -1)
    alive = (symbols != 0).astype(np.uint8)
    framed = np.pad(alive, 1)
    height, width = alive.shape
    around = np.zeros_like(alive)
    for down in range(3):
        for right in range(3):
            if (down, right) != (1, 1):
                around += framed[down : down + height, right : right + width]
    sign = np.where(symbols > reference.n_negative, np.uint8(2), alive)
    zeros = (9 * alive + around).reshape(-1)
    values = (3 * sign + _BUSY[around]).reshape(-1).astype(np.uint8)
    return zeros, values
