"""What the moments codec stores of a tensor, as bytes and back: ``docs/format.md`` (moments/1)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inshrink_core.codec import ShapedReference
from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.errors import DamagedError
from inshrink_core.ops.lattice import sum_tokens
from inshrink_core.ops.moments import ZERO_POINT, expand_units, half_octave_values
from inshrink_core.varint import read_section, write_section

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec


NO_BYTES = torch.zeros(0, dtype=torch.uint8)
"""Of tensors that a form does not have."""

_LEAST_HALF = 2.0**-24
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


@dataclass(frozen=True, slots=True, eq=False)
class MomentsReference(ShapedReference):
    """Integers of one tensor.

    Parameters
    ----------
    dtype, shape
        What it decodes to.
    form
        Which of the tensors below count.
    base
        Half octaves (octaves, in form `Form.OCTAVES`) that code 1 stands for is ``base + 1``.
    elements : UInt8[Tensor, "n"]
        Codes, or integers or residuals plus 128; empty in forms without.
    rows, columns : UInt8[Tensor, "n_rows"], UInt8[Tensor, "n_columns"]
        Exponents of rows, 0 for a row of zeros, and of columns plus 128; empty in forms without.

    Notes
    -----
    A byte an element, and a byte for each row and column. Decoding is O(n): a table look-up, and in form
    `Form.SCALED` a float32 product.
    """

    form: Form
    base: int
    elements: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def device(self) -> torch.device:
        """Where the integers are."""
        return (self.elements if self.elements.numel() else self.rows).device

    def on(self, device: torch.device | str) -> MomentsReference:
        """Return the same state with its integers on a device."""
        elements, rows, columns = (part.to(device) for part in (self.elements, self.rows, self.columns))
        return replace(self, elements=elements, rows=rows, columns=columns)

    @property
    def nbytes(self) -> int:
        """Memory the integers take."""
        return self.elements.nbytes + self.rows.nbytes + self.columns.nbytes

    def decoded(self) -> Tensor:
        """Return the values."""
        flat = self._values()
        if self.dtype == "float16" and self.form is not Form.SCALED:
            # A second moment never becomes zero, not by its dtype either.
            flat = torch.where(flat > 0, flat.clamp_min(_LEAST_HALF), flat)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return flat.view(self.shape).to(dtype)

    def _values(self) -> Tensor:
        if self.form is Form.ZEROS:
            return torch.zeros(math.prod(self.shape), device=self.device)
        if self.form is Form.OCTAVES:
            table = half_octave_values(2 * (np.arange(256) + self.base))
            table[0] = 0
            return torch.from_numpy(table).to(self.device).index_select(0, self.elements.int())
        elements = None if self.form is Form.RANK_ONE else self.elements
        return expand_units(self.rows, self.columns, elements, self.base, self.form is Form.SCALED)


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a shape: all but the first dimension together; a vector is one row.

    Examples
    --------
    >>> sides((8, 3, 3, 3)), sides((5,)), sides(())
    ((8, 27), (1, 5), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape))


_HEADER = struct.Struct("<BBh")
_VERSION = 1
_DELTA = 0x80
_SAME = 0x40
_MAX_BASE = 1024

_DIFFERENCED = frozenset(Form) - {Form.ZEROS}
"""Forms of which a delta says what changed. Of `Form.SCALED` that is rows and columns alone: a first moment
is another one after a few steps."""

_REACH = 6
"""Residuals beyond this share a context with it; few are."""

_N_CONTEXTS = 2 * _REACH + 2
"""One for each residual of the reference, and one for its zeros."""


class _Parts(NamedTuple):
    rows: Tensor
    columns: Tensor
    elements: Tensor


def pack(state: MomentsReference, before: MomentsReference | None) -> bytes:
    """Return the payload of a state, as differences to an earlier one of the same form and base if given.

    Notes
    -----
    O(n). Deterministic; contexts are the reference's own codes, which the decoder has.
    """
    if before is not None and not _comparable(before, state.form, state.base):
        before = None
    if before is not None and before.base == state.base and _equal(state, before):
        return _HEADER.pack(_VERSION, state.form | _SAME, state.base)
    against = before if state.form in _DIFFERENCED else None
    out = bytearray(_HEADER.pack(_VERSION, state.form | (_DELTA if against else 0), state.base))
    sections = _sections(state, against)
    for section in sections[:-1]:
        write_section(out, section)
    return bytes(out) + (sections[-1] if sections else b"")


def parse(
    payload: memoryview, spec: TensorSpec, before: MomentsReference | None, device: str = "cpu"
) -> MomentsReference:
    """Return the state that `pack` stored, where the one before is, or else on a device.

    Parameters
    ----------
    payload
        Its bytes; nothing in them is trusted.
    spec
        What it is to decode to.
    before
        The state of the previous frame, if it is one of this codec and of this shape.

    Raises
    ------
    DamagedError
        The payload is none of this shape, or refers to a state that is not there.
    """
    if len(payload) < _HEADER.size:
        raise DamagedError("a block of a moment has no header", where=spec.key)
    version, kind, base = _HEADER.unpack_from(payload)
    form_number, marks = kind & ~(_DELTA | _SAME), kind & (_DELTA | _SAME)
    if version != _VERSION or form_number > max(Form) or abs(base) > _MAX_BASE:
        raise DamagedError("a block of a moment has an unknown form", where=spec.key, found=str(kind))
    form, body = Form(form_number), payload[_HEADER.size :]
    if marks and before is None:
        raise DamagedError("a block of a moment refers to a state that is not there", where=spec.key)
    if marks and before is not None and not _comparable(before, form, base):
        raise DamagedError("a block of a moment refers to a state of another form", where=spec.key)
    if marks == _SAME and before is not None and before.base == base and not len(body):
        if before.dtype != spec.dtype:
            raise DamagedError("a block of a moment repeats a state of another dtype", where=spec.key)
        return before
    if marks & _SAME or (marks and form not in _DIFFERENCED):
        raise DamagedError("a block of a moment has an unknown form", where=spec.key, found=str(kind))
    place = torch.device(device) if before is None else before.device
    rows, columns, elements = _parts(body, spec, form, before if marks else None, place)
    return MomentsReference(spec.dtype, spec.shape, form, base, elements, rows, columns)


def _comparable(before: MomentsReference, form: Form, base: int) -> bool:
    """Whether codes can differ from those of a state; a unit of a first moment may move as a whole."""
    return before.form is form and (before.base == base or form is Form.SCALED)


def _sections(state: MomentsReference, against: MomentsReference | None) -> list[bytes]:
    """Code the arrays that a form has, as differences where there is something to differ from."""
    form, rows, columns, elements = state.form, state.rows, state.columns, state.elements
    if form is Form.ZEROS:
        return []
    if form is Form.OCTAVES and against:
        return [_coded(elements, against.elements)]
    if form is Form.OCTAVES:
        rows, columns = _middles(elements, state.shape)
    head = [
        _coded(rows, against.rows if against else None),
        _coded(columns, against.columns if against else None),
    ]
    if form is Form.RANK_ONE:
        return head
    if form is Form.OCTAVES:
        return [*head, _coded(elements, _predicted(rows, columns))]
    if form is Form.FACTORED and against:
        return [*head, _coded(elements, against.elements, _contexts(against.elements))]
    return [*head, _coded(elements, None)]


def _parts(
    body: memoryview, spec: TensorSpec, form: Form, against: MomentsReference | None, device: torch.device
) -> _Parts:
    """Inverse of `_sections`."""
    none = NO_BYTES.to(device)
    if form is Form.ZEROS:
        if len(body):
            raise DamagedError("a block of zeros holds more", where=spec.key)
        return _Parts(none, none, none)
    if form is Form.OCTAVES and against:
        return _Parts(none, none, _decoded(body, spec.numel, device, against.elements))
    n_rows, n_columns = sides(spec.shape)
    section, at = read_section(body, 0)
    rows = _decoded(section, n_rows, device, against.rows if against else None)
    if form is Form.RANK_ONE:
        return _Parts(
            rows, _decoded(body[at:], n_columns, device, against.columns if against else None), none
        )
    section, at = read_section(body, at)
    columns, rest = _decoded(section, n_columns, device, against.columns if against else None), body[at:]
    if form is Form.OCTAVES:
        return _Parts(none, none, _decoded(rest, spec.numel, device, _predicted(rows, columns)))
    if form is Form.FACTORED and against:
        contexts = _contexts(against.elements)
        return _Parts(rows, columns, _decoded(rest, spec.numel, device, against.elements, contexts))
    return _Parts(rows, columns, _decoded(rest, spec.numel, device, None))


def _equal(state: MomentsReference, before: MomentsReference) -> bool:
    pairs = (
        (state.elements, before.elements),
        (state.rows, before.rows),
        (state.columns, before.columns),
    )
    return state.dtype == before.dtype and not any(bool((one - other).any()) for one, other in pairs)


def _contexts(elements: Tensor) -> Tensor:
    """Return 0 for zeros, else 1 to 13 by residual: a far one tends back to the factors."""
    near = elements.clamp(ZERO_POINT - _REACH, ZERO_POINT + _REACH) - (ZERO_POINT - _REACH - 1)
    # Comparisons of bytes take torch ten times as long.
    return near * elements.clamp(max=1)


def _coded(values: Tensor, predicted: Tensor | None, contexts: Tensor | None = None) -> bytes:
    """Code bytes, or what they differ by from a prediction, modulo 256."""
    rest = values if predicted is None else values - predicted
    return encode_rans(rest, contexts, 256, 1 if contexts is None else _N_CONTEXTS)


def _decoded(
    section: memoryview,
    n: int,
    device: torch.device,
    predicted: Tensor | None,
    contexts: Tensor | None = None,
) -> Tensor:
    """Inverse of `_coded`; DamagedError where it is none."""
    n_contexts = 1 if contexts is None else _N_CONTEXTS
    rest = decode_rans(section, n, 256, contexts, n_contexts, device=device)
    return rest if predicted is None else rest + predicted


def _middles(codes: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean code of each row, and of each column relative to the mean of all, plus 128."""
    n_rows, n_columns = sides(shape)
    by_row, by_column = sum_tokens(codes, n_rows)
    beyond = by_column // n_rows - int(by_row.sum()) // codes.numel() + ZERO_POINT
    means = (by_row // n_columns, np.clip(beyond, 0, 255))
    rows, columns = (torch.from_numpy(side.astype(np.uint8)).to(codes.device) for side in means)
    return rows, columns


def _predicted(rows: Tensor, columns: Tensor) -> Tensor:
    """Return what rows and columns predict of each element, modulo 256."""
    return (rows[:, None] + columns[None, :] - ZERO_POINT).view(-1)
