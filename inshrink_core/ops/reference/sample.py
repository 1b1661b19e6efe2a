"""The norm of the sums over a sample, in plain torch. `inshrink_core.ops.sample` documents them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.sample import Sampled, sample

__all__: list[str] = []


def add_sample(
    values: Tensor,
    integers: Tensor | None,
    second: Tensor | None,
    unit: float,
    places: NDArray[np.int64],
) -> Sampled:
    """See `sample.sample_sums`."""
    sums = np.zeros((3, 257), np.int64)
    flat = flattened(values)
    w = as_float32(sample(flat))
    sums[0] = _exponent_sums(w * w)
    if integers is not None:
        # A power of two: the product is exact.
        away = w - sample(integers).to(w.device, torch.float32) * unit
        sums[1] = _exponent_sums(away * away)
    if second is not None:
        sums[2] = _exponent_sums(as_float32(sample(flattened(second))))
    probe = as_float32(flat[torch.from_numpy(places).to(flat.device)])
    return Sampled(sums, probe.cpu().numpy())


def _exponent_sums(values: Tensor) -> NDArray[np.int64]:
    bits = values.view(torch.int32)
    exponents = ((bits >> 23) & 255).long()
    mantissas = (bits & 0x7FFFFF) + ((exponents > 0).to(torch.int32) << 23)
    sums = torch.zeros(257, dtype=torch.int64, device=values.device)
    sums.index_add_(0, exponents, mantissas.long())
    sums[256] = (exponents == 255).sum()
    result: NDArray[np.int64] = sums.cpu().numpy()
    return result
