"""Numba kernels of the lattice codec: one pass over a tensor in each direction, chunk by chunk.

`inshrink_core.ops.lattice` documents the functions and has the versions in plain PyTorch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Int32s, Int64s, UInt8s, any_large, given, kernel, part
from inshrink_core.ops.cpu.tables import put_bits
from inshrink_core.ops.lattice import (
    CONTEXT_BITS,
    EXACT,
    FIRST_LARGE,
    MAX_PRODUCT,
    NEGATIVE,
    OLDEST_CONTEXT,
    Lattice,
    Rounded,
    next_context_state,
)

_CHUNK = 2048
"""Number of elements in a chunk: 20 bytes each fit a first-level cache of 48 kB."""

_NEIGHBOURS = 64
"""Number of tokens that are tested together first, because usually none of them is large or exact."""

_NOTHING, _UNKNOWN = np.zeros(_CHUNK, np.int32), np.zeros(_CHUNK, np.uint8)
"""Stand-ins for absent arrays, read again for each chunk; a variant of the kernel would cost compile time."""

_I32, _U8, _F32 = np.int32, np.uint8, np.float32


_FIRST_LEADING = (np.float32(FIRST_LARGE).view(np.int32) >> 21) - FIRST_LARGE
"""Difference between the leading bits of a number and its token."""

_AGING = np.uint8(OLDEST_CONTEXT)
_CONTEXT = np.uint8(CONTEXT_BITS)
_SIGN = np.uint8(NEGATIVE)
_LARGE = np.uint8(FIRST_LARGE)
"""Bit that only large and exact tokens have."""


def _context_states_after(sign: int) -> Tensor:
    old = torch.arange(256, dtype=torch.uint8)
    changes = torch.full((256,), sign)
    return next_context_state(changes, torch.where((old & NEGATIVE) != 0, -changes, changes), old)


_NEXT_CONTEXT_STATES = torch.stack([_context_states_after(sign) for sign in (0, 1, -1)]).numpy()
"""Next context states by sign of the change (0, 1, -1), for changes handled one by one."""


@part
def turn(
    z: UInt8s, context_state: UInt8s, forward: bool, turned: UInt8s, new: UInt8s
) -> np.int64:  # pragma: no cover - compiled
    """Multiply small z, or tokens, by the sign of the last change; return the largest token.

    The function also writes the next context states. It uses byte arithmetic without branches, so that a
    vector holds 32 or 64 elements.
    """
    largest = _U8(0)
    for i in range(z.size):
        old = context_state[i]
        this = z[i]
        moved = this != _U8(0)
        odd = _U8(this & _U8(1))
        flip = _U8((old >> _U8(5)) & _U8(1))
        # 2 v and -2 v - 1 are exchanged: an odd number grows by one, an even number shrinks by one.
        other = _U8(this + _U8(_U8(odd + odd) - _U8(1))) if moved & (flip > _U8(0)) else this
        turned[i] = other
        token = other if forward else this
        largest = token if token > largest else largest
        # The last bit of a token is the sign relative to the last change, that of z the sign itself.
        negative = odd if forward else _U8(other & _U8(1))
        context = _U8(old & _CONTEXT)
        aged = _U8(old + (_U8(3) if (context > _U8(0)) & (context < _AGING) else _U8(0)))
        pair = _U8(_U8(2) + _U8(token & _U8(1)))
        fresh = _U8((_U8(1) if context == _U8(0) else pair) + _U8(negative << _U8(5)))
        new[i] = fresh if moved else aged
    return np.int64(largest)


@part
def find_changes(
    w: Float32s, x: Int32s, unit: np.float32, reciprocal: np.float32, changes: Float32s
) -> None:  # pragma: no cover - compiled
    """Compute the changes to the nearest lattice points, as floats."""
    for i in range(w.size):
        at = _F32(_F32(x[i]) * unit)
        changes[i] = np.rint(_F32(_F32(w[i] - at) * reciprocal))


@part
def take_changes(
    changes: Float32s, x: Int32s, m: np.int32, top: np.int32, limit: np.float32, after: Int32s, z: UInt8s
) -> tuple[np.int32, np.int32]:  # pragma: no cover - compiled
    """Convert float changes to z; return the bitwise or of all z, and a range check (negative: failed).

    If a change is too large for an integer, the function writes nothing.
    """
    furthest, outside, far = _I32(0), _I32(0), False
    for i in range(x.size):
        far |= not (np.abs(changes[i]) <= limit)
    if far:
        return _I32(-1), _I32(-1)
    for i in range(x.size):
        change = _I32(changes[i])
        reached = _I32(x[i] + _I32(m * change))
        # 32-bit arithmetic throughout: numba would use 64-bit sums, which halves the speed.
        outside = _I32(outside | _I32(top - reached) | _I32(top + reached))
        this = _I32(_I32(change << _I32(1)) ^ _I32(change >> _I32(31)))
        furthest = _I32(furthest | this)
        after[i] = reached
        # If z exceeds a byte, only its last bit, the sign, and the fact that it is not zero matter.
        z[i] = _U8(this if this <= _I32(255) else _I32(_I32(254) | _I32(this & _I32(1))))
    return furthest, outside


@part
def enlarge(
    changes: Float32s, context_state: UInt8s, tokens: UInt8s
) -> tuple[np.int64, np.int64]:  # pragma: no cover - compiled
    """Compute all tokens of a chunk with large changes; return the number of large ones, and the largest.

    The position of the highest bit and the two bits below it are the leading bits of a float32 number.
    """
    n_large, largest = _I32(0), _I32(0)
    for i in range(tokens.size):
        change = _I32(changes[i])
        turned = _I32(-change) if _U8(context_state[i] & _SIGN) != _U8(0) else change
        z = _I32(_I32(turned << _I32(1)) ^ _I32(turned >> _I32(31)))
        # z has up to 26 bits and float32 holds 24; the two lowest bits do not affect the leading ones.
        leading = _I32(_F32(_I32(z & _I32(-4))).view(np.int32) >> _I32(21))
        token = _I32(leading - _I32(_FIRST_LEADING)) if z >= _I32(FIRST_LARGE) else z
        n_large = _I32(n_large + (_I32(1) if z >= _I32(FIRST_LARGE) else _I32(0)))
        largest = token if token > largest else largest
        tokens[i] = _U8(token)
    return np.int64(n_large), np.int64(largest)


@part
def redo_exact(
    changes: Float32s,
    x: Int32s,
    context_state: UInt8s,
    step_size: int,
    bound: int,
    tokens: UInt8s,
    after: Int32s,
    new: UInt8s,
) -> tuple[int, int, np.int64]:  # pragma: no cover - compiled
    """Redo a chunk that has exact changes; return the number of large or exact tokens, and the largest."""
    limit = _F32(MAX_PRODUCT // step_size)
    n_large, n_exact, largest = 0, 0, np.int64(0)
    for i in range(tokens.size):
        near = np.abs(changes[i]) <= limit
        change = np.int64(changes[i] if near else _F32(0.0))
        reached = np.int64(x[i]) + step_size * change
        if not near or reached > bound or reached < -bound:
            tokens[i], after[i], new[i] = _U8(EXACT), _I32(0), _U8(0)
            n_exact, largest = n_exact + 1, np.int64(EXACT)
            continue
        sign = 0 if change == 0 else 1 if change > 0 else 2
        turned = -change if context_state[i] & _SIGN else change
        z = (turned << 1) ^ (turned >> 63)
        token = z
        if z >= FIRST_LARGE:
            place = 7
            while (z >> (place + 1)) > 0:
                place += 1
            token = FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2)) & 3)
            n_large += 1
        largest = np.int64(token) if token > largest else largest
        tokens[i], after[i], new[i] = _U8(token), _I32(reached), _NEXT_CONTEXT_STATES[sign, context_state[i]]
    return n_large + n_exact, n_exact, largest


@part
def advance_large(
    tokens: UInt8s,
    large: Int64s,
    integers: Int32s,
    context_state: UInt8s,
    step_size: int,
    bound: int,
    after: Int32s,
    new: UInt8s,
) -> int:  # pragma: no cover - compiled
    """Redo a chunk with large or exact tokens; return the number of large values used, or -1 if invalid."""
    taken, outside, top = 0, _I32(0), _I32(bound)
    for begin in range(0, tokens.size, _NEIGHBOURS):
        if not any_large(tokens[begin : begin + _NEIGHBOURS], _LARGE):
            continue
        for i in range(begin, min(begin + _NEIGHBOURS, tokens.size)):
            if tokens[i] == EXACT:
                after[i], new[i] = _I32(0), _U8(0)
            elif tokens[i] >= FIRST_LARGE:
                if taken >= large.size:
                    return -1
                z = large[taken]
                taken += 1
                change = (z >> 1) ^ -(z & 1)
                if context_state[i] & _SIGN:
                    change = -change
                moved = step_size * change
                if moved > MAX_PRODUCT or moved < -MAX_PRODUCT:
                    return -1
                after[i] = _I32(np.int64(integers[i]) + moved)
                # A large token always means a nonzero change.
                new[i] = _NEXT_CONTEXT_STATES[1 if change > 0 else 2, context_state[i]]
    for i in range(tokens.size):
        outside = _I32(outside | _I32(top - after[i]) | _I32(top + after[i]))
    return -1 if outside < _I32(0) else taken


@part
def move(
    z: UInt8s, x: Int32s, m: np.int32, top: np.int32, after: Int32s
) -> np.int32:  # pragma: no cover - compiled
    """Apply small changes; return a negative number if an integer leaves its range."""
    outside = _I32(0)
    for i in range(x.size):
        this = _I32(z[i])
        change = _I32(_I32(this >> _I32(1)) ^ _I32(-_I32(this & _I32(1))))
        target = _I32(x[i] + _I32(m * change))
        outside = _I32(outside | _I32(top - target) | _I32(top + target))
        after[i] = target
    return outside


@kernel
def _round(
    values: Float32s,
    integers: Int32s,
    context_state: UInt8s,
    unit: np.float32,
    step_size: int,
    reciprocal: np.float32,
    bound: int,
    changes: Float32s,
    matched: int,
    z: UInt8s,
    tokens: UInt8s,
    after: Int32s,
    new: UInt8s,
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Round a tensor; return the number of large and of exact tokens, and the largest token.

    `matched` is 1 if `changes` holds the changes of all values, and 0 if it holds one chunk, as `z` does.
    Each chunk reads the same elements of a stand-in array.
    """
    m, top, limit = _I32(step_size), _I32(bound), _F32(MAX_PRODUCT // step_size)
    known, tracked = int(integers.size == values.size), int(context_state.size == values.size)
    n_large, n_exact, largest = 0, 0, 0
    for begin in range(0, values.size, _CHUNK):
        end = begin + _CHUNK if begin + _CHUNK < values.size else values.size
        x = integers[begin * known : begin * known + end - begin]
        fresh, part = after[begin:end], tokens[begin:end]
        old = context_state[begin * tracked : begin * tracked + end - begin]
        found = changes[begin * matched : begin * matched + end - begin]
        if matched == 0:
            find_changes(values[begin:end], x, unit, reciprocal, found)
        furthest, outside = take_changes(found, x, m, top, limit, fresh, z)
        most = turn(z[: end - begin], old, True, part, new[begin:end])
        if outside < _I32(0):
            large, exact, most = redo_exact(found, x, old, step_size, bound, part, fresh, new[begin:end])
            n_large, n_exact = n_large + large, n_exact + exact
        elif furthest >= _I32(FIRST_LARGE - 1):  # one less: the sign of the last change may add one
            large, most = enlarge(found, old, part)
            n_large += large
        largest = most if most > largest else largest
    return n_large, n_exact, largest


def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    context_state: Tensor | None,
    lattice: Lattice,
    changes: Tensor | None = None,
) -> Rounded:
    """See `lattice.round_to_lattice`."""
    n = values.numel()
    tokens, new, after = np.empty(n, np.uint8), np.empty(n, np.uint8), np.empty(n, np.int32)
    before = (given(integers, _NOTHING), given(context_state, _UNKNOWN))
    numbers = (_F32(lattice.unit), lattice.step_size, _F32(lattice.reciprocal), lattice.bound)
    chosen = given(changes, np.empty(_CHUNK, np.float32)), int(changes is not None)
    scratch = np.empty(_CHUNK, np.uint8)
    counts = _round(values.numpy(), *before, *numbers, *chosen, scratch, tokens, after, new)
    coded, moved, changed = map(torch.from_numpy, (tokens, after, new))
    return Rounded(coded, moved, changed, *counts)


@kernel
def _advance(
    tokens: UInt8s,
    large: Int64s,
    integers: Int32s,
    context_state: UInt8s,
    step_size: int,
    bound: int,
    z: UInt8s,
    after: Int32s,
    new: UInt8s,
) -> bool:  # pragma: no cover - compiled
    """Apply tokens; each chunk reads the same elements of a stand-in array."""
    m, top = _I32(step_size), _I32(bound)
    known, tracked = int(integers.size == tokens.size), int(context_state.size == tokens.size)
    valid = True
    n_taken = 0
    for begin in range(0, tokens.size, _CHUNK):
        end = begin + _CHUNK if begin + _CHUNK < tokens.size else tokens.size
        part, reached = tokens[begin:end], after[begin:end]
        old = context_state[begin * tracked : begin * tracked + end - begin]
        x = integers[begin * known : begin * known + end - begin]
        most = turn(part, old, False, z, new[begin:end])
        outside = move(z, x, m, top, reached)
        if most >= FIRST_LARGE:
            taken = advance_large(part, large[n_taken:], x, old, step_size, bound, reached, new[begin:end])
            if taken < 0:
                return False
            n_taken += taken
        elif outside < _I32(0):
            valid = False
    return valid


def advance(
    tokens: Tensor, large: Int64s, integers: Tensor | None, context_state: Tensor | None, lattice: Lattice
) -> tuple[Tensor, Tensor] | None:
    """See `lattice.advance`."""
    n = tokens.numel()
    after, new = np.empty(n, np.int32), np.empty(n, np.uint8)
    numbers = (given(integers, _NOTHING), given(context_state, _UNKNOWN), lattice.step_size, lattice.bound)
    valid = _advance(tokens.numpy(), large, *numbers, np.empty(_CHUNK, np.uint8), after, new)
    return (torch.from_numpy(after), torch.from_numpy(new)) if valid else None


@kernel
def _count_large(tokens: UInt8s) -> tuple[int, int]:  # pragma: no cover - compiled
    """Return the number of tokens with extra bits, and the total number of these bits."""
    n_large, quarters = 0, 0
    for begin in range(0, tokens.size, _NEIGHBOURS):
        part = tokens[begin : begin + _NEIGHBOURS]
        if any_large(part, _LARGE):
            for i in range(part.size):
                if FIRST_LARGE <= part[i] < EXACT:
                    n_large += 1
                    quarters += (part[i] - FIRST_LARGE) >> 2
    return n_large, quarters + 5 * n_large


@kernel
def _take_large(
    tokens: UInt8s,
    after: Int32s,
    before: Int32s,
    known: int,
    context_state: UInt8s,
    tracked: int,
    step_size: int,
    z: Int64s,
) -> None:  # pragma: no cover - compiled
    """Fill in z, one entry more than needed; `known` and `tracked` are 1, or 0 without an earlier state."""
    # The quotient is an integer below 2**26, exact in float64; integer division takes five times as long.
    at, share = 0, 1.0 / step_size
    for begin in range(0, tokens.size, _NEIGHBOURS):
        if not any_large(tokens[begin : begin + _NEIGHBOURS], _LARGE):
            continue
        for i in range(begin, min(begin + _NEIGHBOURS, tokens.size)):
            change = np.int64(np.rint((after[i] - before[i * known]) * share))
            change = -change if context_state[i * tracked] & _SIGN else change
            # The next element overwrites an entry that does not count: an unpredictable branch takes longer.
            z[at] = (change << 1) ^ (change >> 63)
            at += _U8(FIRST_LARGE) <= tokens[i] < _U8(EXACT)


def large_changes(
    tokens: Tensor, before: Tensor | None, after: Tensor, context_state: Tensor | None, step_size: int
) -> Int64s:
    """See `lattice.large_changes`."""
    n_large, _ = _count_large(tokens.numpy())
    z, earlier = np.empty(n_large + 1, np.int64), (given(before, _NOTHING), int(before is not None))
    state = given(context_state, _UNKNOWN), int(context_state is not None)
    _take_large(tokens.numpy(), after.numpy(), *earlier, *state, step_size, z)
    return z[:n_large]


@kernel
def _write_extra(z: Int64s, bits: UInt8s) -> np.int64:  # pragma: no cover - compiled
    """Write the bits below the highest three of each number to zeroed bytes; return the number of bits."""
    at = np.int64(0)
    for i in range(z.size):
        length = np.int64(5)
        while z[i] >> (length + 3):
            length += 1
        at = put_bits(bits, at, z[i] & ((1 << length) - 1), length)
    return at


def pack_extra(z: Int64s) -> bytes:
    """Return the extra bits of large z, lowest bit first, padded with zeros to a full byte."""
    # z has at most 27 bits, 25 of which are extra bits.
    bits = np.zeros(4 * z.size + 1, np.uint8)
    n_bits = _write_extra(z, bits)
    return bits[: (n_bits + 7) // 8].tobytes()


@kernel
def _read_extra(tokens: UInt8s, bits: UInt8s, z: Int64s) -> None:  # pragma: no cover - compiled
    """Fill in z; `bits` has four bytes of padding at its end."""
    at = taken = np.int64(0)
    for begin in range(0, tokens.size, _NEIGHBOURS):
        if not any_large(tokens[begin : begin + _NEIGHBOURS], _LARGE):
            continue
        for i in range(begin, min(begin + _NEIGHBOURS, tokens.size)):
            if not FIRST_LARGE <= tokens[i] < EXACT:
                continue
            token = np.int64(tokens[i]) - FIRST_LARGE
            length, word = (token >> 2) + np.int64(5), np.int64(0)
            for k in range(5):
                word |= np.int64(bits[(at >> 3) + k]) << (8 * k)
            z[taken] = ((4 | token & 3) << length) | ((word >> (at & 7)) & ((1 << length) - 1))
            at, taken = at + length, taken + 1


def unpack_extra(tokens: Tensor, extra: bytes | memoryview) -> Int64s | None:
    """Return the large z of tokens from their extra bits; None if bits are missing or left over.

    If the tokens are on a device, the function copies the large tokens to host memory.
    """
    if not tokens.is_cpu:
        tokens = tokens[tokens >= FIRST_LARGE].cpu()
    n_large, n_bits = _count_large(tokens.numpy())
    stored = np.frombuffer(extra, np.uint8)
    if (n_bits + 7) // 8 != stored.size or (n_bits % 8 and int(stored[-1]) >> n_bits % 8):
        return None
    z = np.empty(n_large, np.int64)
    _read_extra(tokens.numpy(), np.concatenate((stored, np.zeros(4, np.uint8))), z)
    return z
