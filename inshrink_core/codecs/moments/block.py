"""Conversion between states and payloads of the moments codec, as in ``docs/format.md`` (moments/1)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from inshrink_core.codec import ShapedReference
from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.errors import DamagedError
from inshrink_core.ops.flat import sides
from inshrink_core.ops.lattice import sum_tokens
from inshrink_core.ops.moments import MAX_BASE, NO_BYTES, ZERO_POINT, Codes, expand_units, half_log2_values
from inshrink_core.varint import Cursor, write_section

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec


_LEAST_HALF = 2.0**-24
"""The smallest positive float16."""


class Form(IntEnum):
    """Storage form of a tensor.

    ``ZEROS``: no data. ``OCTAVES``: a power of two for each element. ``RANK_ONE``: row times column, in half
    octaves. ``SCALED``: integers in units of row times column. ``FACTORED``: row times column, times a power
    of two for each element.
    """

    ZEROS = 0
    OCTAVES = 1
    RANK_ONE = 2
    SCALED = 3
    FACTORED = 4


@dataclass(frozen=True, slots=True, eq=False)
class MomentsReference(ShapedReference):
    """Quantized state of one moment.

    Parameters
    ----------
    dtype, shape
        Dtype and shape of the decoded tensor.
    form
        Storage form, which determines the codes in use.
    codes
        The codes of the form; unused ones are empty.
    dither_seed
        Dither seed of the octaves of second moments (`dither_log2`), or 0 without dither. The encoder of
        the next frame uses it again.

    Notes
    -----
    The state takes a byte for each element, row and column. Decoding is O(n): a table look-up, and a float32
    product in form `Form.SCALED`.
    """

    form: Form
    codes: Codes
    dither_seed: int = 0

    @property
    def device(self) -> torch.device:
        """Device of the integers."""
        return (self.codes.elements if self.codes.elements.numel() else self.codes.rows).device

    def decoded(self) -> Tensor:
        """Return the values."""
        base, rows, columns, elements = self.codes
        if self.form is Form.ZEROS:
            flat = torch.zeros(math.prod(self.shape), device=self.device)
        elif self.form is Form.OCTAVES:
            table = torch.from_numpy(log2_values(base)).to(self.device)
            flat = table.index_select(0, elements.int())
        else:
            known = None if self.form is Form.RANK_ONE else elements
            flat = expand_units(rows, columns, known, base, self.form is Form.SCALED)
        if self.dtype == "float16" and self.form is not Form.SCALED:
            # Second moments must not underflow to zero in float16.
            flat = torch.where(flat > 0, flat.clamp_min(_LEAST_HALF), flat)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return flat.view(self.shape).to(dtype)


@lru_cache(maxsize=64)
def log2_values(base: int) -> NDArray[np.float32]:
    """Return the values of octave codes."""
    table = half_log2_values(2 * (np.arange(256) + base))
    table[0] = 0
    return table


_HEADER = struct.Struct("<BBh")
_VERSION = 1
_DELTA = 0x80
_SAME = 0x40
_DITHERED = 0x20

LAST_SEED = 255
"""Largest dither seed, which fits a byte."""

_REACH = 6
"""Largest residual with a separate context; the few beyond share it."""

_N_CONTEXTS = 2 * _REACH + 2
"""One context for each residual of the reference, and one for its zeros."""


def pack(state: MomentsReference, before: MomentsReference | None) -> bytes:
    """Return the payload of a state, coded as differences to a previous one of the same form and base.

    For `Form.SCALED`, only rows and columns are coded as differences, since a first moment changes completely
    within a few steps.

    Notes
    -----
    O(n) and deterministic. The contexts are the reference's codes, which the decoder also has.
    """
    form, (base, rows, columns, elements) = state.form, state.codes
    old = None
    if before is not None and _comparable(before, form, base):
        old = before.codes
        alike = (state.dtype, state.dither_seed, base) == (before.dtype, before.dither_seed, old.base)
        # Differences are ten times faster in torch than comparisons of bytes; elements differ most often.
        pairs = zip(state.codes[:0:-1], old[:0:-1], strict=True)
        if alike and not any(bool((now - then).any()) for now, then in pairs):
            return _HEADER.pack(_VERSION, form | _SAME, base)
    if form is Form.ZEROS:
        return _HEADER.pack(_VERSION, form, base)
    marks = (_DELTA if old else 0) | (_DITHERED if state.dither_seed else 0)
    out = bytearray(_HEADER.pack(_VERSION, form | marks, base))
    out += bytes(filter(None, (state.dither_seed,)))
    sections = []
    if form is Form.OCTAVES and not old:
        rows, columns = _middles(elements, state.shape)
    if form is not Form.OCTAVES or not old:
        sections = [_coded(rows, old and old.rows), _coded(columns, old and old.columns)]
    if form is not Form.RANK_ONE:
        sections.append(_coded(elements, *_predicted(form, old, rows, columns)))
    for section in sections[:-1]:
        write_section(out, section)
    return bytes(out) + sections[-1]


def parse(
    payload: memoryview, spec: TensorSpec, before: MomentsReference | None, device: str = "cpu"
) -> MomentsReference:
    """Return the state of a payload from `pack`, on the previous state's device, or else on `device`.

    Parameters
    ----------
    payload
        The payload, which is untrusted.
    spec
        Spec of the tensor.
    before
        The state of the previous frame, if it is of this codec and shape.

    Raises
    ------
    DamagedError
        The payload is not valid for the shape, or refers to a missing state.
    """
    if len(payload) < _HEADER.size:
        raise DamagedError("a block of a moment has no header")
    version, kind, base = _HEADER.unpack_from(payload)
    form_number, marks, dithered = kind & 0x1F, kind & (_DELTA | _SAME), kind & _DITHERED
    if version != _VERSION or form_number > max(Form) or abs(base) > MAX_BASE:
        raise DamagedError("a block of a moment has an unknown form", found=str(kind))
    form, body, dither_seed = Form(form_number), payload[_HEADER.size :], 0
    if dithered:
        if form not in (Form.OCTAVES, Form.FACTORED) or marks & _SAME or not len(body) or not body[0]:
            raise DamagedError("a block of a moment has an unknown dither seed")
        dither_seed, body = body[0], body[1:]
    if marks and (before is None or not _comparable(before, form, base)):
        raise DamagedError("a block of a moment refers to a state that is missing or of another form")
    if marks == _SAME and before is not None and before.codes.base == base and not len(body):
        if before.dtype != spec.dtype:
            raise DamagedError("a block of a moment repeats a state of another dtype")
        return before
    if marks & _SAME or (marks and form is Form.ZEROS):
        raise DamagedError("a block of a moment has an unknown form", found=str(kind))
    place = torch.device(device) if before is None else before.device
    old = before.codes if marks and before is not None else None
    codes = Codes(base, *_parts(body, spec, form, old, place))
    return MomentsReference(spec.dtype, spec.shape, form, codes, dither_seed)


def _comparable(before: MomentsReference, form: Form, base: int) -> bool:
    """Return whether codes may be relative to a state; the base of a first moment may differ."""
    return before.form is form and (before.codes.base == base or form is Form.SCALED)


def _parts(
    body: memoryview, spec: TensorSpec, form: Form, old: Codes | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, columns and elements from a payload of `pack`."""
    cursor = Cursor(body)
    rows = columns = elements = none = NO_BYTES.to(device)
    if form is Form.ZEROS:
        if len(body):
            raise DamagedError("a block of zeros holds more")
        return none, none, none
    if form is not Form.OCTAVES or not old:
        n_rows, n_columns = sides(spec.shape)
        rows = _decoded(cursor.section(), n_rows, device, old and old.rows)
        section = cursor.rest if form is Form.RANK_ONE else cursor.section()
        columns = _decoded(section, n_columns, device, old and old.columns)
    if form is not Form.RANK_ONE:
        elements = _decoded(cursor.rest, spec.numel, device, *_predicted(form, old, rows, columns))
    return (none, none, elements) if form is Form.OCTAVES else (rows, columns, elements)


def _contexts(elements: Tensor) -> Tensor:
    """Return context 0 for zeros, else 1 to 13 by residual: distant codes tend back to the factors."""
    near = elements.clamp(ZERO_POINT - _REACH, ZERO_POINT + _REACH) - (ZERO_POINT - _REACH - 1)
    return near * elements.clamp(max=1)


def _coded(values: Tensor, predicted: Tensor | None, contexts: Tensor | None = None) -> bytes:
    """Code bytes, or their differences from a prediction modulo 256."""
    rest = values if predicted is None else values - predicted
    return encode_rans(rest, contexts, 256, 1 if contexts is None else _N_CONTEXTS)


def _decoded(
    section: memoryview,
    n: int,
    device: torch.device,
    predicted: Tensor | None,
    contexts: Tensor | None = None,
) -> Tensor:
    """Decode bytes; inverse of `_coded`."""
    n_contexts = 1 if contexts is None else _N_CONTEXTS
    rest = decode_rans(section, n, 256, contexts, n_contexts, device=device)
    return rest if predicted is None else rest + predicted


def _middles(codes: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the mean code of each row, and of each column relative to the overall mean, plus 128."""
    n_rows, n_columns = sides(shape)
    by_row, by_column = sum_tokens(codes, n_rows)
    beyond = by_column // n_rows - int(by_row.sum()) // codes.numel() + ZERO_POINT
    means = (by_row // n_columns, np.clip(beyond, 0, 255))
    rows, columns = (torch.from_numpy(side.astype(np.uint8)).to(codes.device) for side in means)
    return rows, columns


def _predicted(
    form: Form, old: Codes | None, rows: Tensor, columns: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the prediction of each element modulo 256, and the contexts of the differences."""
    if form is Form.OCTAVES:
        return (rows[:, None] + columns - ZERO_POINT).view(-1) if old is None else old.elements, None
    if form is Form.FACTORED and old is not None:
        return old.elements, _contexts(old.elements)
    return None, None
