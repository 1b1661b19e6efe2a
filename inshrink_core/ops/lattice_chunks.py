"""What the lattice kernels do with one chunk of a tensor, compiled for `cpu_lattice` to call.

A chunk stays in the first-level cache. Every loop is free of branches, so that it compiles to vector
instructions, and stands in a function of its own, because the compiler then knows its arrays; what is
rare is put right after it. Arrays are slices indexed from 0: an index with an offset might be negative for
all the compiler knows. Sums are kept in 32 bits, where numba would take 64, which halves the speed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.compiled import part
from inshrink_core.ops.lattice import CONTEXT_BITS, EXACT, FIRST_LARGE, MAX_PRODUCT, NEGATIVE, OLDEST_CONTEXT

__all__ = ["advance_large", "find_steps", "match_steps", "mend", "move", "scale", "take_steps", "turn"]

_I32 = np.int32
_U8 = np.uint8
_F32 = np.float32
_AGING = np.uint8(OLDEST_CONTEXT)
_CONTEXT = np.uint8(CONTEXT_BITS)
_SIGN = np.uint8(NEGATIVE)


def _next_history(sign: int, old: int) -> int:
    """History after a change of a sign."""
    context = old & CONTEXT_BITS
    if sign == 0:
        return (old + (3 if 0 < context < OLDEST_CONTEXT else 0)) & 255
    negative = int(sign < 0)
    pair = 2 + (negative ^ (old >> 5 & 1))
    return (pair if context else 1) + (negative << 5)


_NEXT_HISTORIES = np.array([[_next_history(sign, old) for old in range(256)] for sign in (0, 1, -1)], _U8)
"""By sign of the change, the negative one last: for changes one by one, whose code has to be compiled."""


@part
def turn(
    z: NDArray[np.uint8],
    history: NDArray[np.uint8],
    forward: bool,
    turned: NDArray[np.uint8],
    new: NDArray[np.uint8],
) -> np.int64:  # pragma: no cover - compiled
    """Turn small z, or turn tokens back; return the largest token. The next history comes with it.

    In bytes and without branches, so that a vector holds 32 or 64 of them.
    """
    largest = _U8(0)
    for i in range(z.size):
        old = history[i]
        this = z[i]
        moved = this != _U8(0)
        odd = _U8(this & _U8(1))
        flip = _U8((old >> _U8(5)) & _U8(1))
        # 2 v and -2 v - 1 trade places: an odd number grows by one, an even one shrinks.
        other = _U8(this + _U8(_U8(odd + odd) - _U8(1))) if moved & (flip > _U8(0)) else this
        turned[i] = other
        token = other if forward else this
        largest = token if token > largest else largest
        # The last bit of a token tells the turned sign, that of z the sign.
        negative = odd if forward else _U8(other & _U8(1))
        context = _U8(old & _CONTEXT)
        aged = _U8(old + (_U8(3) if (context > _U8(0)) & (context < _AGING) else _U8(0)))
        pair = _U8(_U8(2) + _U8(token & _U8(1)))
        fresh = _U8((_U8(1) if context == _U8(0) else pair) + _U8(negative << _U8(5)))
        new[i] = fresh if moved else aged
    return np.int64(largest)


@part
def find_steps(
    w: NDArray[np.float32],
    x: NDArray[np.int32],
    delta: np.float32,
    rcp: np.float32,
    steps: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Find the changes to the nearest points as floats."""
    for i in range(w.size):
        at = _F32(_F32(x[i]) * delta)
        steps[i] = np.rint(_F32(_F32(w[i] - at) * rcp))


@part
def match_steps(
    w: NDArray[np.float32],
    b: NDArray[np.float32],
    x: NDArray[np.int32],
    delta: np.float32,
    rcp: np.float32,
    grade: int,
    steps: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Find the changes of a row that keep its movement, as floats."""
    half, zero, scale = _F32(0.5), _F32(0.0), _F32(1.0 / 4096.0)
    if grade == 0:
        for i in range(w.size):
            at = _F32(_F32(x[i]) * delta)
            y = np.rint(_F32(_F32(w[i] - b[i]) * rcp))
            steps[i] = np.rint(_F32(y - _F32(_F32(at - b[i]) * rcp)))
    else:
        plain = _F32(_F32(4096 - grade) * scale)
        eager = _F32(_F32(4096 - grade * 7 // 10) * scale)
        for i in range(w.size):
            at = _F32(_F32(x[i]) * delta)
            r = _F32(_F32(w[i] - b[i]) * rcp)
            o = _F32(_F32(at - b[i]) * rcp)
            ahead = -o if r < zero else o
            size = np.floor(_F32(np.abs(r) + (eager if ahead > half else plain)))
            steps[i] = np.rint(_F32((-size if r < zero else size) - o))


@part
def take_steps(
    steps: NDArray[np.float32],
    x: NDArray[np.int32],
    m: np.int32,
    top: np.int32,
    limit: np.float32,
    after: NDArray[np.int32],
    z: NDArray[np.uint8],
) -> tuple[np.int32, np.int32]:  # pragma: no cover - compiled
    """Turn float changes into integers; return the bits of all z, and less than 0 if one is out of range.

    Nothing is written where a change is too far to be an integer.
    """
    furthest, outside, far = _I32(0), _I32(0), False
    for i in range(x.size):
        far |= not (np.abs(steps[i]) <= limit)
    if far:
        return _I32(-1), _I32(-1)
    for i in range(x.size):
        change = _I32(steps[i])
        reached = _I32(x[i] + _I32(m * change))
        # As 32-bit numbers all the way: numba would make sums of 64 bits, which halves the speed.
        outside = _I32(outside | _I32(top - reached) | _I32(top + reached))
        this = _I32(_I32(change << _I32(1)) ^ _I32(change >> _I32(31)))
        furthest = _I32(furthest | this)
        after[i] = reached
        z[i] = _U8(this & _I32(255))
    return furthest, outside


@part
def mend(
    steps: NDArray[np.float32],
    x: NDArray[np.int32],
    history: NDArray[np.uint8],
    step: int,
    bound: int,
    tokens: NDArray[np.uint8],
    after: NDArray[np.int32],
    new: NDArray[np.uint8],
) -> tuple[int, int, np.int64]:  # pragma: no cover - compiled
    """Do over a chunk that has large or exact changes; return how many of either, and the largest token."""
    limit = _F32(MAX_PRODUCT // step)
    n_large, n_exact, largest = 0, 0, np.int64(0)
    for i in range(tokens.size):
        near = np.abs(steps[i]) <= limit
        change = np.int64(steps[i] if near else _F32(0.0))
        reached = np.int64(x[i]) + step * change
        if not near or reached > bound or reached < -bound:
            tokens[i], after[i], new[i] = _U8(EXACT), _I32(0), _U8(0)
            n_exact, largest = n_exact + 1, np.int64(EXACT)
            continue
        sign = 0 if change == 0 else 1 if change > 0 else 2
        turned = -change if history[i] & _SIGN else change
        z = (turned << 1) ^ (turned >> 63)
        token = z
        if z >= FIRST_LARGE:
            place = 7
            while (z >> (place + 1)) > 0:
                place += 1
            token = FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2)) & 3)
            n_large += 1
        largest = np.int64(token) if token > largest else largest
        tokens[i], after[i], new[i] = _U8(token), _I32(reached), _NEXT_HISTORIES[sign, history[i]]
    return n_large + n_exact, n_exact, largest


@part
def advance_large(
    tokens: NDArray[np.uint8],
    large: NDArray[np.int64],
    integers: NDArray[np.int32],
    history: NDArray[np.uint8],
    step: int,
    bound: int,
    after: NDArray[np.int32],
    new: NDArray[np.uint8],
) -> int:  # pragma: no cover - compiled
    """Do over a chunk with large or exact tokens; return how many large it took, or -1: not valid."""
    taken = 0
    for i in range(tokens.size):
        if tokens[i] == EXACT:
            after[i], new[i] = _I32(0), _U8(0)
        elif tokens[i] >= FIRST_LARGE:
            if taken >= large.size:
                return -1
            z = large[taken]
            taken += 1
            change = (z >> 1) ^ -(z & 1)
            if history[i] & _SIGN:
                change = -change
            moved = step * change
            if moved > MAX_PRODUCT or moved < -MAX_PRODUCT:
                return -1
            after[i] = _I32(np.int64(integers[i]) + moved)
            # A large token is no change of zero.
            new[i] = _NEXT_HISTORIES[1 if change > 0 else 2, history[i]]
        if np.int64(after[i]) > bound or np.int64(after[i]) < -bound:
            return -1
    return taken


@part
def move(
    z: NDArray[np.uint8], x: NDArray[np.int32], m: np.int32, top: np.int32, after: NDArray[np.int32]
) -> np.int32:  # pragma: no cover - compiled
    """Apply small changes; return less than 0 if one leads out of range."""
    outside = _I32(0)
    for i in range(x.size):
        this = _I32(z[i])
        change = _I32(_I32(this >> _I32(1)) ^ _I32(-_I32(this & _I32(1))))
        target = _I32(x[i] + _I32(m * change))
        outside = _I32(outside | _I32(top - target) | _I32(top + target))
        after[i] = target
    return outside


@part
def scale(
    integers: NDArray[np.int32], delta: np.float32, values: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """Turn integers into values."""
    for i in range(integers.size):
        values[i] = _F32(_F32(integers[i]) * delta)
