"""The moments codec: optimizer state stored by scale and direction, with no second moment rounded to zero.

The quality of optimizer state is measured by the loss curve after a restore. Second moments set the size of
each parameter's step. They are stored to an octave relative to row and column factors (Adafactor: Shazeer &
Stern, ICML 2018, section 3), or as these factors alone. First moments set the direction. They are stored in
coarse units with a rounding that preserves their projection on themselves, or omitted. ``docs/optimizer.md``
lists the cost of each in bytes and in loss, and ``docs/format.md`` defines the bytes.

Notes
-----
A first moment does not depend on the decoded second moment. It has separate row and column units, which take
some hundredths of its size, so every tensor decodes independently. Encoding and decoding are O(n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import Encoded, FrameContext, TensorInput, TensorReference
from inshrink_core.codecs.fallback import FallbackCodec
from inshrink_core.codecs.moments.block import LAST_SEED, Form, MomentsReference, pack, parse
from inshrink_core.frame import Block
from inshrink_core.ops.flat import as_float32, sides
from inshrink_core.ops.moments import (
    ZERO_POINT,
    Codes,
    Units,
    carry_log2,
    dither_log2,
    round_first,
    round_second,
    round_vector,
)

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec

__all__ = ["MomentsCodec"]

_SECOND = frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ})
_FIRST = frozenset({TensorRole.EXP_AVG, TensorRole.MOMENTUM})

_UNITS = {
    (TensorRole.EXP_AVG, "fidelity"): 2.0,
    (TensorRole.MOMENTUM, "fidelity"): 2.0,
    (TensorRole.MOMENTUM, "ratio"): 4.0,
}
"""Unit of first moments in root mean squares, if a frame has no expected update size. SGD has no other state,
so its momentum buffer is never omitted."""

HYSTERESIS: Final = 1.0
"""Distance in octaves of a second moment from its code at which the code changes. With 0.5, which is plain
rounding, values near an edge would change repeatedly (``docs/design.md``)."""

_SHARE_OF_STEP_SIZE: Final = 0.5
"""Unit of first moments as an expected update size, in step sizes of the weight. At this value the moments
add about as much to the cost of a restore as the weights (``docs/design.md``)."""


class MomentsPlan(NamedTuple):
    """The decisions of a frame for all its moments.

    Parameters
    ----------
    allowed
        Allowed error of a first moment, over the root of the second moment if there is one; by parameter.
    after_restore
        Whether training resumed from the decoded codes. The codes of second moments then change by the
        movement since the restore: with hysteresis or rounding to the nearest, they would return to the old
        values after each restore.
    """

    allowed: Mapping[str, float] = MappingProxyType({})
    after_restore: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsCodec(FallbackCodec[MomentsPlan | None]):
    """Codec of Adam's moments and momentum buffers; other tensors and non-finite ones are exact.

    Parameters
    ----------
    preset
        ``fidelity``: second moments to an octave relative to row and column factors, and first moments in
        coarse units that preserve their projection; one to three bits a parameter for both. With weights on
        a lattice, the units make the expected update as precise as the weights. ``ratio``: second moments as
        rank-one factors, and Adam's first moment omitted; a few hundredths of a bit. A momentum buffer is
        never omitted; it takes about 1.2 and 0.7 bits a parameter.

    Raises
    ------
    ConfigError
        The preset does not exist.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorSpec
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.EXP_AVG_SQ, dtype="float32", shape=(16, 16))
    >>> item = TensorInput(spec=spec, tensor=torch.tensor([[1.0, 0.6], [0.0, 9.0]]).repeat(8, 8))
    >>> MomentsCodec().encode(item, None, None).reference.decoded()[:2, :2].tolist()
    [[1.0, 0.7071067690849304], [0.0, 8.0]]
    """

    name = "moments"
    bitstream = "moments/1"
    words: ClassVar = {"preset": ("fidelity", "ratio")}
    lossy_roles = _SECOND | _FIRST

    preset: str = "fidelity"

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> MomentsPlan:
        """Return the allowed errors of first moments, ``D / 2r``, for step size D and expected update r."""
        if context is None:
            return MomentsPlan()
        allowed = {
            name: _SHARE_OF_STEP_SIZE * context.step_sizes[name] / reach
            for name, reach in context.expected_updates.items()
            if name in context.step_sizes
        }
        return MomentsPlan(allowed, context.after_restore)

    def encode_lossy(
        self, item: TensorInput, plan: MomentsPlan | None, reference: TensorReference | None
    ) -> Encoded | None:
        """Round a moment; None for non-finite values and for negative second moments."""
        spec, before = item.spec, _fitting(reference, item.spec)
        form, codes, dither_seed = _rounded(item, self.preset, plan or MomentsPlan(), before)
        if codes is None:
            return None
        # Use the device of the chain's states: states decoded from an archive may be in host memory.
        device = item.tensor.device if before is None else before.device
        state = MomentsReference(spec.dtype, spec.shape, form, codes.on(device), dither_seed)
        return Encoded(Block(self.bitstream, pack(state, before)), state)

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> MomentsReference:
        """Return the state after a payload."""
        return parse(payload, spec, _fitting(reference, spec), device)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a block of the same integers; an exact block for other states."""
        state = _fitting(reference, spec)
        if state is None:
            return FallbackCodec.rekey(self, spec, reference, unchanged=unchanged)
        return Block(self.bitstream, pack(state, state if unchanged else None))


def _fitting(reference: TensorReference | None, spec: TensorSpec) -> MomentsReference | None:
    """Return the reference if its integers belong to the same elements; the dtype may differ."""
    return reference if isinstance(reference, MomentsReference) and reference.shape == spec.shape else None


def _rounded(
    item: TensorInput, preset: str, plan: MomentsPlan, before: MomentsReference | None
) -> tuple[Form, Codes | None, int]:
    """Return the form of a tensor, its codes, and its dither seed.

    The codes are None for non-finite values and negative second moments, which are not rounded.
    """
    spec, values = item.spec, as_float32(item.tensor)
    n_rows, _ = sides(spec.shape)
    if spec.role in _FIRST:
        second, unit = None, _UNITS.get((spec.role, preset), 0.0)
        if spec.role is TensorRole.EXP_AVG:
            # Without a second moment, the allowed error has another unit than the values.
            second = item.auxiliary(TensorRole.EXP_AVG_SQ)
        allowed = None if spec.role is TensorRole.EXP_AVG and second is None else plan.allowed.get(spec.name)
        squares = None if second is None else as_float32(second).to(values.device)
        codes = round_first(values, squares, n_rows, unit, allowed)
        return Form.ZEROS if codes is not None and not codes.rows.numel() else Form.SCALED, codes, 0
    form = Form.RANK_ONE if preset == "ratio" else Form.FACTORED
    if len(spec.shape) < 2:
        form = Form.OCTAVES
    old = before.codes if before is not None and before.form is form else None
    if form is Form.OCTAVES:
        codes = round_vector(values, None if old is None else old.base)
    else:
        codes = round_second(values, n_rows, old, HYSTERESIS if form is Form.FACTORED else None)
    dither_seed = 0 if before is None else before.dither_seed
    if codes is None or form is Form.RANK_ONE or not (dither_seed or plan.after_restore):
        return form, codes, 0
    units = _units_of(codes, values.numel())
    if plan.after_restore:
        comparable = old is not None and (form is Form.FACTORED or old.base == codes.base)
        earlier = old.elements.to(values.device) if old is not None and comparable else codes.elements
        carried = carry_log2(values, units, earlier, codes.elements)
        if carried is not None:
            return form, codes._replace(elements=carried), 0
        dither_seed = dither_seed % LAST_SEED + 1
    return form, codes._replace(elements=dither_log2(values, units, dither_seed)), dither_seed


def _units_of(codes: Codes, n: int) -> Units:
    """Return the units that octaves are relative to; for a vector, its base."""
    if not codes.rows.numel():
        return Units(np.array([2 * (codes.base + ZERO_POINT)]), np.zeros(n, np.int64))
    rows, columns = codes.rows.numpy().astype(np.int64), codes.columns.numpy().astype(np.int64)
    return Units(rows + codes.base, columns - ZERO_POINT)
