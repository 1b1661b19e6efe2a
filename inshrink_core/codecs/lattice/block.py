"""Conversion between states and payloads of ``lattice/1``; ``docs/format-lattice.md`` defines the layout."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import PROTECTED, QUANTIZED, BaseReference, Levels, ShapedReference
from inshrink_core.codecs.exact import LosslessReference, decode_exact, encode_exact
from inshrink_core.codecs.lattice.step_size import MAX_EXPONENT, MAX_UNITS, MIN_EXPONENT, StepSize, lattice_of
from inshrink_core.codecs.shaping import Shaping
from inshrink_core.coding.rans import decode_rans, encode_rans, estimate_bits_of_counts
from inshrink_core.coding.raw import in_range, of_length
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.ops.cpu.distance import squared_distance
from inshrink_core.ops.cpu.lattice import pack_extra, unpack_extra
from inshrink_core.ops.flat import as_float32, flattened, sides
from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    EXACT,
    FIRST_LARGE,
    N_CONTEXTS,
    N_TOKENS,
    NEGATIVE,
    Lattice,
    advance,
    large_changes,
    round_to_lattice,
    scale_integers,
    sum_tokens,
)
from inshrink_core.ops.rans import rans_counts
from inshrink_core.varint import Cursor, write_section, write_varint

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.ops.lattice import Rounded


def is_matrix(spec: TensorSpec) -> bool:
    """Whether a tensor's step size follows the rule for matrices; vectors have a separate, finer one."""
    return len(spec.shape) >= 2


_STATISTIC = re.compile(r"(^|[._])(running|moving)_(mean|avg|average|var|variance)$")


def is_statistic(spec: TensorSpec) -> bool:
    """Whether a tensor is a running mean or variance of a normalisation layer, by role, shape and name.

    Other buffers have no known meaning: masks, positions, counts and constants are stored exactly.

    Examples
    --------
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> names = ("bn1.running_var", "bn1.num_batches_tracked", "attn.mask")
    >>> [is_statistic(TensorSpec(name=n, role=TensorRole.BUFFER, dtype="float32", shape=(8,))) for n in names]
    [True, False, False]
    """
    return spec.role is TensorRole.BUFFER and len(spec.shape) == 1 and bool(_STATISTIC.search(spec.name))


class Kind(IntEnum):
    """Lowest four bits of a payload; `EXACT` contains a payload of another kind and a residual."""

    UNCHANGED = 0
    STANDALONE = 1
    DELTA = 2
    EXACT = 3
    SNAPSHOT = 4
    BASED = 5


TRACKED = 0x10
CONTEXTS = 0x20
EXTRA = 0x40
HAS_EXACT = 0x80
"""Flags: the new state has a context state; tokens have contexts; extra bits follow; exact values follow."""

UNCHANGED = bytes((Kind.UNCHANGED,))

_MAX_SHIFT = 24
_STEP_SIZE_RANGE = "a lattice block's step size is out of range"
_SNAP = 0x80
"""Flag in a delta's shift: the integers are first moved to multiples of the step size."""

_MAX_SORTED = 1 << 20
"""Largest number of integers to sort for the list of values in use."""

_CONTEXT_STATES = N_CONTEXTS + NEGATIVE
"""Alphabet size of context states in a snapshot."""

_UNIT_LATTICE = Lattice(unit=1.0, step_size=1, reciprocal=1.0, bound=(1 << 24) - 1)
"""Lattice of integers with step size 1."""


def pack_standalone(rounded: Rounded, state: LatticeReference, base: Tensor | None = None) -> bytes:
    """Return the payload of a tensor without a previous state, or relative to a base model's points."""
    scales, contexts = pack_scales(rounded.tokens, state.shape)
    kind = Kind.STANDALONE if base is None else Kind.BASED
    return _pack(kind, state.step_size.exponent, rounded, state, base, contexts, scales)


def base_points(base: BaseReference, lattice: Lattice) -> Tensor:
    """Return a base model's values as lattice integers; 0 for values that are not finite or too large.

    The result consists of single float32 operations, so it is the same on every device.
    """
    values = as_float32(base.decoded())
    return round_to_lattice(values, None, None, lattice).integers


def pack_delta(
    rounded: Rounded, state: LatticeReference, before: Tensor, contexts: Tensor | None, shift: int, snap: bool
) -> bytes:
    """Return the payload of changes, for a reference that was `refined` by `shift` bits or `snapped`."""
    return _pack(Kind.DELTA, shift | (_SNAP if snap else 0), rounded, state, before, contexts)


def points_moved(payload: bytes | memoryview) -> bool:
    """Whether a payload moves any lattice point, also inside a payload with a residual."""
    if payload[0] & 15 == Kind.EXACT:
        payload = Cursor(memoryview(payload)[1:]).section()
    return bytes(payload) != UNCHANGED


def pack_snapshot(state: LatticeReference) -> bytes:
    """Return the standalone payload of a whole state: integers, context state and step size."""
    divisor = int(np.gcd.reduce(state.integers.cpu().numpy())) or 1
    zeros = torch.zeros_like(state.integers)
    multiples = (state.integers // divisor).to(torch.float32)
    rounded = round_to_lattice(multiples, zeros, None, _UNIT_LATTICE)
    rounded.tokens[state.exact_at] = EXACT
    head = bytearray()
    write_varint(head, divisor)
    if state.context_state is not None:
        write_section(head, encode_rans(state.context_state, None, _CONTEXT_STATES))
    scales, contexts = pack_scales(rounded.tokens, state.shape)
    n_exact = state.exact_at.numel()
    largest = EXACT if n_exact else rounded.largest
    rounded = rounded._replace(n_exact=n_exact, n_large=rounded.n_large + n_exact, largest=largest)
    return _pack(Kind.SNAPSHOT, state.step_size.exponent, rounded, state, zeros, contexts, head + scales)


def _pack(
    kind: Kind,
    first: int,
    rounded: Rounded,
    state: LatticeReference,
    before: Tensor | None,
    contexts: Tensor | None,
    head: bytes | bytearray = b"",
) -> bytes:
    """Return a payload: flags, a byte, step size, head, extra bits, exact values, tokens.

    `contexts` are the contexts of the tokens; for a delta, they are the context state before it.
    """
    step_size = 1 if kind is Kind.SNAPSHOT else state.step_size.units
    context_state = contexts if kind is Kind.DELTA else None
    flags = (TRACKED if state.context_state is not None else 0) | (CONTEXTS if contexts is not None else 0)
    sections = []
    if rounded.n_large > rounded.n_exact:
        flags |= EXTRA
        z = large_changes(rounded.tokens, before, rounded.integers, context_state, step_size)
        sections.append(pack_extra(z))
    if state.exact_values.numel():
        flags |= HAS_EXACT
        sections.append(words_of(state.exact_values).cpu().numpy().tobytes())
    parts = bytearray((kind | flags, first & 0xFF))
    write_varint(parts, state.step_size.units)
    parts += head
    for section in sections:
        write_section(parts, section)
    n_tokens = rounded.largest + 1
    parts.append(n_tokens - 1)
    stream = encode_rans(rounded.tokens, contexts, n_tokens, 1 if contexts is None else N_CONTEXTS)
    return b"".join((parts, stream))


def words_of(values: Tensor) -> Tensor:
    """Return the bits of values as integers, since NaN compares unequal to itself."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


@dataclass(slots=True)
class _Cursor(Cursor):
    """Reads a block behind its first byte, which has the flags; tokens are decoded on `device`."""

    flags: int
    device: torch.device


def parse(
    spec: TensorSpec,
    payload: memoryview,
    reference: LatticeReference | None,
    base: BaseReference | None = None,
    device: str | torch.device = "cpu",
) -> LatticeReference:
    """Return the state after a payload, on the reference's device, or else on `device`.

    Raises
    ------
    DamagedError
        The payload is not valid for the tensor and reference.
    """
    if len(payload) == 0:
        raise DamagedError("a lattice block is empty")
    kind = in_range(payload[0] & 15, 0, max(Kind), "a lattice block is of no known kind")
    cursor = _Cursor(payload[1:], payload[0] & 0xF0, torch.device(device))
    if kind == Kind.DELTA and reference is not None:
        return _parse_delta(spec, cursor, reference)
    if kind == Kind.EXACT:
        return _parse_exact(spec, cursor, reference, base)
    if kind == Kind.BASED and base is None:
        raise DamagedError("a lattice block needs a base model, and its frame names none")
    if kind in (Kind.STANDALONE, Kind.SNAPSHOT, Kind.BASED):
        return _parse_alone(spec, cursor, kind == Kind.SNAPSHOT, base if kind == Kind.BASED else None)
    if reference is None:
        raise DamagedError("a lattice delta has no reference of its dtype and shape")
    if len(payload) > 1 or cursor.flags:
        raise DamagedError("bytes follow in a block without change")
    return reference if reference.exact is None else replace(reference, exact=None)


def _parse_exact(
    spec: TensorSpec, cursor: _Cursor, before: LatticeReference | None, base: BaseReference | None
) -> LatticeReference:
    """Return the state of the lattice points with the exact values that the residual yields."""
    if cursor.flags:
        raise DamagedError("a lattice block with a residual has no flags")
    inner, residual = cursor.section(), cursor.rest
    if inner and inner[0] & 15 == Kind.EXACT:
        raise DamagedError("a lattice block with a residual holds another")
    state = parse(spec, inner, before, base, cursor.device)
    against = LosslessReference(_residual_base(inner, state.decoded(), before))
    return replace(state, exact=decode_exact(spec, residual, against).tensor.contiguous())


def make_exact(
    spec: TensorSpec,
    tensor: Tensor,
    points: Block,
    state: LatticeReference,
    before: LatticeReference | None,
) -> tuple[Block, LatticeReference]:
    """Return a bit-exact step: its lattice points with a residual.

    Later frames continue from the points, as after an ordinary step, so they do not become larger.

    Parameters
    ----------
    spec, tensor
        The values.
    points, state
        Their lattice block, and the state after it.
    before
        The state that the block was encoded against.
    """
    base = _residual_base(points.payload, state.decoded(), before)
    residual = encode_exact(spec, tensor, LosslessReference(base))
    payload = _join(points.payload, residual.block.payload)
    values = tensor.detach().to("cpu", copy=True).contiguous()
    return Block(points.codec, payload), replace(state, exact=values)


def pack_state(spec: TensorSpec, state: LatticeReference) -> bytes:
    """Return the standalone payload of a whole state, including exact values."""
    points = replace(state, exact=None)
    payload = pack_snapshot(points)
    if state.exact is None:
        return payload
    residual = encode_exact(spec, state.exact, LosslessReference(points.decoded()))
    return _join(payload, residual.block.payload)


def _residual_base(
    points_block: bytes | memoryview, points: Tensor, before: LatticeReference | None
) -> Tensor:
    """Return the base of the residual: the previous exact values if no point moved, else the points."""
    if bytes(points_block) == UNCHANGED and before is not None and before.exact is not None:
        return before.exact
    return points


def _join(points: bytes | memoryview, residual: bytes | memoryview) -> bytes:
    head = bytearray((Kind.EXACT,))
    write_section(head, points)
    return b"".join((head, residual))


def _parse_alone(
    spec: TensorSpec, cursor: _Cursor, snapshot: bool, base: BaseReference | None
) -> LatticeReference:
    flags, device = cursor.flags, cursor.device
    exponent = (cursor.take(1)[0] ^ 0x80) - 0x80
    in_range(exponent, MIN_EXPONENT, MAX_EXPONENT, "a lattice block's exponent is out of range")
    units = in_range(cursor.varint(), 1, MAX_UNITS, _STEP_SIZE_RANGE)
    divisor, context_state = units, None
    if snapshot:
        divisor = in_range(cursor.varint(), 1, MAX_UNITS, _STEP_SIZE_RANGE)
        if flags & TRACKED:
            context_state = decode_rans(cursor.section(), spec.numel, _CONTEXT_STATES, device=device)
            largest = int((context_state & CONTEXT_BITS).max())
            in_range(largest, 0, N_CONTEXTS - 1, "a context state is of no known kind")
    elif flags & TRACKED and base is None:
        raise DamagedError("a lattice block without reference has a context state")
    lattice = lattice_of(StepSize(exponent, divisor), spec.dtype)
    contexts = parse_scales(cursor.section(), spec) if flags & CONTEXTS else None
    before = None if base is None else base_points(base, lattice).to(device)
    state = _finish(spec, cursor, contexts, (before, None), lattice, StepSize(exponent, units))
    return replace(state, context_state=context_state) if snapshot else state


def _parse_delta(spec: TensorSpec, cursor: _Cursor, reference: LatticeReference) -> LatticeReference:
    flags, first = cursor.flags, cursor.take(1)[0]
    shift, snap = first & ~_SNAP, bool(first & _SNAP)
    units = in_range(cursor.varint(), 1, MAX_UNITS, _STEP_SIZE_RANGE)
    finest = min(_MAX_SHIFT, reference.step_size.exponent - MIN_EXPONENT)
    exponent = reference.step_size.exponent - in_range(shift, 0, finest, "a lattice block refines too far")
    contexts = None
    if flags & CONTEXTS:
        if reference.context_state is None:
            raise DamagedError("a lattice block needs a context state its reference lacks")
        contexts = reference.context_state
    lattice = lattice_of(StepSize(exponent, units), spec.dtype)
    before = refined(reference, shift, lattice) if shift else reference.integers
    if before is not None and snap:
        before = snapped(before, lattice)
    if before is None:
        raise DamagedError("a lattice block moves integers out of their bound", found=str(shift))
    context_state = reference.context_state if flags & TRACKED else None
    # Decode on the reference's device: the host for an encoder's chain, or the device of its keyframe.
    cursor.device = before.device
    return _finish(spec, cursor, contexts, (before, context_state), lattice, StepSize(exponent, units))


def refined(reference: LatticeReference, shift: int, lattice: Lattice) -> Tensor | None:
    """Return a reference's integers in units smaller by 2**shift; None if they exceed the bound."""
    if reference.integers.numel() and int(reference.integers.abs().max()) > lattice.bound >> shift:
        return None
    return reference.integers << shift


def snapped(integers: Tensor, lattice: Lattice) -> Tensor | None:
    """Return integers moved to the nearest lattice points, halves upwards; None beyond the bound."""
    units = lattice.step_size
    moved = torch.div(integers + units // 2, units, rounding_mode="floor").mul_(units)
    return None if moved.numel() and int(moved.abs().max()) > lattice.bound else moved


def _finish(
    spec: TensorSpec,
    cursor: _Cursor,
    contexts: Tensor | None,
    before: tuple[Tensor | None, Tensor | None],
    lattice: Lattice,
    step_size: StepSize,
) -> LatticeReference:
    """Decode tokens, and apply them to the previous integers and context state."""
    flags, device = cursor.flags, cursor.device
    extra = cursor.section() if flags & EXTRA else None
    exact_bytes = cursor.section() if flags & HAS_EXACT else b""
    n_tokens = in_range(cursor.take(1)[0] + 1, 1, N_TOKENS, "a lattice block has too many tokens")
    n_contexts = 1 if contexts is None else N_CONTEXTS
    tokens = decode_rans(cursor.rest, spec.numel, n_tokens, contexts, n_contexts, device=device)
    large = np.zeros(0, np.int64) if extra is None else unpack_extra(tokens, extra)
    at, exact = _exact_values(spec, tokens, exact_bytes) if n_tokens > EXACT else no_exact(spec.dtype, device)
    # If there are extra bits, unpacking has counted their tokens; small alphabets have no such tokens.
    if extra is None and n_tokens > FIRST_LARGE:
        has_large = int((tokens >= FIRST_LARGE).count_nonzero()) > at.numel()
    else:
        has_large = large is not None and large.size > 0
    if large is None or (extra is None) == has_large:
        raise DamagedError("extra bits do not fit the tokens")
    if n_tokens <= EXACT and exact_bytes:
        raise DamagedError("exact values belong to no token")
    moved = advance(tokens, large, *before, lattice)
    if moved is None:
        raise DamagedError("a lattice value leaves its range")
    return LatticeReference(
        dtype=spec.dtype,
        shape=spec.shape,
        step_size=step_size,
        integers=moved[0],
        context_state=moved[1] if flags & TRACKED else None,
        exact_at=at,
        exact_values=exact,
    )


def _exact_values(spec: TensorSpec, tokens: Tensor, stored: bytes | memoryview) -> tuple[Tensor, Tensor]:
    at = (tokens == EXACT).nonzero().view(-1)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    of_length(stored, at.numel() * dtype.itemsize, "exact values do not fit their tokens")
    if at.numel() == 0:
        return no_exact(spec.dtype, tokens.device)
    return at, torch.from_numpy(np.frombuffer(stored, np.uint8).copy()).view(dtype).to(tokens.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatticeReference(ShapedReference):
    """State of a tensor on its lattice.

    Parameters
    ----------
    dtype, shape
        Stored dtype and shape.
    step_size
        Unit, and step size of the last frame.
    integers : Int32[Tensor, "n"]
        Value in units; 0 for an exact value.
    context_state : UInt8[Tensor, "n"] or None
        When and how each element last changed (`inshrink_core.ops.lattice`); None: not tracked.
    exact_at : Int64[Tensor, "k"]
        Positions of exact values, ascending.
    exact_values : Float[Tensor, "k"]
        The exact values in the stored dtype.
    exact : Float[Tensor, "shape"] or None
        All values of a bit-exact step; the next delta does not use them.
    shaping
        Encoder state of error feedback; None without error feedback, and in decoded states.
    """

    step_size: StepSize
    integers: Tensor
    context_state: Tensor | None
    exact_at: Tensor
    exact_values: Tensor
    exact: Tensor | None = None
    shaping: Shaping | None = field(default=None, compare=False)

    def decoded(self) -> Tensor:
        """Return the tensor: integers times the unit, rounded once to the stored dtype; or `exact`."""
        if self.exact is not None:
            return self.exact
        values = scale_integers(self.integers, math.ldexp(1.0, self.step_size.exponent))
        if self.dtype != "float32":
            values = values.to(getattr(torch, self.dtype))
        if self.exact_at.numel():
            values[self.exact_at] = self.exact_values
        return values.view(self.shape)

    def distance(self, tensor: Tensor) -> tuple[float, float] | None:
        """Return the distance of values to their points, in one pass; None if any are stored otherwise."""
        if self.exact is not None or self.exact_at.numel() or self.dtype != "float32":
            return None
        if tensor.dtype != torch.float32 or tensor.device != self.integers.device:
            return None
        return squared_distance(flattened(tensor), self.integers, math.ldexp(1.0, self.step_size.exponent))

    def levels(self) -> Levels:
        """Return the points in use, if the tensor is small enough to list them, and the exact elements."""
        if self.exact is not None:
            return Levels("exact", parts=PROTECTED)
        integers = self.integers.cpu().numpy()
        parts: NDArray[np.uint8] | int = QUANTIZED
        if self.exact_at.numel():
            parts = np.full(integers.size, QUANTIZED, np.uint8)
            parts[self.exact_at.cpu().numpy()] = PROTECTED
        points = None
        if integers.size <= _MAX_SORTED:
            points = np.unique(integers) * math.ldexp(1.0, self.step_size.exponent)
        return Levels("lattice", points, self.step_size.width, parts)


@lru_cache(maxsize=64)
def no_exact(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions and values of no exact elements: cached tensors, never modified."""
    return (
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=getattr(torch, dtype), device=device),
    )


_N_CLASSES = 64
"""Number of classes: half octaves of a mean in 64ths, up to the largest token."""

_MIN_SIDE = 4
"""Rows or columns below which classes add no information to the table."""


def pack_scales(tokens: Tensor, shape: tuple[int, ...]) -> tuple[bytes, Tensor | None]:
    """Return the section of row and column classes, and the contexts; empty and None if they do not pay.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Tokens of a tensor that is coded without a reference.
    shape
        Shape of the tensor; the dimensions from the second are joined to columns.
    """
    rows, columns = sides(shape)
    if min(rows, columns) < _MIN_SIDE:
        return b"", None
    row_sums, column_sums = sum_tokens(tokens, rows)
    by_row, by_column = _classes(row_sums, columns), _classes(column_sums, rows)
    contexts = _contexts(by_row, by_column).to(tokens.device)
    stream = encode_rans(torch.from_numpy(np.concatenate((by_row, by_column))), None, _N_CLASSES)
    counts = rans_counts(tokens, contexts, N_TOKENS, N_CONTEXTS).numpy()
    gain = estimate_bits_of_counts(counts.sum(0, keepdims=True)) - estimate_bits_of_counts(counts)
    if gain <= 8 * (len(stream) + 4):
        return b"", None
    section = bytearray()
    write_section(section, stream)
    return bytes(section), contexts


def parse_scales(section: memoryview, spec: TensorSpec) -> Tensor:
    """Return the contexts that a section of classes defines.

    Raises
    ------
    DamagedError
        The section is not valid for the shape.
    """
    rows, columns = sides(spec.shape)
    if min(rows, columns) < _MIN_SIDE:
        raise DamagedError("a tensor of this shape has no classes of rows and columns")
    classes = decode_rans(section, rows + columns, _N_CLASSES).numpy()
    return _contexts(classes[:rows], classes[rows:])


def _classes(sums: NDArray[np.int64], n: int) -> NDArray[np.uint8]:
    """Return the half octave of ``64 * sum / n``, or 0 if that is below one."""
    means = (sums * 64) // n
    octaves = np.zeros(means.size, np.int64)
    for k in range(1, 15):
        octaves += (means >> k) > 0
    # The square determines whether the mean is past the middle of its octave.
    upper = means * means >= np.int64(2) << (2 * octaves)
    return np.where(means > 0, 2 * octaves + upper, 0).astype(np.uint8)


def _contexts(by_row: NDArray[np.uint8], by_column: NDArray[np.uint8]) -> Tensor:
    """Return the sums of row and column classes, centred on the mean class, as contexts."""
    middle = N_CONTEXTS // 2
    row = by_row.astype(np.int8) - np.int8(by_row.sum(dtype=np.int64) // by_row.size)
    column = by_column.astype(np.int8) - np.int8(by_column.sum(dtype=np.int64) // by_column.size)
    # Classes are below 64, so a sum fits a byte before the middle is added.
    sums = torch.from_numpy(row)[:, None] + torch.from_numpy(column)[None, :]
    return sums.clamp_(-middle, middle).add_(middle).view(torch.uint8).view(-1)
