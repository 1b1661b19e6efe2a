"""Changes of floats in numba, one pass; `inshrink_core.ops.changes` is the norm.

A block is taken in two loops: one for all, which vectorizes, and one for the large changes of those blocks
that have any. Extra bits go through a register of 64 bits, without branches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.changes import FIRST_LARGE, N_CLASSES, NEGATIVE, ChangeRule, Changes
from inshrink_core.ops.cpu.compiled import Int16s, UInt8s, UInt32s, any_large, kernel, part, unsigned

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
_AGE, _ONE_AGE = np.uint8(48), np.uint8(16)


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
        aged = _U8(before + (_ONE_AGE if grown else _U8(0)))
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
    zero, one = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    held, n_held, at = _U64(0), _U64(0), np.int64(0)
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = history[start * known :]
        out = tokens[start : start + _BLOCK]
        for i in range(now.size):
            x, y = now[i], before[i]
            x = kind(x ^ (kind(zero - (x >> top)) >> one))
            y = kind(y ^ (kind(zero - (y >> top)) >> one))
            flip = kind(zero - kind(old[i] >> _U8(6)))
            d = kind(kind(kind(x - y) ^ flip) - flip)
            this = kind(kind(d << one) ^ kind(zero - (d >> top)))
            z[i] = this
            odd[i] = _U8(this & one)
            out[i] = _U8(this) if this < kind(_LARGE) else _LARGE
        if any_large(out, _LARGE):
            to_tokens(z, out, low)
            for group in range(0, now.size, _GROUP):
                if not any_large(out[group : group + _GROUP], _LARGE):
                    continue
                end = group + _GROUP if group + _GROUP < now.size else now.size
                for i in range(group, end):
                    n = _U64(low[i])
                    held |= (_U64(z[i]) & ((_U64(1) << n) - _U64(1))) << n_held
                    n_held += n
                    extra[at] = _U32(held & _U64(0xFFFFFFFF))
                    full = n_held >> _U64(5)
                    at += np.int64(full)
                    held >>= full << _U64(5)
                    n_held &= _U64(31)
        renew(out, odd, old, new[start : start + _BLOCK])
    if n_held > _U64(0):
        extra[at] = _U32(held)
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
    zero, one = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    held, n_held, at, taken = _U64(0), _U64(0), np.int64(0), _U64(0)
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
                more = _U64(n_held < _U64(32))
                held |= (_U64(extra[at]) << n_held) & (_U64(0) - more)
                n_held += more << _U64(5)
                at += np.int64(more)
                token = _U64(given[i])
                n = (token >> _U64(2)) - _U64(2) if token >= _U64(_LARGE) else _U64(0)
                bits = held & ((_U64(1) << n) - _U64(1))
                held >>= n
                n_held -= n
                taken += n
                large = ((_U64(4) | (token & _U64(3))) << n) | bits
                z[i] = kind(large) if token >= _U64(_LARGE) else kind(token)
        for i in range(now.size):
            this, y = z[i], before[i]
            odd[i] = _U8(this & one)
            d = kind((this >> one) ^ kind(zero - (this & one)))
            flip = kind(zero - kind(old[i] >> _U8(6)))
            d = kind(kind(d ^ flip) - flip)
            y = kind(y ^ (kind(zero - (y >> top)) >> one))
            x = kind(y + d)
            now[i] = kind(x ^ (kind(zero - (x >> top)) >> one))
        renew(given, odd, old, new[start : start + _BLOCK])
    return np.int64(taken) if held == _U64(0) else np.int64(-1)


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


def _history(history: Tensor | None) -> tuple[UInt8s, int]:
    """Histories and 1; or those of a block that stands for all, and 0."""
    return (_NOTHING, 0) if history is None else (history.numpy(), 1)


def find_changes(words: Tensor, earlier: Tensor, history: Tensor | None, rule: ChangeRule) -> Changes:
    """See `inshrink_core.ops.changes.find_changes`."""
    now, (old, known) = unsigned(words), _history(history)
    tokens, new = np.empty(now.size, np.uint8), np.empty(now.size, np.uint8)
    # Pages that are not written take no memory.
    extra = np.empty(now.size * now.itemsize // 4 + 2, np.uint32)
    block = np.empty(_BLOCK, now.dtype), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    n = _find(now, unsigned(earlier), old, known, *block, tokens, new, extra)
    return Changes(torch.from_numpy(tokens), torch.from_numpy(new), extra[:n])


def apply_changes(
    tokens: Tensor, extra: UInt32s, earlier: Tensor, history: Tensor | None, rule: ChangeRule
) -> tuple[Tensor, Tensor, bool]:
    """See `inshrink_core.ops.changes.apply_changes`."""
    before, (old, known) = unsigned(earlier), _history(history)
    words, new = np.empty(before.size, before.dtype.type), np.empty(before.size, np.uint8)
    block = np.empty(_BLOCK, before.dtype), np.empty(_BLOCK, np.uint8)
    padded = np.concatenate((extra, np.zeros(_PADDING, np.uint32)))
    taken = _apply(tokens.numpy(), padded, before, old, known, *block, words, new)
    if taken < 0 or -(-taken // _WORD_BITS) != extra.size:
        return earlier.clone(), torch.zeros_like(tokens), False
    return torch.from_numpy(words).view(earlier.dtype), torch.from_numpy(new), True


def find_contexts(earlier: Tensor, history: Tensor | None, mapping: Tensor, rule: ChangeRule) -> Tensor:
    """See `inshrink_core.ops.changes.find_contexts`."""
    before, (old, known) = unsigned(earlier), _history(history)
    values = mapping.numpy()
    out = np.empty(before.size, values.dtype.type)
    places = np.empty(_BLOCK, np.int16)
    _contexts(before, old, known, values, rule.mantissa, rule.top, places, out)
    return torch.from_numpy(out)
