"""What the moments codec stores of a tensor, as bytes and back: ``docs/format.md`` (moments/1).

Values are powers of the square root of two, whose exponents are rows' and columns' (rank one) or the
elements' own, and integers in units of such powers. Integers only; a value is one product.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from inshrink_core.codec import TensorReference
from inshrink_core.codecs.varint import read_varint, write_varint
from inshrink_core.entropy.rans import decode_rans, encode_rans
from inshrink_core.errors import DamagedError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec

    _Bytes = NDArray[np.uint8]

__all__ = ["Form", "MomentsReference", "half_octave_values", "pack", "parse", "sides"]

_HEADER = struct.Struct("<BBh")
_DELTA = 0x80
_SAME = 0x40
_ZERO_POINT = 128
"""Integers and column exponents are stored with this added."""

_SQRT2 = np.float32(math.sqrt(2))
_LOWEST, _HIGHEST = -252, 252
"""Half octaves of the smallest and largest value: normal float32 numbers."""


class Form(IntEnum):
    """How a tensor is stored."""

    ZEROS = 0
    OCTAVES = 1
    RANK_ONE = 2
    SCALED = 3


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
        Codes or integers plus 128; empty in forms without.
    rows, columns : uint8
        Exponents of rows, 0 for a row of zeros, and of columns plus 128; empty in forms without.
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
        values = torch.from_numpy(self._values()).reshape(self.shape)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return values.to(dtype)

    def _values(self) -> NDArray[np.float32]:
        n = math.prod(self.shape)
        if self.form is Form.ZEROS:
            return np.zeros(n, np.float32)
        if self.form is Form.OCTAVES:
            table = half_octave_values(2 * (np.arange(256) + self.base))
            table[0] = 0
            values: NDArray[np.float32] = table[self.elements]
            return values
        exponents = self.rows.astype(np.int16)[:, None] + (self.columns.astype(np.int16) - _ZERO_POINT)
        reach = np.arange(-_ZERO_POINT, 512 - _ZERO_POINT)
        table = half_octave_values(reach + self.base)
        units = table[exponents + _ZERO_POINT]
        units[self.rows == 0] = 0
        flat: NDArray[np.float32] = units.reshape(-1)
        if self.form is Form.SCALED:
            flat *= self.elements.astype(np.float32) - np.float32(_ZERO_POINT)
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


def pack(state: MomentsReference, before: MomentsReference | None) -> bytes:
    """Return the payload of a state, as differences to an earlier one of the same form and base if given."""
    if before is not None and (before.form, before.base) != (state.form, state.base):
        before = None
    if before is not None and _equal(state, before):
        return _HEADER.pack(1, state.form | _SAME, state.base)
    against = before if state.form in (Form.OCTAVES, Form.RANK_ONE) else None
    head = _HEADER.pack(1, state.form | (_DELTA if against else 0), state.base)
    sections: list[bytes] = []
    rows, columns = state.rows, state.columns
    if state.form is Form.OCTAVES and against is None:
        rows, columns = _middles(state.elements, state.shape)
    if state.form is not Form.ZEROS and not (state.form is Form.OCTAVES and against):
        sections += [
            _coded(rows, against.rows if against else None),
            _coded(columns, against.columns if against else None),
        ]
    if state.form is Form.OCTAVES:
        predicted = against.elements if against else _predicted(rows, columns)
        sections.append(_coded(state.elements, predicted))
    if state.form is Form.SCALED:
        sections.append(_coded(state.elements, None))
    out = bytearray(head)
    for section in sections[:-1]:
        write_varint(out, len(section))
        out += section
    return bytes(out) + (sections[-1] if sections else b"")


def parse(payload: memoryview, spec: TensorSpec, before: MomentsReference | None) -> MomentsReference:
    """Return the state that `pack` stored.

    Raises
    ------
    DamagedError
        The payload is none of this shape, or refers to a state that is not there.
    """
    if len(payload) < _HEADER.size:
        raise DamagedError("a block of a moment has no header", where=spec.key)
    version, kind, base = _HEADER.unpack_from(payload)
    form_number, delta = kind & ~(_DELTA | _SAME), bool(kind & (_DELTA | _SAME))
    if version != 1 or form_number > Form.SCALED or abs(base) > 1024:
        raise DamagedError("a block of a moment has an unknown form", where=spec.key, found=str(kind))
    form, body = Form(form_number), payload[_HEADER.size :]
    if delta and before is None:
        raise DamagedError("a block of a moment refers to a state that is not there", where=spec.key)
    if delta and before is not None and (before.form, before.base) != (form, base):
        raise DamagedError("a block of a moment refers to a state of another form", where=spec.key)
    if delta and before is not None and kind & _SAME and not kind & _DELTA and not len(body):
        return before
    if kind & _SAME or (delta and form in (Form.ZEROS, Form.SCALED)):
        raise DamagedError("a block of a moment has an unknown form", where=spec.key, found=str(kind))
    against = before if delta else None
    empty = np.zeros(0, np.uint8)
    if form is Form.ZEROS:
        if len(body):
            raise DamagedError("a block of zeros holds more", where=spec.key)
        return MomentsReference(spec.dtype, spec.shape, form, base, empty, empty, empty)
    if form is Form.OCTAVES and against is not None:
        elements = _decoded(body, spec.numel, against.elements)
        return MomentsReference(spec.dtype, spec.shape, form, base, elements, empty, empty)
    n_rows, n_columns = sides(spec.shape)
    section, body = _section(body, spec)
    rows = _decoded(section, n_rows, against.rows if against else None)
    if form is Form.RANK_ONE:
        columns = _decoded(body, n_columns, against.columns if against else None)
        return MomentsReference(spec.dtype, spec.shape, form, base, empty, rows, columns)
    section, body = _section(body, spec)
    columns = _decoded(section, n_columns, None)
    if form is Form.OCTAVES:
        elements = _decoded(body, spec.numel, _predicted(rows, columns))
        return MomentsReference(spec.dtype, spec.shape, form, base, elements, empty, empty)
    return MomentsReference(
        spec.dtype, spec.shape, form, base, _decoded(body, spec.numel, None), rows, columns
    )


def _equal(state: MomentsReference, before: MomentsReference) -> bool:
    pairs = (
        (state.elements, before.elements),
        (state.rows, before.rows),
        (state.columns, before.columns),
    )
    return state.dtype == before.dtype and all(np.array_equal(one, other) for one, other in pairs)


def _section(body: memoryview, spec: TensorSpec) -> tuple[memoryview, memoryview]:
    """Split off a section that a length precedes."""
    length, offset = read_varint(body, 0)
    if offset + length > len(body):
        raise DamagedError("a block of a moment is cut short", where=spec.key)
    return body[offset : offset + length], body[offset + length :]


def _coded(values: _Bytes, predicted: _Bytes | None) -> bytes:
    """Code bytes, or what they differ by from a prediction, modulo 256."""
    rest = values if predicted is None else values - predicted
    return encode_rans(torch.from_numpy(np.ascontiguousarray(rest)), None, 256)


def _decoded(section: memoryview, n: int, predicted: _Bytes | None) -> _Bytes:
    """Inverse of `_coded`; DamagedError where it is none."""
    rest: _Bytes = decode_rans(section, n, 256).numpy()
    return rest if predicted is None else rest + predicted


def _middles(codes: _Bytes, shape: tuple[int, ...]) -> tuple[_Bytes, _Bytes]:
    """Return the mean code of each row, and of each column against the mean of all, plus 128."""
    n_rows, n_columns = sides(shape)
    matrix = codes.reshape(n_rows, n_columns)
    rows = matrix.sum(1, dtype=np.int64) // n_columns
    columns = matrix.sum(0, dtype=np.int64) // n_rows - int(matrix.sum(dtype=np.int64)) // matrix.size
    return rows.astype(np.uint8), np.clip(columns + _ZERO_POINT, 0, 255).astype(np.uint8)


def _predicted(rows: _Bytes, columns: _Bytes) -> _Bytes:
    """Return what rows and columns say of each element, modulo 256."""
    return (rows[:, None] + columns[None, :] - np.uint8(_ZERO_POINT)).reshape(-1)
