"""What decoding a block of ``inshrinkerator/1`` leaves behind for the next delta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inshrink_core.codec import TensorReference
from inshrink_core.ops.quantize import dequantize, gather_decoded

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec

__all__ = ["FIRST_BIN", "InshrinkeratorReference", "RoundedReference", "fits", "round_to_bfloat16"]

FIRST_BIN = 2
"""Symbol of the lowest centroid, after pruned and protected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InshrinkeratorReference(TensorReference):
    """State of a quantized tensor.

    Parameters
    ----------
    dtype, shape
        As stored.
    symbols : UInt8[Tensor, "n"]
        0 pruned, 1 protected, bins from 2 on, by centroid.
    codebook : Float[Tensor, "c"]
        float32, ascending, numbers of the stored dtype.
    protected : Float[Tensor, "p"]
        bfloat16, for float16 tensors float16; in tensor order.
    """

    dtype: str
    shape: tuple[int, ...]
    symbols: Tensor
    codebook: Tensor
    protected: Tensor

    @property
    def n_symbols(self) -> int:
        """Size of the alphabet."""
        return FIRST_BIN + self.codebook.numel()

    def decoded(self) -> Tensor:
        """Return the tensor: one table look-up a value."""
        return dequantize(self.symbols, *self._tables()).view(self.shape)

    def decoded_where_protected(self, symbols: Tensor) -> Tensor:
        """Return what this state decodes to where other symbols say protected, in tensor order."""
        return gather_decoded(symbols, self.symbols, *self._tables())

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Value of every symbol, and protected values, in the stored dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        table = torch.zeros(256, dtype=dtype)
        table[FIRST_BIN : self.n_symbols] = self.codebook.to(dtype)
        return table, self.protected.to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of symbols, codebook and protected values."""
        return self.symbols.nbytes + self.codebook.nbytes + self.protected.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedReference(TensorReference):
    """State of a float32 tensor kept in bfloat16: that of its bfloat16 twin."""

    inner: TensorReference

    def decoded(self) -> Tensor:
        """Return the rounded values in float32."""
        return self.inner.decoded().to(torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the bfloat16 twin."""
        return self.inner.nbytes


def fits(reference: TensorReference | None, spec: TensorSpec) -> InshrinkeratorReference | None:
    """Return the reference if symbols of a tensor can be coded against it."""
    if not isinstance(reference, InshrinkeratorReference):
        return None
    return reference if (reference.dtype, reference.shape) == (spec.dtype, spec.shape) else None


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Round finite float32 values to the nearest bfloat16, ties to even, never to infinity.

    Integer operations on the bits; float16 and bfloat16 values come back as they are.
    """
    if values.dtype != torch.float32:
        return values
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper -= ((upper & 0x7FFF) == 0x7F80).to(torch.int64)
    return (upper - ((upper >> 15) << 16)).to(torch.int16).view(torch.bfloat16)
