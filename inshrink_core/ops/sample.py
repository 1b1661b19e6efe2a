"""Sums over a sample of a tensor, from which its lattice is planned: of integers, so in whatever order."""

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
"""Runs of consecutive elements, evenly spaced: 2**14 values give a mean square to about 4 %, a spacing, which
follows its fourth root, to 1 %."""

_NO_INTEGERS, _NO_MOMENTS = np.zeros(1, np.int32), np.zeros(1, np.float32)


def sample(values: Tensor) -> Tensor:
    """Return at most 2**14 elements of a flat tensor, the same ones for the same length."""
    n = values.numel()
    if n <= SAMPLE_RUN * SAMPLE_RUNS:
        return values
    return values.as_strided((SAMPLE_RUNS, SAMPLE_RUN), (n // SAMPLE_RUNS, 1)).reshape(-1)


class Sampled(NamedTuple):
    """What is seen of a tensor.

    Parameters
    ----------
    sums : int64, (3, 257)
        Mantissas of float32 numbers, with their hidden bit, summed by the eight bits of the exponent: of
        the squares of the sample's values, of the squares of their distances to lattice points, and of
        second moments; signs do not count. The last number of a row is how many are not finite.
    probe : float32, (k,)
        The values that were asked for.
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
    """Sum over the sample of a tensor, and take a few of its values.

    Parameters
    ----------
    values : Float[Tensor, "..."]
        Contiguous, any device; n elements.
    integers : Int32[Tensor, "n"] or None
        Lattice points of the state before.
    second : Float[Tensor, "..."] or None
        Second moments; contiguous, n elements.
    unit
        Of the integers, a power of two.
    places
        Of the values to take, below n.

    Raises
    ------
    InputError
        The tensors differ in length, or a place is outside.
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
    # What is not given is counted as zeros, and distances to them.
    if integers is None:
        sums[1] = 0
    return Sampled(sums, _host(flat[torch.from_numpy(places).to(flat.device)]))


def _host(values: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = as_float32(values).cpu().numpy()
    return found
