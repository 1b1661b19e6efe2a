"""Sums over a sample of a tensor, for planning its lattice. Integer sums do not depend on the order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.errors import InputError
from inshrink_core.ops.flat import as_float32, flattened

SAMPLE_RUN = 64

SAMPLE_RUNS = 256
"""Number of runs of consecutive, evenly spaced elements: 2**14 values give a mean square to about 4 %, and
the step size, which follows its fourth root, to 1 %."""

_NO_INTEGERS, _NO_MOMENTS = np.zeros(1, np.int32), np.zeros(1, np.float32)


def sample(values: Tensor) -> Tensor:
    """Return at most 2**14 elements of a flat tensor; the choice depends only on the length."""
    n = values.numel()
    if n <= SAMPLE_RUN * SAMPLE_RUNS:
        return values
    return values.as_strided((SAMPLE_RUNS, SAMPLE_RUN), (n // SAMPLE_RUNS, 1)).reshape(-1)


class Sampled(NamedTuple):
    """Statistics of a tensor's sample.

    Parameters
    ----------
    sums : int64, (3, 257)
        Sums of float32 mantissas, including the hidden bit, by the eight exponent bits. The rows are for the
        squares of the sample's values, the squares of their distances to lattice points, and the second
        moments; signs are ignored. The last number of a row counts values that are not finite.
    probe : float32, (k,)
        The requested values.
    """

    sums: NDArray[np.int64]
    probe: NDArray[np.float32]


def sample_sums(
    values: Tensor,
    integers: Tensor | None,
    second: Tensor | None,
    unit: float,
    places: NDArray[np.int64],
) -> Sampled:
    """Sum over the sample of a tensor, and read a few of its values.

    Parameters
    ----------
    values : Float[Tensor, "..."]
        Contiguous, any device; n elements.
    integers : Int32[Tensor, "n"] or None
        Lattice points of the previous state.
    second : Float[Tensor, "..."] or None
        Second moments; contiguous, n elements.
    unit
        Unit of the integers, a power of two.
    places
        Indices of the values to read, below n.

    Raises
    ------
    InputError
        The tensors differ in length, or an index is out of range.
    """
    n = values.numel()
    for other in (integers, second):
        if other is not None and other.numel() != n:
            raise InputError("tensors to sample differ in length", expected=str(n), found=str(other.numel()))
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < n:
        raise InputError("a place is outside of its tensor", expected=f"0 to {n - 1}")
    from inshrink_core.ops.cpu.sample import add_mantissas

    flat = flattened(values)
    w = _host(sample(flat))
    x = _NO_INTEGERS if integers is None else sample(integers).cpu().numpy()
    m = _NO_MOMENTS if second is None else _host(sample(flattened(second)))
    sums = np.zeros((3, 257), np.int64)
    add_mantissas(w, x, int(integers is not None), m, int(second is not None), np.float32(unit), sums)
    # A missing array counts as zeros, so the distances to it are reset.
    if integers is None:
        sums[1] = 0
    return Sampled(sums, _host(flat[torch.from_numpy(places).to(flat.device)]))


def _host(values: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = as_float32(values).cpu().numpy()
    return found
