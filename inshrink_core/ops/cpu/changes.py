"""Bit-exact changes of floats: tokens of ordered integers, and the contexts that code them.

Let ``o`` map the bits of a float to an integer in the order of floats (`inshrink_core.ops.cpu.planes`), r be
the reference and w the number of bits. The difference ``d = o(x) - o(r)`` is taken modulo 2^w in the signed
range and multiplied by the sign of the element's last change. Zigzag gives ``z = 2 d`` for d >= 0 and
``z = -2 d - 1`` otherwise. The token is z below `FIRST_LARGE`. For larger z, with k the position of its
highest bit, the token is ``4 k`` plus the two bits below the highest. The remaining k - 2 bits are *extra
bits*.

The *context state* of an element is a byte. Bits 0-3 hold the octave of its last change: 1 to 15,
where 15 covers all larger ones and 0 means no change yet. Bits 4-5 hold its age, the number of frames without
a change since then, with 3 for all larger ages. Bit 6 is set if the last change was negative. The *place* of
an element is ``16 * (context_state & 63) + c``, where c, the class of the reference's exponent, is its
distance below the top exponent in octaves, 0 to 15.

Each block takes two loops: a loop over all elements, which vectorizes, and a loop over the large changes,
which only blocks with large changes need. Extra bits go through a 64-bit register, without branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Int16s, UInt8s, UInt32s, any_large, given, kernel, part, unsigned

FIRST_LARGE = 16
"""First token with extra bits; each smaller token means one value of z."""

N_CLASSES = 16

N_PLACES = 64 * N_CLASSES

NEGATIVE = 64
"""Bit of the context state that marks a negative last change."""

HISTORIES = 2 * NEGATIVE
"""Number of context states."""


class Changes(NamedTuple):
    """Changes of one tensor.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
    context_state : UInt8[Tensor, "n"]
        Context states after the change.
    extra : UInt32[ndarray, "k"]
        Extra bits in element order, lowest bit of a word first; zeros fill the last word.
    """

    tokens: Tensor
    context_state: Tensor
    extra: NDArray[np.uint32]


_U8, _U32, _U64 = np.uint8, np.uint32, np.uint64

_BLOCK = 1024
_GROUP = 16
_WORD_BITS = 32
"""Number of elements in a block, and in a group that is searched for large changes at once."""

_PADDING = 2 * _GROUP
"""Maximum number of words read past the last extra bits before the kernel detects the overrun."""

_NOTHING = np.zeros(_BLOCK, np.uint8)
"""Context states of a block without earlier changes."""

_LARGE, _SIGN, _OCTAVE = np.uint8(FIRST_LARGE), np.uint8(NEGATIVE), np.uint8(15)
_AGE, _AGE_STEP = np.uint8(48), np.uint8(16)


@part
def advance(tokens: UInt8s, odd: UInt8s, old: UInt8s, new: UInt8s) -> None:  # pragma: no cover - compiled
    """Fill in the context states after tokens, in byte arithmetic and without branches."""
    for i in range(tokens.size):
        token, before = tokens[i], old[i]
        small = _U8(1) + _U8(token > _U8(2)) + _U8(token > _U8(6)) + _U8(token > _U8(14))
        octave = _U8(token >> _U8(2)) if token >= _LARGE else _U8(small)
        octave = octave if octave < _OCTAVE else _OCTAVE
        negative = _U8((odd[i] << _U8(6)) ^ (before & _SIGN))
        grown = (before & _OCTAVE != _U8(0)) & (before & _AGE != _AGE)
        aged = _U8(before + (_AGE_STEP if grown else _U8(0)))
        new[i] = _U8(octave | negative) if token != _U8(0) else aged


@part
def to_tokens(z: NDArray[Any], tokens: UInt8s, low: UInt8s) -> None:  # pragma: no cover - compiled
    """Fill in tokens and numbers of extra bits; without branches, so that the loop vectorizes."""
    for i in range(tokens.size):
        this = _U32(z[i])
        k, rest = _U32(0), this
        for shift in (16, 8, 4, 2, 1):
            by = _U32(shift) if rest >= (_U32(1) << _U32(shift)) else _U32(0)
            k = _U32(k + by)
            rest = _U32(rest >> by)
        n = _U32(k - _U32(2)) if this >= _U32(_LARGE) else _U32(0)
        token = _U32(_U32(_U32(4) * k) + (_U32(this >> n) & _U32(3)))
        tokens[i] = _U8(token) if this >= _U32(_LARGE) else _U8(this)
        low[i] = _U8(n)


@kernel
def _find(
    words: NDArray[Any],
    earlier: NDArray[Any],
    context_state: UInt8s,
    z: NDArray[Any],
    odd: UInt8s,
    low: UInt8s,
    tokens: UInt8s,
    new: UInt8s,
    extra: UInt32s,
) -> np.int64:  # pragma: no cover - compiled
    """Fill in tokens, context states and extra bits; return the number of words of extra bits."""
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    pending, n_pending, at = _U64(0), _U64(0), np.int64(0)
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = context_state[start if context_state.size == words.size else 0 :]
        out = tokens[start : start + _BLOCK]
        for i in range(now.size):
            x, y = now[i], before[i]
            x = kind(x ^ (kind(zero - (x >> top)) >> bit))
            y = kind(y ^ (kind(zero - (y >> top)) >> bit))
            flip = kind(zero - kind(old[i] >> _U8(6)))
            d = kind(kind(kind(x - y) ^ flip) - flip)
            this = kind(kind(d << bit) ^ kind(zero - (d >> top)))
            z[i] = this
            odd[i] = _U8(this & bit)
            out[i] = _U8(this) if this < kind(_LARGE) else _LARGE
        if any_large(out, _LARGE):
            to_tokens(z, out, low)
            for group in range(0, now.size, _GROUP):
                if not any_large(out[group : group + _GROUP], _LARGE):
                    continue
                end = group + _GROUP if group + _GROUP < now.size else now.size
                for i in range(group, end):
                    n = _U64(low[i])
                    pending |= (_U64(z[i]) & ((_U64(1) << n) - _U64(1))) << n_pending
                    n_pending += n
                    extra[at] = _U32(pending & _U64(0xFFFFFFFF))
                    full = n_pending >> _U64(5)
                    at += np.int64(full)
                    pending >>= full << _U64(5)
                    n_pending &= _U64(31)
        advance(out, odd, old, new[start : start + _BLOCK])
    if n_pending > _U64(0):
        extra[at] = _U32(pending)
        at += np.int64(1)
    return at


@kernel
def _apply(
    tokens: UInt8s,
    extra: UInt32s,
    earlier: NDArray[Any],
    context_state: UInt8s,
    z: NDArray[Any],
    odd: UInt8s,
    words: NDArray[Any],
    new: UInt8s,
) -> np.int64:  # pragma: no cover - compiled
    """Apply changes; return the number of extra bits, or -1 if bits are missing or a bit left over is set.

    `extra` ends with `_PADDING` zeros.
    """
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    pending, n_pending, at, taken = _U64(0), _U64(0), np.int64(0), _U64(0)
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = context_state[start if context_state.size == words.size else 0 :]
        given = tokens[start : start + _BLOCK]
        for i in range(now.size):
            z[i] = kind(given[i])
        for group in range(0, now.size, _GROUP):
            if not any_large(given[group : group + _GROUP], _LARGE):
                continue
            if at > extra.size - _PADDING + 1:
                return np.int64(-1)
            end = group + _GROUP if group + _GROUP < now.size else now.size
            for i in range(group, end):
                more = _U64(n_pending < _U64(32))
                pending |= (_U64(extra[at]) << n_pending) & (_U64(0) - more)
                n_pending += more << _U64(5)
                at += np.int64(more)
                token = _U64(given[i])
                n = (token >> _U64(2)) - _U64(2) if token >= _U64(_LARGE) else _U64(0)
                bits = pending & ((_U64(1) << n) - _U64(1))
                pending >>= n
                n_pending -= n
                taken += n
                large = ((_U64(4) | (token & _U64(3))) << n) | bits
                z[i] = kind(large) if token >= _U64(_LARGE) else kind(token)
        for i in range(now.size):
            this, y = z[i], before[i]
            odd[i] = _U8(this & bit)
            d = kind((this >> bit) ^ kind(zero - (this & bit)))
            flip = kind(zero - kind(old[i] >> _U8(6)))
            d = kind(kind(d ^ flip) - flip)
            y = kind(y ^ (kind(zero - (y >> top)) >> bit))
            x = kind(y + d)
            now[i] = kind(x ^ (kind(zero - (x >> top)) >> bit))
        advance(given, odd, old, new[start : start + _BLOCK])
    return np.int64(taken) if pending == _U64(0) else np.int64(-1)


@kernel
def _contexts(
    earlier: NDArray[Any],
    context_state: UInt8s,
    mapping: NDArray[Any],
    mantissa: int,
    top: int,
    places: Int16s,
    out: NDArray[Any],
) -> None:  # pragma: no cover - compiled
    kind = earlier.dtype.type
    magnitude = kind((1 << (8 * earlier.itemsize - 1)) - 1)
    last = np.int16(N_CLASSES - 1)
    for start in range(0, earlier.size, _BLOCK):
        before = earlier[start : start + _BLOCK]
        old = context_state[start if context_state.size == earlier.size else 0 :]
        for i in range(before.size):
            exponent = np.int16((before[i] & magnitude) >> kind(mantissa))
            below = np.int16(np.int16(top) - exponent)
            below = below if below > np.int16(0) else np.int16(0)
            below = below if below < last else last
            places[i] = np.int16(np.int16(old[i] & _U8(63)) * np.int16(N_CLASSES) + below)
        here = out[start : start + _BLOCK]
        for i in range(here.size):
            here[i] = mapping[places[i]]


def find_changes(words: Tensor, earlier: Tensor, context_state: Tensor | None) -> Changes:
    """Return the changes from one tensor to the next.

    Parameters
    ----------
    words, earlier : Int16[Tensor, "n"] or Int32[Tensor, "n"]
        Bits of the values and of the reference, contiguous.
    context_state : UInt8[Tensor, "n"] or None
        Context states before the change, below `HISTORIES`. With None, no element has changed before.

    Returns
    -------
    Changes

    Notes
    -----
    O(n).
    """
    now, old = unsigned(words), given(context_state, _NOTHING)
    tokens, new = np.empty(now.size, np.uint8), np.empty(now.size, np.uint8)
    # The operating system allocates pages at the first write, so the unused rest costs no memory.
    extra = np.empty(now.size * now.itemsize // 4 + 2, np.uint32)
    block = np.empty(_BLOCK, now.dtype), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    n = _find(now, unsigned(earlier), old, *block, tokens, new, extra)
    return Changes(torch.from_numpy(tokens), torch.from_numpy(new), extra[:n])


def apply_changes(
    tokens: Tensor, extra: UInt32s, earlier: Tensor, context_state: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Return the words and context states after changes, and whether all extra bits were used exactly.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Below 64 for 16-bit words, below 128 for 32-bit words.
    extra, earlier, context_state
        As in `find_changes`.
    """
    before, old = unsigned(earlier), given(context_state, _NOTHING)
    words, new = np.empty(before.size, before.dtype.type), np.empty(before.size, np.uint8)
    block = np.empty(_BLOCK, before.dtype), np.empty(_BLOCK, np.uint8)
    padded = np.concatenate((extra, np.zeros(_PADDING, np.uint32)))
    taken = _apply(tokens.numpy(), padded, before, old, *block, words, new)
    if taken < 0 or -(-taken // _WORD_BITS) != extra.size:
        return earlier.clone(), torch.zeros_like(tokens), False
    return torch.from_numpy(words).view(earlier.dtype), torch.from_numpy(new), True


def find_contexts(
    earlier: Tensor, context_state: Tensor | None, mapping: Tensor, mantissa: int, top: int
) -> Tensor:
    """Return the mapping's entry for the place of each element.

    Parameters
    ----------
    earlier, context_state
        As in `find_changes`.
    mapping : (`N_PLACES`,)
        UInt8 or int16; the result has the same dtype.
    mantissa
        Number of mantissa bits: 7, 10 or 23.
    top
        Exponent of class 0, which also takes larger exponents.
    """
    before, old = unsigned(earlier), given(context_state, _NOTHING)
    values = mapping.numpy()
    out = np.empty(before.size, values.dtype.type)
    places = np.empty(_BLOCK, np.int16)
    _contexts(before, old, values, mantissa, top, places, out)
    return torch.from_numpy(out)
