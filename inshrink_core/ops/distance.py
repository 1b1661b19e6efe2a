"""How far decoded values are from the original ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inshrink_core.ops.lattice import scale_integers
from inshrink_core.ops.registry import op

N_SUMS = 16
"""Element i is added to sum i modulo this: two vectors of eight float64 each."""

SLICE = 1 << 20
"""Elements whose squares are added up before they are added to those of others."""


class Distance(NamedTuple):
    """Sums of squares.

    Parameters
    ----------
    error
        Of the differences between original and decoded values.
    norm
        Of the original values.
    """

    error: float
    norm: float


def slices_of(n: int) -> list[slice]:
    """Return where the slices of `n` elements are."""
    return [slice(begin, begin + SLICE) for begin in range(0, n, SLICE)]


def added_up(slices: Iterable[Sequence[Sequence[float]]]) -> Distance:
    """Add up the sums of slices, `N_SUMS` of errors and of norms each."""
    error = norm = 0.0
    for errors, norms in slices:
        error, norm = error + sum(errors), norm + sum(norms)
    return Distance(error, norm)


@op
def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """Add up the squares of float32 differences and of float32 values; what is not finite counts for nothing.

    Parameters
    ----------
    values, decoded : Float32[Tensor, "n"]
        Contiguous, on the same device.

    Notes
    -----
    Squares and sums are float64: `N_SUMS` of them for each slice of `SLICE` elements, each from first to
    last, added from first to last, as slices are. O(n).
    """
    spans = slices_of(values.numel())
    return added_up([(_squares(values[span] - decoded[span]), _squares(values[span])) for span in spans])


@op
def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """Do what `squared_distance` does for decoded values ``integers * unit``, without making them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous.
    integers : Int32[Tensor, "n"]
        Below 2**24 in magnitude; on the same device.
    unit
        Unit, a power of two.
    """
    return squared_distance(values, scale_integers(integers, unit))


def _squares(values: Tensor) -> list[float]:
    finite = torch.where(values.isfinite(), values, 0.0).cpu().double()
    padded = torch.nn.functional.pad(finite.square(), (0, -values.numel() % N_SUMS))
    sums: list[float] = padded.view(-1, N_SUMS).cumsum(0)[-1].tolist()
    return sums
