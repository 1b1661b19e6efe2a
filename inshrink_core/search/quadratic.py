"""The quadratic model of what an error costs: ½ Σ h·e², h from squared gradients or from movement.

Near a minimum, an error e in the weights raises the loss by ½ eᵀHe. The diagonal of H is in proportion to the
mean squared gradient (Fisher information), which Adam keeps as its second moment; a batch's size and the
cross terms make a factor that trials calibrate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor


# Values summed at a time: temporary copies stay small, whatever the tensor.
_SLICE: Final = 1 << 20


def sensitivities(
    checkpoint: Checkpoint, before: Checkpoint | None, keys: frozenset[str] | None = None
) -> dict[str, float]:
    """Return the mean h of every weight that has one, by key.

    Parameters
    ----------
    checkpoint
        The step, with optimizer state or without.
    before
        The original a step before. Where no weight has second moments, mean squared movement takes
        their place, which is in proportion under Adam's kind of update.
    keys
        Look at these weights only.

    Returns
    -------
    dict
        Empty where neither is known. Means over the finite values of a tensor.
    """
    weights = [spec for spec in checkpoint.specs if _is_weight(spec) and (keys is None or spec.key in keys)]
    found = {spec.key: _mean(_second_moment(checkpoint, spec)) for spec in weights}
    known = {key: value for key, value in found.items() if value is not None}
    if known or before is None:
        return known
    moved = {spec.key: _movement(checkpoint, before, spec) for spec in weights}
    return {key: value for key, value in moved.items() if value is not None}


def damage_of(squared_errors: Mapping[str, float], h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e²; None where no h is known."""
    return 0.5 * math.fsum(h[key] * squared_errors.get(key, 0.0) for key in h) if h else None


def _is_weight(spec: TensorSpec) -> bool:
    return spec.role is TensorRole.WEIGHT and spec.dtype.startswith(("float", "bfloat")) and spec.numel > 0


def _second_moment(checkpoint: Checkpoint, spec: TensorSpec) -> Tensor | None:
    key = f"{spec.name}@{TensorRole.EXP_AVG_SQ.value}"
    if key not in checkpoint or checkpoint.spec(key).shape != spec.shape:
        return None
    return checkpoint[key]


def _movement(checkpoint: Checkpoint, before: Checkpoint, spec: TensorSpec) -> float | None:
    """Mean squared movement since the original before."""
    if spec.key not in before or before.spec(spec.key).shape != spec.shape:
        return None
    import torch

    now, then = (magnitudes(source[spec.key], torch.float64) for source in (checkpoint, before))
    return _mean((now - then).square())


def _mean(values: Tensor | None) -> float | None:
    """Mean of what is finite, in float64."""
    if values is None:
        return None
    import torch

    total, n = 0.0, 0
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = magnitudes(flat[start : start + _SLICE], torch.float64)
        finite = part[torch.isfinite(part)]
        total += float(finite.sum())
        n += finite.numel()
    return total / n if n else None
