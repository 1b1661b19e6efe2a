"""Movement of the weights between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from torch import Tensor


_CHUNK: Final = 1 << 20
"""Number of values converted to float64 at a time: 8 MB."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Movement of values, as sums that can be added.

    Parameters
    ----------
    n_values
        Number of values.
    n_changed
        Number of values with any changed bit.
    squared
        ``Σ (b - a)²`` for values a before and b after; all sums are over the values that are finite in both
        checkpoints.
    squared_before, squared_after
        ``Σ a²`` and ``Σ b²``.
    product
        ``Σ a b``.
    """

    n_values: int = 0
    n_changed: int = 0
    squared: float = 0.0
    squared_before: float = 0.0
    squared_after: float = 0.0
    product: float = 0.0

    def __add__(self, other: Movement) -> Movement:
        """Return the movement of both sets of values together."""
        return Movement(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def relative(self) -> float | None:
        """``sqrt(Σ (b - a)² / Σ a²)``; None if all values were zero and some moved."""
        if self.squared_before > 0:
            return math.sqrt(self.squared / self.squared_before)
        return None if self.squared > 0 else 0.0

    @property
    def cosine(self) -> float | None:
        """``Σ a b / sqrt(Σ a² Σ b²)``; None if either side is all zero."""
        norms = math.sqrt(self.squared_before) * math.sqrt(self.squared_after)
        return max(-1.0, min(1.0, self.product / norms)) if norms > 0 else None

    @property
    def changed(self) -> float:
        """Share of values that changed."""
        return self.n_changed / self.n_values if self.n_values else 0.0


class Moved(NamedTuple):
    """Movement between two checkpoints.

    Parameters
    ----------
    tensors
        Spec and movement by key, of each weight and buffer with equal shape and dtype in both checkpoints.
    reshaped
        Keys of tensors with different shapes or dtypes.
    """

    tensors: dict[str, tuple[TensorSpec, Movement]]
    reshaped: tuple[str, ...]


def moved_between(before: Checkpoint, after: Checkpoint, only: Collection[str] | None = None) -> Moved:
    """Compare the weights and buffers of two checkpoints; values that are not finite count as unmoved.

    Parameters
    ----------
    before, after
        The two checkpoints. Memory is a few copies of the largest tensor.
    only
        Keys of the tensors to compare; by default all.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> _, movement = inshrink_core.analysis.moved_between(run[200], run[400]).tensors["fc1.weight"]
    >>> movement.changed > 0.9
    True
    """
    first, second = (
        {spec.key: spec for spec in step.specs if spec.role in MODEL_ROLES} for step in (before, after)
    )
    common = {key: spec for key, spec in first.items() if key in second and (only is None or key in only)}
    reshaped = tuple(
        key
        for key, spec in common.items()
        if (spec.shape, spec.dtype) != (second[key].shape, second[key].dtype)
    )
    tensors = {
        key: (spec, movement(before.source.read(spec), after[key]))
        for key, spec in common.items()
        if key not in reshaped
    }
    return Moved(tensors, reshaped)


def movement(before: Tensor, after: Tensor) -> Movement:
    """Return the movement of a tensor's values; both tensors have the same shape and dtype."""
    total, first, second = Movement(), before.reshape(-1), after.reshape(-1)
    for start in range(0, first.numel(), _CHUNK):
        total += _chunk_movement(first[start : start + _CHUNK], second[start : start + _CHUNK])
    return total


def _chunk_movement(before: Tensor, after: Tensor) -> Movement:
    import torch

    bits = before.contiguous().view(torch.uint8) ^ after.contiguous().view(torch.uint8)
    a, b = real_numbers(before, torch.float64), real_numbers(after, torch.float64)
    finite = a.isfinite() & b.isfinite()
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    return Movement(
        n_values=before.numel(),
        n_changed=int(bits.reshape(before.numel(), -1).any(dim=1).sum()),
        squared=float((b - a).square().sum()),
        squared_before=float(a.square().sum()),
        squared_after=float(b.square().sum()),
        product=float((a * b).sum()),
    )
