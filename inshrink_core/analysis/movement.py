"""How far the values of a tensor moved, in sums that can be added up."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Final

from inshrink_core.checkpoint import DTYPE_SIZES, TensorSpec
from inshrink_core.report import Report
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from torch import Tensor


_CHUNK: Final = 1 << 20
"""Values turned to float64 at a time: 8 MB, small beside any tensor worth a thought."""


@dataclass(frozen=True, slots=True)
class Movement(Report):
    """How far values moved, as sums that can be added up.

    Parameters
    ----------
    n_values
        Number of values.
    n_changed
        Values of which any bit changed.
    n_bits, n_bits_changed
        Bits, and bits that changed.
    squared
        Sum of squared movements, of values finite in both steps.
    squared_before, squared_after
        Sums of squares in the first and in the second step, of the same values.
    product
        Sum of products of the two.
    max_abs
        Largest movement of one value; infinite where a value became or stopped being finite.
    """

    n_values: int = 0
    n_changed: int = 0
    n_bits: int = 0
    n_bits_changed: int = 0
    squared: float = 0.0
    squared_before: float = 0.0
    squared_after: float = 0.0
    product: float = 0.0
    max_abs: float = 0.0

    SAYS: ClassVar = "values=n_values relative rms max_abs cosine changed bits_changed"

    def __add__(self, other: Movement) -> Movement:
        """Return the movement of both sets of values together."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Movement)
        }
        return Movement(**{**sums, "max_abs": max(self.max_abs, other.max_abs)})

    @property
    def rms(self) -> float:
        """Root mean square of the movement."""
        return math.sqrt(self.squared / self.n_values) if self.n_values else 0.0

    @property
    def relative(self) -> float | None:
        """Root of squared movement over squares before; None where all were zero and something moved."""
        if self.squared_before > 0:
            return math.sqrt(self.squared / self.squared_before)
        return None if self.squared > 0 else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine between the values before and after; None where either is all zero."""
        norms = math.sqrt(self.squared_before) * math.sqrt(self.squared_after)
        return max(-1.0, min(1.0, self.product / norms)) if norms > 0 else None

    @property
    def changed(self) -> float:
        """Share of values that changed."""
        return self.n_changed / self.n_values if self.n_values else 0.0

    @property
    def bits_changed(self) -> float:
        """Share of bits that changed: half of those that are as good as random."""
        return self.n_bits_changed / self.n_bits if self.n_bits else 0.0


def measure_movement(before: Tensor, after: Tensor, spec: TensorSpec) -> Movement:
    """Return how far one tensor moved; memory of a million values beside the two.

    Parameters
    ----------
    before, after
        The values, as the spec says, contiguous on the CPU.
    spec
        Dtype and shape of both.
    """
    total = Movement()
    first, second = before.reshape(-1), after.reshape(-1)
    for start in range(0, first.numel(), _CHUNK):
        total += _chunk_movement(
            first[start : start + _CHUNK], second[start : start + _CHUNK], DTYPE_SIZES[spec.dtype]
        )
    return total


def _chunk_movement(before: Tensor, after: Tensor, width: int) -> Movement:
    """Measure some values; those not finite in both steps count as changed, not as movement."""
    import numpy as np
    import torch

    bits = (before.contiguous().view(torch.uint8) ^ after.contiguous().view(torch.uint8)).numpy()
    n_changed = int(bits.reshape(-1, width).any(axis=1).sum())
    a, b = real_numbers(before, torch.float64), real_numbers(after, torch.float64)
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float("inf") if bool((~finite & ~same).any()) else 0.0
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    moved = b - a
    return Movement(
        n_values=before.numel(),
        n_changed=n_changed,
        n_bits=8 * bits.size,
        n_bits_changed=int(np.bitwise_count(bits).sum()),
        squared=float(moved.square().sum()),
        squared_before=float(a.square().sum()),
        squared_after=float(b.square().sum()),
        product=float((a * b).sum()),
        max_abs=max(largest, float(moved.abs().max())),
    )
