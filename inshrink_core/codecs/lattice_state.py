"""What decoding a block of ``lattice/1`` leaves behind for the next delta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from inshrink_core.codec import TensorReference
from inshrink_core.quantization.lattice import Spacing

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec

__all__ = ["LatticeReference", "fits", "no_exact", "put_exact"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatticeReference(TensorReference):
    """State of a tensor on its lattice.

    Parameters
    ----------
    dtype, shape
        As stored.
    spacing
        Unit, and step of the last frame.
    integers : Int32[Tensor, "n"]
        Value in units; 0 where it is stored exactly.
    history : UInt8[Tensor, "n"] or None
        When and how each element changed last (`inshrink_core.ops.lattice`); None: not tracked.
    exact_at : Int64[Tensor, "k"]
        Where values are stored exactly, ascending.
    exact_values : Float[Tensor, "k"]
        These values, in the stored dtype.
    exact : Float[Tensor, "shape"] or None
        The values of a step that is stored bit for bit; the next delta does not look at them.
    """

    dtype: str
    shape: tuple[int, ...]
    spacing: Spacing
    integers: Tensor
    history: Tensor | None
    exact_at: Tensor
    exact_values: Tensor
    exact: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return the tensor: integers times the unit, rounded once to the stored dtype, or `exact`."""
        if self.exact is not None:
            return self.exact
        unit = torch.tensor(math.ldexp(1.0, self.spacing.exponent), dtype=torch.float32)
        return put_exact(self, self.integers.to(torch.float32).mul_(unit))

    @property
    def nbytes(self) -> int:
        """Bytes of integers, history and exact values."""
        held = (self.integers, self.history, self.exact_at, self.exact_values, self.exact)
        return sum(part.nbytes for part in held if part is not None)


def put_exact(state: LatticeReference, values: Tensor) -> Tensor:
    """Return flat float32 lattice values in the stored dtype and shape, exact ones in their places."""
    dtype = getattr(torch, state.dtype)
    result = values if values.dtype == dtype else values.to(dtype)
    if state.exact_at.numel():
        result[state.exact_at] = state.exact_values
    return result.view(state.shape)


@lru_cache(maxsize=64)
def no_exact(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places and values where none is exact; the same tensors for all, which nobody changes."""
    return (
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=getattr(torch, dtype), device=device),
    )


def fits(reference: TensorReference | None, spec: TensorSpec) -> LatticeReference | None:
    """Return the reference if changes of a tensor can be coded against it."""
    if not isinstance(reference, LatticeReference):
        return None
    return reference if (reference.dtype, reference.shape) == (spec.dtype, spec.shape) else None
