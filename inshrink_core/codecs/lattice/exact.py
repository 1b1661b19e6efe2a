"""Steps that must come back bit for bit: lattice points, and beside them what is missing to the values.

The chain goes on from the lattice points, as if the step were an ordinary one, so that frames after an
exact one are as small as those before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inshrink_core.codec import Encoded, TensorReference
from inshrink_core.codecs.exact import LosslessReference, decode_exact, encode_exact
from inshrink_core.codecs.lattice.block import UNCHANGED, Kind, fits, pack_snapshot, parse
from inshrink_core.coding.events import read_varint, write_varint
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.codecs.lattice.block import LatticeReference

__all__ = ["make_exact", "pack_state", "parse_block"]


def make_exact(
    spec: TensorSpec, tensor: Tensor, encoded: Encoded, before: LatticeReference | None
) -> Encoded:
    """Return a lattice block and its state with the residual to the exact values beside.

    Parameters
    ----------
    spec, tensor
        The values.
    encoded
        Their lattice block.
    before
        The state it was encoded against.
    """
    state = fits(encoded.reference, spec)
    if state is None:
        return encoded
    base = _base(encoded.block.payload, state.decoded(), before)
    residual = encode_exact(spec, tensor, LosslessReference(base))
    payload = _join(encoded.block.payload, residual.block.payload)
    kept = tensor.detach().to("cpu", copy=True).contiguous()
    return Encoded(Block(encoded.block.codec, payload), replace(state, exact=kept))


def pack_state(spec: TensorSpec, state: LatticeReference) -> bytes:
    """Return the payload that alone decodes to a whole state, exact values included."""
    points = replace(state, exact=None)
    payload = pack_snapshot(points)
    if state.exact is None:
        return payload
    residual = encode_exact(spec, state.exact, LosslessReference(points.decoded()))
    return _join(payload, residual.block.payload)


def parse_block(
    spec: TensorSpec, payload: memoryview, reference: TensorReference | None
) -> tuple[Tensor, LatticeReference]:
    """Return the tensor of a payload of any kind and the state after it.

    Raises
    ------
    DamagedError
        The payload is none of such a tensor, or of another reference.
    """
    if not payload or payload[0] & 15 != Kind.EXACT:
        return parse(spec, payload, fits(reference, spec))
    if payload[0] != Kind.EXACT:
        raise DamagedError("a lattice block with a residual has no flags", where=spec.key)
    n, at = read_varint(payload, 1)
    if n > len(payload) - at:
        raise DamagedError("a lattice block is cut short", where=spec.key)
    inner, residual = payload[at : at + n], payload[at + n :]
    if inner and inner[0] & 15 == Kind.EXACT:
        raise DamagedError("a lattice block with a residual holds another", where=spec.key)
    before = fits(reference, spec)
    points, state = parse(spec, inner, before)
    exact = decode_exact(spec, residual, LosslessReference(_base(inner, points, before))).tensor
    return exact, replace(state, exact=exact.clone())


def _base(points_block: bytes | memoryview, points: Tensor, before: LatticeReference | None) -> Tensor:
    """Return what the residual is taken from: the exact values before, where the points did not move."""
    if bytes(points_block) == UNCHANGED and before is not None and before.exact is not None:
        return before.exact
    return points


def _join(points: bytes | memoryview, residual: bytes | memoryview) -> bytes:
    head = bytearray((Kind.EXACT,))
    write_varint(head, len(points))
    return b"".join((head, points, residual))
