"""Sums over a sample of a tensor, for planning its lattice. Integer sums do not depend on the order."""

from __future__ import annotations

import numpy as np
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
    """Return at most 2**14 elements of a tensor, flat; the choice depends only on the number of elements."""
    values, n = flattened(values), values.numel()
    if n <= SAMPLE_RUN * SAMPLE_RUNS:
        return values
    return values.as_strided((SAMPLE_RUNS, SAMPLE_RUN), (n // SAMPLE_RUNS, 1)).reshape(-1)


def sample_sums(
    values: Tensor, integers: Tensor | None = None, second: Tensor | None = None, unit: float = 1.0
) -> NDArray[np.int64]:
    """Return sums over the sample of a tensor.

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

    Returns
    -------
    int64, (3, 257)
        Sums of float32 mantissas, including the hidden bit, by the eight exponent bits. The rows are for the
        squares of the sample's values, the squares of their distances to lattice points, and the second
        moments; signs are ignored. The last number of a row counts values that are not finite.

    Raises
    ------
    InputError
        The tensors differ in length.
    """
    n = values.numel()
    for other in (integers, second):
        if other is not None and other.numel() != n:
            raise InputError("tensors to sample differ in length", expected=str(n), found=str(other.numel()))
    from inshrink_core.ops.cpu.sample import add_mantissas

    w = _host(sample(values))
    x = _NO_INTEGERS if integers is None else sample(integers).cpu().numpy()
    m = _NO_MOMENTS if second is None else _host(sample(second))
    sums = np.zeros((3, 257), np.int64)
    add_mantissas(w, x, int(integers is not None), m, int(second is not None), np.float32(unit), sums)
    # A missing array counts as zeros, so the distances to it are reset.
    if integers is None:
        sums[1] = 0
    return sums


def _host(values: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = as_float32(values).cpu().numpy()
    return found
