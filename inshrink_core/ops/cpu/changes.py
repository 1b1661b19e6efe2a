"""Changes of floats, bit for bit: tokens of ordered integers, and the contexts they are coded in.

``o`` maps the bits of a float to an integer in the order of floats (`inshrink_core.ops.cpu.planes`), d is
``o(x) - o(r)`` modulo 2^w in the signed range, r being the reference. A change is *turned*, times the sign of
the element's last one; ``z = 2 d`` or ``-2 d - 1``, whichever is not negative. A token is z below
`FIRST_LARGE`; else, k being the place of its highest bit, ``4 k`` and the two bits below the highest. The
k - 2 bits below those are *extra bits*.

The *history* of an element is a byte: bits 0-3 the octave of its last change, 1 to 15 for all from there on,
0 where it has not changed yet; bits 4-5 its age, how many frames since then were without change, 3 for all
beyond; bit 6 is set if the change was negative. The *place* of an element is ``16 * (history & 63)`` and the
class of the reference's exponent: how many octaves it is below the top one, 0 to 15.

A block is taken in two loops: one for all elements, which vectorizes, and one for the large changes of blocks
that have any. Extra bits go through a register of 64 bits, without branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Int16s, UInt8s, UInt32s, any_large, given, kernel, part, unsigned

FIRST_LARGE = 16
"""Tokens from here on have extra bits; below, each is one change."""

N_CLASSES = 16

N_PLACES = 64 * N_CLASSES

NEGATIVE = 64
"""Bit of a history: the last change was negative."""

HISTORIES = 2 * NEGATIVE
"""Alphabet of histories."""


class ChangeRule(NamedTuple):
    """How the words of a tensor are looked at.

    Parameters
    ----------
    mantissa
        Bits of the mantissa: 7, 10 or 23.
    top
        Exponent of class 0; larger ones are in it, too.
    """

    mantissa: int
    top: int


class Changes(NamedTuple):
    """The change of one tensor.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
    history : UInt8[Tensor, "n"]
        After the change.
    extra : UInt32[ndarray, "k"]
        Extra bits in the order of the elements, the lowest of a word first; zeros fill the last one.
    """

    tokens: Tensor
    history: Tensor
    extra: NDArray[np.uint32]


_U8, _U32, _U64 = np.uint8, np.uint32, np.uint64

_BLOCK = 1024
_GROUP = 16
_WORD_BITS = 32
"""Elements of a block, and of what is looked at together for large changes."""

_PADDING = 2 * _GROUP
"""Words that may be read past the last extra bits before that is noticed."""

_NOTHING = np.zeros(_BLOCK, np.uint8)
"""The history of a block where there is none."""

_LARGE, _SIGN, _OCTAVE = np.uint8(FIRST_LARGE), np.uint8(NEGATIVE), np.uint8(15)
_AGE, _AGE_STEP = np.uint8(48), np.uint8(16)


@part
def renew(tokens: UInt8s, odd: UInt8s, old: UInt8s, new: UInt8s) -> None:  # pragma: no cover - compiled
    """Fill in the histories after tokens; in bytes and without branches."""
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
    """Fill in tokens and numbers of extra bits; without branches, so that vectors hold what is one number."""
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
    history: UInt8s,
    known: int,
    z: NDArray[Any],
    odd: UInt8s,
    low: UInt8s,
    tokens: UInt8s,
    new: UInt8s,
    extra: UInt32s,
) -> np.int64:  # pragma: no cover - compiled
    """Find changes; return how many words the extra bits take."""
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    pending, n_pending, at = _U64(0), _U64(0), np.int64(0)
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = history[start * known :]
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
        renew(out, odd, old, new[start : start + _BLOCK])
    if n_pending > _U64(0):
        extra[at] = _U32(pending)
        at += np.int64(1)
    return at


@kernel
def _apply(
    tokens: UInt8s,
    extra: UInt32s,
    earlier: NDArray[Any],
    history: UInt8s,
    known: int,
    z: NDArray[Any],
    odd: UInt8s,
    words: NDArray[Any],
    new: UInt8s,
) -> np.int64:  # pragma: no cover - compiled
    """Apply changes; return how many extra bits they took, or -1 where there are too few or more than zeros.

    `extra` has `_PADDING` zeros at its end.
    """
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    pending, n_pending, at, taken = _U64(0), _U64(0), np.int64(0), _U64(0)
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = history[start * known :]
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
        renew(given, odd, old, new[start : start + _BLOCK])
    return np.int64(taken) if pending == _U64(0) else np.int64(-1)


@kernel
def _contexts(
    earlier: NDArray[Any],
    history: UInt8s,
    known: int,
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
        before, old = earlier[start : start + _BLOCK], history[start * known :]
        for i in range(before.size):
            exponent = np.int16((before[i] & magnitude) >> kind(mantissa))
            below = np.int16(np.int16(top) - exponent)
            below = below if below > np.int16(0) else np.int16(0)
            below = below if below < last else last
            places[i] = np.int16(np.int16(old[i] & _U8(63)) * np.int16(N_CLASSES) + below)
        here = out[start : start + _BLOCK]
        for i in range(here.size):
            here[i] = mapping[places[i]]


def find_changes(words: Tensor, earlier: Tensor, history: Tensor | None) -> Changes:
    """Return what changed from one tensor to the next.

    Parameters
    ----------
    words, earlier : Int16[Tensor, "n"] or Int32[Tensor, "n"]
        Bits of the values and of the reference, contiguous.
    history : UInt8[Tensor, "n"] or None
        Before the change, below `HISTORIES`; None: no element has changed.

    Returns
    -------
    Changes
        O(n).
    """
    now, (old, known) = unsigned(words), given(history, _NOTHING)
    tokens, new = np.empty(now.size, np.uint8), np.empty(now.size, np.uint8)
    # Pages that are not written take no memory.
    extra = np.empty(now.size * now.itemsize // 4 + 2, np.uint32)
    block = np.empty(_BLOCK, now.dtype), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    n = _find(now, unsigned(earlier), old, known, *block, tokens, new, extra)
    return Changes(torch.from_numpy(tokens), torch.from_numpy(new), extra[:n])


def apply_changes(
    tokens: Tensor, extra: UInt32s, earlier: Tensor, history: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Return the words and the history after changes, and whether the extra bits were exactly enough.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Below 64 for words of 16 bits, below 128 for those of 32.
    extra, earlier, history
        As `find_changes` returned and got them.
    """
    before, (old, known) = unsigned(earlier), given(history, _NOTHING)
    words, new = np.empty(before.size, before.dtype.type), np.empty(before.size, np.uint8)
    block = np.empty(_BLOCK, before.dtype), np.empty(_BLOCK, np.uint8)
    padded = np.concatenate((extra, np.zeros(_PADDING, np.uint32)))
    taken = _apply(tokens.numpy(), padded, before, old, known, *block, words, new)
    if taken < 0 or -(-taken // _WORD_BITS) != extra.size:
        return earlier.clone(), torch.zeros_like(tokens), False
    return torch.from_numpy(words).view(earlier.dtype), torch.from_numpy(new), True


def find_contexts(earlier: Tensor, history: Tensor | None, mapping: Tensor, rule: ChangeRule) -> Tensor:
    """Return the entry of a mapping for the place of each element.

    Parameters
    ----------
    earlier, history
        As `find_changes` gets them.
    rule
        Mantissa and top exponent.
    mapping : (`N_PLACES`,)
        UInt8 or int16, as the result is.
    """
    before, (old, known) = unsigned(earlier), given(history, _NOTHING)
    values = mapping.numpy()
    out = np.empty(before.size, values.dtype.type)
    places = np.empty(_BLOCK, np.int16)
    _contexts(before, old, known, values, rule.mantissa, rule.top, places, out)
    return torch.from_numpy(out)
