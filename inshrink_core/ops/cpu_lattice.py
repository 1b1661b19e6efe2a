"""Numba kernels of the lattice codec: one pass over a tensor each way.

`inshrink_core.ops.lattice` documents the functions; `reference_lattice` has their twins in plain torch.
The tensor is taken in chunks that stay in the first-level cache: every loop over a chunk is free of
branches, so that it compiles to vector instructions; what is rare is put right after it.
Chunks are slices indexed from 0, because an index with an offset might be negative for all the compiler
knows, and is then not vectorized (five times slower).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops import reference_lattice as reference
from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    EXACT,
    FIRST_LARGE,
    GAIN_BINS,
    MAX_PRODUCT,
    NEGATIVE,
    OLDEST_CONTEXT,
    Advanced,
    Gain,
    Grid,
    Rounded,
)
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

_CHUNK = 2048
"""Elements at a time: 16 bytes each, in a first-level cache of 32 kB."""

_NO_BASE, _NO_GRADES = np.empty(0, np.float32), np.zeros(1, np.int32)

_I32 = np.int32
_U8 = np.uint8
_F32 = np.float32
_AGING = np.uint8(OLDEST_CONTEXT)
_CONTEXT = np.uint8(CONTEXT_BITS)
_SIGN = np.uint8(NEGATIVE)


@njit(nogil=True, inline="always")
def _next_history(q: Any, old: Any) -> Any:  # pragma: no cover - compiled
    """History after a change by q of either sign, without branches."""
    context = old & _CONTEXT
    aging = (context > _U8(0)) & (context < _AGING)
    aged = _U8(old + (_U8(3) if aging else _U8(0)))
    negative = _U8(1) if q < _I32(0) else _U8(0)
    pair = _U8(2) + _U8(negative ^ ((old >> _U8(5)) & _U8(1)))
    fresh = _U8((_U8(1) if context == _U8(0) else pair) + _U8(negative << _U8(5)))
    return aged if q == _I32(0) else fresh


@njit(nogil=True, cache=True)
def _emit(
    q: NDArray[np.int32],
    exact: NDArray[np.uint8],
    integers: NDArray[np.int32],
    history: NDArray[np.uint8],
    step: int,
    tokens: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    after: NDArray[np.int32],
    new: NDArray[np.uint8],
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Turn the changes of a chunk into tokens and the next state; count large and exact ones."""
    n = tokens.size
    m = _I32(step)
    largest, any_exact = _I32(0), _U8(0)
    for i in range(n):
        old = history[i]
        change = q[i]
        turned = _I32(-change) if old & _SIGN else change
        z = _I32((turned << _I32(1)) ^ (turned >> _I32(31)))
        largest |= z
        any_exact |= exact[i]
        tokens[i] = _U8(z & _I32(255))
        contexts[i] = old & _CONTEXT
        after[i] = _I32(integers[i] + m * change)
        new[i] = _next_history(change, old)
    n_large, n_exact = 0, 0
    if largest >= _I32(FIRST_LARGE) or largest < _I32(0):
        for i in range(n):
            old = history[i]
            v = -np.int64(q[i]) if old & _SIGN else np.int64(q[i])
            z64 = (v << 1) ^ (v >> 63)
            if z64 >= FIRST_LARGE:
                place = 7
                while (z64 >> (place + 1)) > 0:
                    place += 1
                tokens[i] = _U8(FIRST_LARGE + 4 * (place - 7) + ((z64 >> (place - 2)) & 3))
                n_large += 1
    if any_exact:
        for i in range(n):
            if exact[i]:
                tokens[i], after[i], new[i] = _U8(EXACT), _I32(0), _U8(0)
                n_exact += 1
    return n_large + n_exact, n_exact


@njit(nogil=True, cache=True)
def _round(
    values: NDArray[np.float32],
    integers: NDArray[np.int32],
    history: NDArray[np.uint8],
    delta: np.float32,
    step: int,
    rcp: np.float32,
    bound: int,
    base: NDArray[np.float32],
    grades: NDArray[np.int32],
    tokens: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    after: NDArray[np.int32],
    new: NDArray[np.uint8],
) -> tuple[int, int]:  # pragma: no cover - compiled
    m = _I32(step)
    limit = _F32(MAX_PRODUCT // step)
    top = _I32(bound)
    half, zero, scale = _F32(0.5), _F32(0.0), _F32(1.0 / 4096.0)
    q = np.empty(_CHUNK, np.int32)
    exact = np.empty(_CHUNK, np.uint8)
    n = values.size
    row_length = n // grades.size
    n_large, n_exact = 0, 0
    begin = 0
    while begin < n:
        row = begin // row_length
        end = min(begin + _CHUNK, (row + 1) * row_length)
        w, x = values[begin:end], integers[begin:end]
        b = base[begin:end]
        if base.size == 0:
            for i in range(w.size):
                at = _F32(_F32(x[i]) * delta)
                steps = np.rint(_F32(_F32(w[i] - at) * rcp))
                near = np.abs(steps) <= limit
                change = _I32(steps if near else zero)
                reached = _I32(x[i] + m * change)
                inside = near & (reached <= top) & (reached >= -top)
                q[i] = change if inside else _I32(0)
                exact[i] = _U8(0) if inside else _U8(1)
        elif grades[row] == 0:
            for i in range(w.size):
                at = _F32(_F32(x[i]) * delta)
                y = np.rint(_F32(_F32(w[i] - b[i]) * rcp))
                steps = np.rint(_F32(y - _F32(_F32(at - b[i]) * rcp)))
                near = np.abs(steps) <= limit
                change = _I32(steps if near else zero)
                reached = _I32(x[i] + m * change)
                inside = near & (reached <= top) & (reached >= -top)
                q[i] = change if inside else _I32(0)
                exact[i] = _U8(0) if inside else _U8(1)
        else:
            plain = _F32(_F32(4096 - grades[row]) * scale)
            eager = _F32(_F32(4096 - grades[row] * 7 // 10) * scale)
            for i in range(w.size):
                at = _F32(_F32(x[i]) * delta)
                r = _F32(_F32(w[i] - b[i]) * rcp)
                o = _F32(_F32(at - b[i]) * rcp)
                ahead = -o if r < zero else o
                size = np.floor(_F32(np.abs(r) + (eager if ahead > half else plain)))
                steps = np.rint(_F32((-size if r < zero else size) - o))
                near = np.abs(steps) <= limit
                change = _I32(steps if near else zero)
                reached = _I32(x[i] + m * change)
                inside = near & (reached <= top) & (reached >= -top)
                q[i] = change if inside else _I32(0)
                exact[i] = _U8(0) if inside else _U8(1)
        large, kept = _emit(
            q,
            exact,
            x,
            history[begin:end],
            step,
            tokens[begin:end],
            contexts[begin:end],
            after[begin:end],
            new[begin:end],
        )
        n_large += large
        n_exact += kept
        begin = end
    return n_large, n_exact


def _given(state: Tensor | None, n: int, dtype: torch.dtype) -> NDArray[Any]:
    """Zeros for what is not there: a kernel for its absence would double the time of compilation."""
    return np.asarray((torch.zeros(n, dtype=dtype) if state is None else state).numpy())


@register("round_to_grid", Backend.CPU)
def round_to_grid(
    values: Tensor, integers: Tensor, history: Tensor | None, grid: Grid, gain: Gain | None
) -> Rounded:
    """See `lattice.round_to_grid`."""
    n = values.numel()
    tokens, new = torch.empty(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
    contexts = torch.empty(n, dtype=torch.uint8)
    after = torch.empty(n, dtype=torch.int32)
    n_large, n_exact = _round(
        values.numpy(),
        integers.numpy(),
        _given(history, n, torch.uint8),
        _F32(grid.delta),
        grid.step,
        _F32(grid.rcp),
        grid.bound,
        _NO_BASE if gain is None else gain.base.numpy(),
        _NO_GRADES if gain is None else gain.grades.numpy(),
        tokens.numpy(),
        contexts.numpy(),
        after.numpy(),
        new.numpy(),
    )
    return Rounded(tokens, None if history is None else contexts, after, new, int(n_large), int(n_exact))


@njit(nogil=True, cache=True)
def _advance(
    tokens: NDArray[np.uint8],
    large: NDArray[np.int64],
    integers: NDArray[np.int32],
    history: NDArray[np.uint8],
    delta: np.float32,
    step: int,
    bound: int,
    after: NDArray[np.int32],
    new: NDArray[np.uint8],
    values: NDArray[np.float32],
) -> bool:  # pragma: no cover - compiled
    m, top = _I32(step), _I32(bound)
    valid = True
    at_large = 0
    q = np.empty(_CHUNK, np.int32)
    for begin in range(0, tokens.size, _CHUNK):
        end = min(begin + _CHUNK, tokens.size)
        part, reached, decoded, fresh = tokens[begin:end], after[begin:end], values[begin:end], new[begin:end]
        old_history, old_integers = history[begin:end], integers[begin:end]
        largest, outside = _I32(0), _I32(0)
        for i in range(part.size):
            z = _I32(part[i])
            largest |= z
            turned = _I32((z >> _I32(1)) ^ _I32(-(z & _I32(1))))
            sign = _I32(-_I32((old_history[i] >> _U8(5)) & _U8(1)))
            q[i] = _I32((turned ^ sign) - sign)
        for i in range(part.size):
            moved = _I32(m * q[i])
            target = _I32(old_integers[i] + moved)
            outside |= _I32(top - target) | _I32(top + target)
            reached[i] = target
            decoded[i] = _F32(_F32(target) * delta)
        for i in range(part.size):
            fresh[i] = _next_history(q[i], old_history[i])
        if largest >= FIRST_LARGE:
            outside = _I32(0)
            for i in range(begin, end):
                if tokens[i] == EXACT:
                    after[i], new[i], values[i] = _I32(0), _U8(0), _F32(0)
                elif tokens[i] >= FIRST_LARGE:
                    if at_large >= large.size:
                        return False
                    z64 = large[at_large]
                    at_large += 1
                    v = (z64 >> 1) ^ -(z64 & 1)
                    old = history[i]
                    if old & _SIGN:
                        v = -v
                    moved64 = step * v
                    if abs(moved64) > MAX_PRODUCT:
                        return False
                    base = np.int64(integers[i])
                    after[i] = _I32(base + moved64)
                    values[i] = _F32(_F32(after[i]) * delta)
                    new[i] = _next_history(_I32(1) if v > 0 else _I32(-1), old)
                if after[i] > top or after[i] < -top:
                    outside |= _I32(-1)
        if outside < _I32(0):
            valid = False
    return valid


@register("advance", Backend.CPU)
def advance(
    tokens: Tensor, large: NDArray[np.int64], integers: Tensor | None, history: Tensor | None, grid: Grid
) -> Advanced:
    """See `lattice.advance`."""
    n = tokens.numel()
    after, new = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8)
    values = torch.empty(n, dtype=torch.float32)
    valid = _advance(
        tokens.numpy(),
        large,
        _given(integers, n, torch.int32),
        _given(history, n, torch.uint8),
        _F32(grid.delta),
        grid.step,
        grid.bound,
        after.numpy(),
        new.numpy(),
        values.numpy(),
    )
    return Advanced(after, new, values, bool(valid))


_best_grade = njit(nogil=True, cache=True)(reference.best_grade)


@njit(nogil=True, cache=True)
def _grades(
    values: NDArray[np.float32],
    base: NDArray[np.float32],
    integers: NDArray[np.int32],
    delta: np.float32,
    rcp: np.float32,
    grades: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    length = values.size // grades.size
    half, zero = _F32(0.5), _F32(0.0)
    keys = np.empty(_CHUNK, np.int32)
    counts = np.zeros(2 * GAIN_BINS + 1, np.int64)
    for row in range(grades.size):
        counts[:] = 0
        for begin in range(row * length, (row + 1) * length, _CHUNK):
            end = min(begin + _CHUNK, (row + 1) * length)
            w, b, x = values[begin:end], base[begin:end], integers[begin:end]
            for i in range(w.size):
                r = _F32(_F32(w[i] - b[i]) * rcp)
                o = _F32(_F32(_F32(_F32(x[i]) * delta) - b[i]) * rcp)
                ahead = -o if r < zero else o
                scaled = _F32(np.abs(r) * _F32(256.0))
                inside = scaled < _F32(GAIN_BINS)
                key = _I32(scaled if inside else zero) + (_I32(GAIN_BINS) if ahead > half else _I32(0))
                keys[i] = key if inside else _I32(2 * GAIN_BINS)
            for i in range(w.size):
                counts[keys[i]] += 1
        grades[row] = _best_grade(counts[: 2 * GAIN_BINS].reshape(2, GAIN_BINS), counts[2 * GAIN_BINS])


@register("gain_grades", Backend.CPU)
def gain_grades(values: Tensor, base: Tensor, integers: Tensor, grid: Grid, n_rows: int) -> Tensor:
    """See `lattice.gain_grades`."""
    grades = torch.zeros(n_rows, dtype=torch.int32)
    _grades(values.numpy(), base.numpy(), integers.numpy(), _F32(grid.delta), _F32(grid.rcp), grades.numpy())
    return grades


register("pack_extra", Backend.CPU)(njit(nogil=True, cache=True)(reference.pack_extra))
register("unpack_extra", Backend.CPU)(njit(nogil=True, cache=True)(reference.unpack_extra))
