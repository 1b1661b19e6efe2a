"""The lattice codec on CUDA devices: Triton kernels where Triton is installed, else the reference.

Triton launches on the current device, so that of the tensors is made current.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import Advanced, Gain, Grid, Rounded
from inshrink_core.ops.reference import lattice as reference
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

_HAS_TRITON = find_spec("triton") is not None


@register("round_to_grid", Backend.CUDA)
def round_to_grid(
    values: Tensor, integers: Tensor, history: Tensor | None, grid: Grid, gain: Gain | None
) -> Rounded:
    """See `inshrink_core.ops.lattice.round_to_grid`."""
    if not _HAS_TRITON or values.numel() == 0:
        return reference.round_to_grid(values, integers, history, grid, gain)
    from inshrink_core.ops.triton.lattice_kernels import round_on

    with torch.cuda.device(values.get_device()):
        return round_on(values, integers, history, grid, gain)


@register("advance", Backend.CUDA)
def advance(
    tokens: Tensor, large: NDArray[np.int64], integers: Tensor | None, history: Tensor | None, grid: Grid
) -> Advanced:
    """See `inshrink_core.ops.lattice.advance`."""
    if not _HAS_TRITON or tokens.numel() == 0:
        return reference.advance(tokens, large, integers, history, grid)
    from inshrink_core.ops.triton.lattice_kernels import advance_on

    with torch.cuda.device(tokens.get_device()):
        return advance_on(tokens, large, integers, history, grid)


@register("gain_grades", Backend.CUDA)
def gain_grades(values: Tensor, base: Tensor, integers: Tensor, grid: Grid, n_rows: int) -> Tensor:
    """See `inshrink_core.ops.lattice.gain_grades`."""
    if values.numel() == 0:
        return torch.zeros(n_rows, dtype=torch.int32)
    if not _HAS_TRITON:
        return reference.gain_grades(values, base, integers, grid, n_rows)
    from inshrink_core.ops.triton.gain_kernels import grades_on

    with torch.cuda.device(values.get_device()):
        return grades_on(values, base, integers, grid, n_rows)
