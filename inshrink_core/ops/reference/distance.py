"""The norm of `inshrink_core.ops.distance`, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from inshrink_core.ops.distance import N_SUMS, Distance, added_up, slices_of
from inshrink_core.ops.reference.lattice import scale_integers

__all__: list[str] = []


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """See `distance.squared_distance`."""
    spans = slices_of(values.numel())
    return added_up([(_squares(values[span] - decoded[span]), _squares(values[span])) for span in spans])


def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """See `distance.distance_to_lattice`."""
    return squared_distance(values, scale_integers(integers, unit))


def _squares(values: Tensor) -> list[float]:
    finite = torch.where(values.isfinite(), values, 0.0).double()
    padded = torch.nn.functional.pad(finite.square(), (0, -values.numel() % N_SUMS)).cpu()
    sums: list[float] = padded.view(-1, N_SUMS).cumsum(0)[-1].tolist()
    return sums
