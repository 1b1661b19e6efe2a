"""Base of the grid codecs: uniform levels between the smallest and the largest value, and deltas of levels.

With n = ``2**bits`` levels from low to high, level k has the value ``low + k (high - low) / (n - 1)``. The
codecs quantize first and then take differences of level numbers. The state is the level numbers, so errors do
not accumulate. ``docs/format-rivals.md`` (grid blocks) has the layout.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from inshrink_core.codec import Encoded, Levels, ShapedReference, TensorInput, TensorReference, state_as
from inshrink_core.codecs.fallback import FallbackCodec, host_values
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_lab.published.flat import FLAT_WORDS, Floats, Symbols, decode_flat, encode_flat

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec


DELTA = 0x01
SAME_GRID = 0x02
"""Flags of a payload: level numbers are relative to the reference's; the grid is the reference's."""

MAX_BITS = 8
"""Maximum width of a level number: a byte."""

_HOLD_SHARE = 1.25
"""Maximum span of a reused grid relative to the values: it costs at most a third of a bit of precision."""

_HEADER_BYTES = 2 + 8

_Plan = TypeVar("_Plan")


class Grid(NamedTuple):
    """Evenly spaced levels: ``2**bits`` from `low` to `high`, both float32 numbers."""

    bits: int
    low: float
    high: float

    def levels(self) -> Floats:
        """Return the value of every level: float64, in this order, rounded once to float32."""
        top = (1 << self.bits) - 1
        numbers = np.arange(top + 1, dtype=np.float64)
        return ((self.low * (top - numbers) + self.high * numbers) / top).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GridReference(ShapedReference):
    """State of a tensor on a grid.

    Parameters
    ----------
    dtype, shape
        As stored.
    symbols : UInt8[Tensor, "n"]
        Level numbers.
    grid
        The levels.
    """

    symbols: torch.Tensor
    grid: Grid

    def decoded(self) -> torch.Tensor:
        """Return the tensor: one look-up a value."""
        table = torch.from_numpy(self.grid.levels()).to(getattr(torch, self.dtype))
        return table[self.symbols.long()].view(self.shape)

    def levels(self) -> Levels:
        """Return the grid."""
        points = self.grid.levels().astype(np.float64)
        step_size = float(points[1] - points[0]) if points.size > 1 else None
        return Levels("grid", np.unique(points), step_size)


def level_numbers(values: Floats, grid: Grid) -> Symbols:
    """Return the level nearest to every value, halves to the even level.

    Examples
    --------
    >>> level_numbers(np.array([-1.0, 0.1, 3.0], np.float32), Grid(2, -1.0, 2.0)).tolist()
    [0, 1, 3]
    """
    top = (1 << grid.bits) - 1
    span = grid.high - grid.low
    if span == 0:
        return np.zeros(values.size, np.uint8)
    position = (values.astype(np.float64) - grid.low) / span * top
    return np.clip(np.rint(position), 0, top).astype(np.uint8)


class GridCodec(FallbackCodec[_Plan]):
    """Base of the codecs that quantize uniformly first; subclasses choose the width of a tensor."""

    __slots__ = ()

    words: ClassVar = {"grid": ("held", "refit"), **FLAT_WORDS}
    grid: str
    coder: str

    @abstractmethod
    def bits_of(self, spec: TensorSpec, plan: _Plan, previous: GridReference | None) -> int:
        """Return the width of a tensor's level numbers."""

    def encode_lossy(
        self, item: TensorInput, plan: _Plan, reference: TensorReference | None
    ) -> Encoded | None:
        """Return level numbers, as a delta if a reference exists; None if a value is not finite."""
        spec, values = item.spec, host_values(item.tensor)
        if not np.isfinite(values).all():
            return None
        previous = state_as(GridReference, reference, spec)
        fresh = Grid(self.bits_of(spec, plan, previous), float(values.min()) + 0.0, float(values.max()) + 0.0)
        same = previous is not None and (
            previous.grid == fresh or (self.grid == "held" and _still_fits(previous.grid, fresh))
        )
        grid = previous.grid if previous is not None and same else fresh
        symbols = torch.from_numpy(level_numbers(values, grid))
        state = GridReference(dtype=spec.dtype, shape=spec.shape, symbols=symbols, grid=grid)
        return Encoded(Block(self.bitstream, pack_grid(state, previous, self.coder)), state)

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> GridReference:
        """Return the state a payload decodes to."""
        return parse_grid(spec, payload, state_as(GridReference, reference, spec))

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a self-contained block; references of other codecs become exact blocks."""
        state = state_as(GridReference, reference, spec)
        if unchanged or state is None:
            return FallbackCodec.rekey(self, spec, reference, unchanged=unchanged)
        return Block(self.bitstream, pack_grid(state, None, "huffman"))


def _still_fits(old: Grid, fresh: Grid) -> bool:
    """Return whether a grid covers the values without wasting levels."""
    covers = old.low <= fresh.low and fresh.high <= old.high
    return old.bits == fresh.bits and covers and old.high - old.low <= _HOLD_SHARE * (fresh.high - fresh.low)


def pack_grid(state: GridReference, previous: GridReference | None, coder: str) -> bytes:
    """Return the payload that decodes to `state`, as a delta if there is a previous state."""
    symbols, bits = state.symbols.numpy(), state.grid.bits
    same = previous is not None and previous.grid == state.grid
    flags = (DELTA if previous is not None else 0) | (SAME_GRID if same else 0)
    head = bytes((flags, bits))
    if not same:
        head += np.array([state.grid.low, state.grid.high]).astype("<f4").tobytes()
    if previous is not None:
        bits = max(bits, previous.grid.bits)
        symbols = (previous.symbols.numpy() - symbols) & np.uint8((1 << bits) - 1)
    return head + encode_flat(symbols, 1 << bits, coder)


def parse_grid(spec: TensorSpec, payload: memoryview, previous: GridReference | None) -> GridReference:
    """Return the state a payload decodes to.

    Raises
    ------
    DamagedError
        The payload is not one of this spec and reference.
    """
    flags, bits = payload[0], payload[1]
    if flags & ~(DELTA | SAME_GRID) or not 1 <= bits <= MAX_BITS or flags == SAME_GRID:
        raise DamagedError("the block has unknown flags or an unknown width")
    if flags & DELTA and previous is None:
        raise DamagedError("the block is a delta against another reference")
    before = previous if flags & DELTA else None
    if before is not None and flags & SAME_GRID:
        grid, at = before.grid, 2
        if grid.bits != bits:
            raise DamagedError("the block's grid is that of another reference")
    else:
        grid, at = _parse_bounds(spec, payload, bits), _HEADER_BYTES
    width = bits if before is None else max(bits, before.grid.bits)
    symbols = decode_flat(payload[at:], spec.numel, 1 << width)
    if before is not None:
        symbols = (before.symbols.numpy() - symbols) & np.uint8((1 << width) - 1)
        if int(symbols.max()) >= 1 << bits:
            raise DamagedError("a level number is outside the grid")
    return GridReference(dtype=spec.dtype, shape=spec.shape, symbols=torch.from_numpy(symbols), grid=grid)


def _parse_bounds(spec: TensorSpec, payload: memoryview, bits: int) -> Grid:
    if len(payload) < _HEADER_BYTES:
        raise DamagedError("the grid is cut short")
    low, high = (float(bound) for bound in np.frombuffer(payload[2:_HEADER_BYTES], "<f4"))
    largest = float(torch.finfo(getattr(torch, spec.dtype)).max)
    if not -largest <= low <= high <= largest:
        raise DamagedError("the bounds of a grid are not finite and in order")
    return Grid(bits, low, high)
