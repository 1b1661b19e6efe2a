"""The moments codec: optimizer state in powers of two, never a second moment of zero.

What matters of optimizer state is the loss curve after a restore, which minds the scale of each
parameter's step far more than its digits. Second moments are kept to an octave, or as rank-one factors
(Adafactor: Shazeer & Stern, ICML 2018, section 3); first moments in units of half the root of the second,
or left out. ``docs/design.md`` (optimizer state) has what was measured, ``docs/format.md`` the bytes.

Notes
-----
A first moment does not refer to the decoded second moment, but carries rank-one units of its own, a
thousandth of its size: so one tensor decodes without another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import CodecConfig, Encoded, TensorInput, TensorReference
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.fallback import FallbackCodec, check_word, host_values
from inshrink_core.codecs.moments_state import (
    Form,
    MomentsReference,
    half_octave_values,
    pack,
    parse,
    sides,
)
from inshrink_core.errors import ConfigError
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inshrink_core.checkpoint import TensorSpec

__all__ = ["MomentsCodec", "MomentsConfig"]

_SECOND = frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ})
_FIRST = frozenset({TensorRole.EXP_AVG, TensorRole.MOMENTUM})

_UNITS = {
    (TensorRole.EXP_AVG, "fidelity"): -2,
    (TensorRole.MOMENTUM, "fidelity"): -4,
    (TensorRole.MOMENTUM, "ratio"): -2,
}
"""Half octaves of a unit against the root mean square: a half, a quarter, a half. SGD has no other state,
so its buffer is never left out."""

_HEADROOM = 54
"""Half octaves that the largest value may grow by before the codes of a chain begin anew."""

_LARGEST_INTEGER = 127

_OCTAVE_CARRY = 0x800000 - 0x3504F3
"""What carries a mantissa from the root of two on into the exponent: rounding to octaves is one addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsConfig(CodecConfig):
    """How optimizer state is stored.

    Parameters
    ----------
    preset
        ``fidelity``: second moments to an octave, first moments in units of half their root; about two bits
        a parameter for both. ``ratio``: second moments as rank-one factors, Adam's first moment left out;
        a few hundredths of a bit.

    Raises
    ------
    ConfigError
        No such preset.
    """

    preset: str = "fidelity"

    def __post_init__(self) -> None:
        check_word("preset", self.preset, ("fidelity", "ratio"))


class MomentsCodec(FallbackCodec):
    """Codec of Adam's moments and of momentum buffers; every other tensor, and what is not finite, exact.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorSpec
    >>> codec, config = MomentsCodec(), MomentsConfig()
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.EXP_AVG_SQ, dtype="float32", shape=(2, 2))
    >>> item = TensorInput(spec=spec, tensor=torch.tensor([[1.0, 0.6], [0.0, 9.0]]))
    >>> codec.encode(item, codec.plan([spec], [None], config), None).reference.decoded().tolist()
    [[1.0, 0.5], [0.0, 8.0]]
    """

    name = "moments"
    bitstream = "moments/1"
    reads = frozenset({"moments/1", EXACT})
    config_type: ClassVar[type[CodecConfig]] = MomentsConfig
    lossy_roles = _SECOND | _FIRST

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the second moment's role: it gives first moments their units."""
        return frozenset({TensorRole.EXP_AVG_SQ})

    def _config_of(self, plan: Any) -> MomentsConfig:
        if not isinstance(plan, MomentsConfig):
            raise ConfigError(
                "the plan is another codec's", expected="MomentsConfig", found=type(plan).__name__
            )
        return plan

    def _encode_lossy(
        self, item: TensorInput, plan: Any, reference: TensorReference | None
    ) -> Encoded | None:
        before = reference if isinstance(reference, MomentsReference) else None
        if before is not None and before.shape != item.spec.shape:
            before = None
        values, preset = host_values(item.tensor), plan.preset
        if item.spec.role in _FIRST:
            state = _first_moment(item, values, preset)
        elif (values < 0).any():
            return None
        elif preset == "ratio" and len(item.spec.shape) > 1:
            state = _rank_one(item.spec, values, before)
        else:
            state = _octaves(item.spec, values, before)
        return Encoded(Block(self.bitstream, pack(state, before)), state)

    def _decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None
    ) -> TensorReference:
        before = reference if isinstance(reference, MomentsReference) else None
        return parse(payload, spec, before if before and before.shape == spec.shape else None)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block that stands alone, of the same integers where there are any."""
        if isinstance(reference, MomentsReference):
            return Block(self.bitstream, pack(reference, None))
        return super().rekey(spec, reference)

    def _worst_case_lossy_bytes(self, spec: TensorSpec) -> int:
        n_rows, n_columns = sides(spec.shape)
        return 64 + spec.numel + n_rows + n_columns


def _octaves(
    spec: TensorSpec, values: NDArray[np.float32], before: MomentsReference | None
) -> MomentsReference:
    """Round non-negative values to powers of two; zero stays zero, and nothing else becomes it."""
    octaves = ((values.view(np.int32) + np.int32(_OCTAVE_CARRY)) >> 23) - 127
    positive = values > 0
    base = _base(int(octaves[positive].max()) if positive.any() else 0, Form.OCTAVES, before)
    codes = np.where(positive, np.clip(octaves - base, 1, 255), 0).astype(np.uint8)
    empty = np.zeros(0, np.uint8)
    return MomentsReference(spec.dtype, spec.shape, Form.OCTAVES, base, codes, empty, empty)


def _rank_one(
    spec: TensorSpec, values: NDArray[np.float32], before: MomentsReference | None
) -> MomentsReference:
    """Keep the means of rows and columns, in half octaves."""
    rows, columns = _factors(values, spec.shape, 2.0)
    base = _base(int(rows.max()) if rows.size else 0, Form.RANK_ONE, before)
    codes = _row_codes(rows, base), _column_codes(columns)
    return MomentsReference(spec.dtype, spec.shape, Form.RANK_ONE, base, np.zeros(0, np.uint8), *codes)


def _first_moment(item: TensorInput, values: NDArray[np.float32], preset: str) -> MomentsReference:
    """Round to integers in units of a power of two times row and column; or leave it out."""
    spec, empty = item.spec, np.zeros(0, np.uint8)
    if (spec.role, preset) not in _UNITS or not values.any():
        return MomentsReference(spec.dtype, spec.shape, Form.ZEROS, 0, empty, empty, empty)
    rows, columns = _factors(_squares(item, values), spec.shape, 1.0)
    matrix = np.abs(values).reshape(sides(spec.shape))
    column_codes = _column_codes(columns)
    rows = rows + _UNITS[(spec.role, preset)]
    # A row whose integers would not fit a byte gets a coarser unit.
    shifts = column_codes.astype(np.int64) - 128
    reach = (matrix / half_octave_values(shifts)[None, :]).max(1).astype(np.float64)
    with np.errstate(divide="ignore"):
        least = np.ceil(2 * np.log2(reach / (_LARGEST_INTEGER + 0.25)))
    rows = np.where(reach > 0, np.maximum(rows, least), _NO_ROW).astype(np.int64)
    base = _base(int(rows.max()), Form.SCALED, None)
    state = MomentsReference(
        spec.dtype, spec.shape, Form.SCALED, base, empty, _row_codes(rows, base), column_codes
    )
    exponents = state.rows.astype(np.int64)[:, None] + base + shifts[None, :]
    units = half_octave_values(exponents).reshape(-1)
    integers = np.clip(np.rint(values / units), -_LARGEST_INTEGER, _LARGEST_INTEGER)
    elements = (integers + 128).astype(np.uint8)
    return MomentsReference(spec.dtype, spec.shape, Form.SCALED, base, elements, state.rows, column_codes)


_NO_ROW = -(1 << 20)
"""Exponent of a row of zeros, below every other."""


def _squares(item: TensorInput, values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the second moment where there is a usable one, else the squares of the first."""
    if item.second_moment is not None and item.spec.role is TensorRole.EXP_AVG:
        second = host_values(item.second_moment).astype(np.float64)
        if np.isfinite(second).all() and (second >= 0).all() and second.any():
            return second
    return values.astype(np.float64) ** 2


def _factors(
    values: NDArray[Any], shape: tuple[int, ...], scale: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return exponents of row means, and of column means against the mean: ``scale * log2``, rounded."""
    matrix = values.astype(np.float64).reshape(sides(shape))
    by_row, by_column = matrix.mean(1), matrix.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = np.rint(scale * np.log2(by_row))
        columns = np.rint(scale * np.log2(by_column / matrix.mean()))
    rows = np.where(by_row > 0, rows, _NO_ROW)
    return rows.astype(np.int64), np.nan_to_num(columns, neginf=-128).astype(np.int64)


def _row_codes(rows: NDArray[np.int64], base: int) -> NDArray[np.uint8]:
    """Return 1 to 255 from the base up, and 0 for a row of zeros."""
    return np.where(rows == _NO_ROW, 0, np.clip(rows - base, 1, 255)).astype(np.uint8)


def _column_codes(columns: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (np.clip(columns, -128, 127) + 128).astype(np.uint8)


def _base(largest: int, form: Form, before: MomentsReference | None) -> int:
    """Return the base of the reference where the largest exponent still fits, else one with headroom."""
    if before is not None and before.form is form and 1 <= largest - before.base <= 255:
        return before.base
    return max(largest, -600) - (255 - _HEADROOM)
