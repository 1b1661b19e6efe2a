"""Contexts of a tensor that stands alone: how large its rows and columns are.

A class is the magnitude of a row's (or column's) mean token in half octaves; the context of an element is
the sum of its row's and its column's class, less a base. Integers only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.codecs.varint import write_varint
from inshrink_core.entropy.rans import decode_rans, encode_rans, estimate_bits_of_counts
from inshrink_core.errors import DamagedError
from inshrink_core.ops.lattice import N_CONTEXTS, N_TOKENS
from inshrink_core.ops.rans import rans_counts

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec

__all__ = ["pack_scales", "parse_scales"]

_N_CLASSES = 64
"""Half octaves of a mean in 64ths, up to the largest token."""

_MIN_SIDE = 4
"""Rows or columns below which a class says nothing that the table does not."""


def pack_scales(tokens: Tensor, shape: tuple[int, ...]) -> tuple[bytes, Tensor | None]:
    """Return the section that tells classes, and the contexts; none where they do not pay.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Of a tensor that stands alone.
    shape
        Its shape; dimensions from the second on are columns together.
    """
    rows, columns = _sides(shape)
    if min(rows, columns) < _MIN_SIDE:
        return b"", None
    matrix = tokens.view(rows, columns)
    by_row = _classes(matrix.sum(1, dtype=torch.int64), columns)
    by_column = _classes(matrix.sum(0, dtype=torch.int64), rows)
    contexts = _contexts(by_row, by_column).to(tokens.device)
    stream = encode_rans(torch.from_numpy(np.concatenate((by_row, by_column))), None, _N_CLASSES)
    counts = rans_counts(tokens, contexts, N_TOKENS, N_CONTEXTS).numpy()
    gain = estimate_bits_of_counts(counts.sum(0, keepdims=True)) - estimate_bits_of_counts(counts)
    if gain <= 8 * (len(stream) + 4):
        return b"", None
    section = bytearray()
    write_varint(section, len(stream))
    return bytes(section) + stream, contexts


def parse_scales(section: memoryview, spec: TensorSpec) -> Tensor:
    """Return the contexts that a section tells.

    Raises
    ------
    DamagedError
        It is none of this shape.
    """
    rows, columns = _sides(spec.shape)
    if min(rows, columns) < _MIN_SIDE:
        raise DamagedError("a tensor of this shape has no classes of rows and columns", where=spec.key)
    classes = decode_rans(section, rows + columns, _N_CLASSES).numpy()
    return _contexts(classes[:rows], classes[rows:])


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape))


def _classes(sums: Tensor, n: int) -> NDArray[np.uint8]:
    """Half octaves of ``64 * sum / n``, 0 for less than one."""
    means = (sums.cpu().numpy() * 64) // n
    octaves = np.zeros(means.size, np.int64)
    for k in range(1, 15):
        octaves += (means >> k) > 0
    # The square tells whether the mean is past the middle of its octave.
    upper = means * means >= np.int64(2) << (2 * octaves)
    return np.where(means > 0, 2 * octaves + upper, 0).astype(np.uint8)


def _contexts(by_row: NDArray[np.uint8], by_column: NDArray[np.uint8]) -> Tensor:
    """Add classes up around that of the mean row and column, which is the middle context."""
    middle = N_CONTEXTS // 2
    row = by_row.astype(np.int16) - np.int16(by_row.sum(dtype=np.int64) // by_row.size)
    column = by_column.astype(np.int16) - np.int16(by_column.sum(dtype=np.int64) // by_column.size)
    sums = torch.from_numpy(row)[:, None] + torch.from_numpy(column)[None, :] + middle
    return sums.clamp_(0, N_CONTEXTS - 1).to(torch.uint8).view(-1)
