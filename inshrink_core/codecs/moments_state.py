"""The state of the moments codec: integers, and the values they stand for.

Values are powers of the square root of two, whose exponents are rows' and columns' (rank one), the
elements' own, or both, and integers in units of such powers. A value is one product at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from inshrink_core.codec import TensorReference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    _Bytes = NDArray[np.uint8]

__all__ = ["NO_BYTES", "ZERO_POINT", "Form", "MomentsReference", "half_octave_values", "sides"]

ZERO_POINT = 128
"""Integers, residuals and column exponents are stored with this added."""

NO_BYTES: _Bytes = np.zeros(0, np.uint8)
"""Of arrays that a form does not have."""

_SQRT2 = np.float32(math.sqrt(2))
_LOWEST, _HIGHEST = -252, 252
"""Half octaves of the smallest and largest value: normal float32 numbers."""


_LEAST_HALF = np.float32(2.0**-24)
"""The smallest positive float16."""


class Form(IntEnum):
    """How a tensor is stored.

    ``ZEROS``: nothing. ``OCTAVES``: each element a power of two. ``RANK_ONE``: row times column, in half
    octaves. ``SCALED``: integers in units of row times column. ``FACTORED``: row times column, and for
    each element a power of two beside.
    """

    ZEROS = 0
    OCTAVES = 1
    RANK_ONE = 2
    SCALED = 3
    FACTORED = 4


@dataclass(frozen=True, slots=True)
class MomentsReference(TensorReference):
    """Integers of one tensor.

    Parameters
    ----------
    dtype, shape
        What it decodes to.
    form
        Which of the arrays count.
    base
        Half octaves (octaves, in form `Form.OCTAVES`) that code 1 stands for is ``base + 1``.
    elements : uint8, (n,)
        Codes, or integers or residuals plus 128; empty in forms without.
    rows, columns : uint8
        Exponents of rows, 0 for a row of zeros, and of columns plus 128; empty in forms without.

    Notes
    -----
    A byte an element, and a byte for each row and column. Decoding is O(n): a table look-up, and in form
    `Form.SCALED` a float32 product.
    """

    dtype: str
    shape: tuple[int, ...]
    form: Form
    base: int
    elements: _Bytes
    rows: _Bytes
    columns: _Bytes

    @property
    def nbytes(self) -> int:
        """Memory the integers take."""
        return self.elements.nbytes + self.rows.nbytes + self.columns.nbytes

    def decoded(self) -> Tensor:
        """Return the values."""
        flat = self._values()
        if self.dtype == "float16" and self.form is not Form.SCALED:
            # A second moment never becomes zero, not by its dtype either.
            flat[flat > 0] = np.maximum(flat[flat > 0], _LEAST_HALF)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.from_numpy(flat).reshape(self.shape).to(dtype)

    def _values(self) -> NDArray[np.float32]:
        n = math.prod(self.shape)
        if self.form is Form.ZEROS:
            return np.zeros(n, np.float32)
        if self.form is Form.OCTAVES:
            table = half_octave_values(2 * (np.arange(256) + self.base))
            table[0] = 0
            values: NDArray[np.float32] = table[self.elements]
            return values
        exponents = self.rows.astype(np.int16)[:, None] + (self.columns.astype(np.int16) - ZERO_POINT)
        if self.form is Form.FACTORED:
            residuals = self.elements.astype(np.int16).reshape(exponents.shape) - ZERO_POINT
            exponents = exponents + 2 * residuals
        lowest, highest = -3 * ZERO_POINT, 768
        table = half_octave_values(np.arange(lowest, highest) + self.base)
        units = table[exponents - lowest]
        units[self.rows == 0] = 0
        flat: NDArray[np.float32] = units.reshape(-1)
        if self.form is Form.FACTORED:
            flat[self.elements == 0] = 0
        if self.form is Form.SCALED:
            # Only a block that no encoder wrote has units so large.
            with np.errstate(over="ignore"):
                flat *= self.elements.astype(np.float32) - np.float32(ZERO_POINT)
        return flat


def half_octave_values(exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return ``2**(k / 2)`` in float32, the root of two rounded once; k is first clipped to +-252.

    Examples
    --------
    >>> half_octave_values(np.array([0, 2, -2])).tolist()
    [1.0, 2.0, 0.5]
    """
    k = np.clip(exponents, _LOWEST, _HIGHEST)
    values: NDArray[np.float32] = np.ldexp(np.where(k & 1, _SQRT2, np.float32(1)), k >> 1).astype(np.float32)
    return values


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a shape: all but the first dimension together; a vector is one row.

    Examples
    --------
    >>> sides((8, 3, 3, 3)), sides((5,)), sides(())
    ((8, 27), (1, 5), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape))
