"""Changes of floats in numba, one pass; `inshrink_core.ops.reference.changes` is the norm.

A block is taken in two loops: one for all, which vectorizes, and one for the large changes of those blocks
that have any. Extra bits go through a register of 64 bits, without branches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops.changes import FIRST_LARGE, N_CLASSES, NEGATIVE, ChangeRule, Changes
from inshrink_core.ops.cpu.compiled import kernel, part

_U8, _U32, _U64 = np.uint8, np.uint32, np.uint64
_UNSIGNED: dict[torch.dtype, Any] = {torch.int16: np.uint16, torch.int32: np.uint32}

_BLOCK = 1024
_GROUP = 16
"""Elements of a block, and of what is looked at together for large changes."""

_NOTHING = np.zeros(_BLOCK, np.uint8)
"""The history of a block where there is none."""

_LARGE, _SIGN, _OCTAVE = np.uint8(FIRST_LARGE), np.uint8(NEGATIVE), np.uint8(15)
_AGE, _ONE_AGE = np.uint8(48), np.uint8(16)


@part
def renew(
    tokens: NDArray[np.uint8],
    odd: NDArray[np.uint8],
    old: NDArray[np.uint8],
    first: int,
    new: NDArray[np.uint8],
) -> None:  # pragma: no cover - compiled
    """Fill in the histories after tokens; in bytes and without branches."""
    base = _U8(first)
    for i in range(tokens.size):
        token, before = tokens[i], old[i]
        small = _U8(1) + _U8(token > _U8(2)) + _U8(token > _U8(6)) + _U8(token > _U8(14))
        octave = _U8(token >> _U8(2)) if token >= _LARGE else _U8(small)
        octave = _U8(octave - base) if octave > base else _U8(1)
        octave = octave if octave < _OCTAVE else _OCTAVE
        negative = _U8((odd[i] << _U8(6)) ^ (before & _SIGN))
        grown = (before & _OCTAVE != _U8(0)) & (before & _AGE != _AGE)
        aged = _U8(before + (_ONE_AGE if grown else _U8(0)))
        new[i] = _U8(octave | negative) if token != _U8(0) else aged


@kernel
def _find(
    words: NDArray[Any],
    earlier: NDArray[Any],
    history: NDArray[np.uint8],
    known: int,
    first: int,
    z: NDArray[Any],
    odd: NDArray[np.uint8],
    tokens: NDArray[np.uint8],
    new: NDArray[np.uint8],
    extra: NDArray[np.uint32],
) -> np.int64:  # pragma: no cover - compiled
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
        for group in range(0, now.size, _GROUP):
            end = group + _GROUP if group + _GROUP < now.size else now.size
            joined = _U8(0)
            for i in range(group, end):
                joined = _U8(joined | out[i])
            if joined < _LARGE:
                continue
            for i in range(group, end):
                this = _U32(z[i])
                large = this >= _U32(_LARGE)
                k = _U32(0)
                rest = this
                for shift in (16, 8, 4, 2, 1):
                    more = _U32(rest >= (_U32(1) << _U32(shift)))
                    k += more * _U32(shift)
                    rest >>= more * _U32(shift)
                low = _U32(k - _U32(2)) if large else _U32(0)
                out[i] = _U8(_U32(4) * k + ((this >> low) & _U32(3))) if large else _U8(this)
                held |= (_U64(this) & ((_U64(1) << _U64(low)) - _U64(1))) << n_held
                n_held += _U64(low)
                extra[at] = _U32(held & _U64(0xFFFFFFFF))
                full = n_held >> _U64(5)
                at += np.int64(full)
                held >>= full << _U64(5)
                n_held &= _U64(31)
        renew(out, odd, old, first, new[start : start + _BLOCK])
    if n_held > _U64(0):
        extra[at] = _U32(held)
        at += np.int64(1)
    return at


@kernel
def _apply(
    tokens: NDArray[np.uint8],
    extra: NDArray[np.uint32],
    earlier: NDArray[Any],
    history: NDArray[np.uint8],
    known: int,
    first: int,
    z: NDArray[Any],
    odd: NDArray[np.uint8],
    words: NDArray[Any],
    new: NDArray[np.uint8],
) -> bool:  # pragma: no cover - compiled
    kind = words.dtype.type
    zero, one = kind(0), kind(1)
    top = kind(8 * words.itemsize - 1)
    held, n_held, at = _U64(0), _U64(0), 0
    for start in range(0, words.size, _BLOCK):
        now, before = words[start : start + _BLOCK], earlier[start : start + _BLOCK]
        old = history[start * known :]
        given = tokens[start : start + _BLOCK]
        for i in range(now.size):
            z[i] = kind(given[i])
        for group in range(0, now.size, _GROUP):
            end = group + _GROUP if group + _GROUP < now.size else now.size
            joined = _U8(0)
            for i in range(group, end):
                joined = _U8(joined | given[i])
            if joined < _LARGE:
                continue
            for i in range(group, end):
                token = _U32(given[i])
                large = token >= _U32(_LARGE)
                low = _U32((token >> _U32(2)) - _U32(2)) if large else _U32(0)
                if n_held < _U64(low):
                    if at >= extra.size:
                        return False
                    held |= _U64(extra[at]) << n_held
                    n_held += _U64(32)
                    at += 1
                bits = _U32(held & ((_U64(1) << _U64(low)) - _U64(1)))
                held >>= _U64(low)
                n_held -= _U64(low)
                z[i] = kind(((_U32(4) | (token & _U32(3))) << low) | bits) if large else kind(token)
        for i in range(now.size):
            this, y = z[i], before[i]
            odd[i] = _U8(this & one)
            d = kind((this >> one) ^ kind(zero - (this & one)))
            flip = kind(zero - kind(old[i] >> _U8(6)))
            d = kind(kind(d ^ flip) - flip)
            y = kind(y ^ (kind(zero - (y >> top)) >> one))
            x = kind(y + d)
            now[i] = kind(x ^ (kind(zero - (x >> top)) >> one))
        renew(given, odd, old, first, new[start : start + _BLOCK])
    return at == extra.size and held == _U64(0)


@kernel
def _contexts(
    earlier: NDArray[Any],
    history: NDArray[np.uint8],
    known: int,
    mapping: NDArray[Any],
    mantissa: int,
    top: int,
    places: NDArray[np.int16],
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


def _history(history: Tensor | None) -> tuple[NDArray[np.uint8], int]:
    """Histories and 1; or those of a block that stands for all, and 0."""
    return (_NOTHING, 0) if history is None else (history.numpy(), 1)


def _bits(words: Tensor) -> NDArray[Any]:
    """Unsigned words, so that right shifts bring in zeros and differences wrap."""
    return words.numpy().view(_UNSIGNED[words.dtype])


def find_changes(words: Tensor, earlier: Tensor, history: Tensor | None, rule: ChangeRule) -> Changes:
    """See `inshrink_core.ops.changes.find_changes`."""
    now, (old, known) = _bits(words), _history(history)
    tokens, new = new_array(now.size, np.uint8), new_array(now.size, np.uint8)
    # Pages that are not written take no memory.
    extra = new_array(now.size * now.itemsize // 4 + 2, np.uint32)
    block = np.empty(_BLOCK, now.dtype), np.empty(_BLOCK, np.uint8)
    n = _find(now, _bits(earlier), old, known, rule.first_octave, *block, tokens, new, extra)
    return Changes(torch.from_numpy(tokens), torch.from_numpy(new), extra[:n])


def apply_changes(
    tokens: Tensor, extra: NDArray[np.uint32], earlier: Tensor, history: Tensor | None, rule: ChangeRule
) -> tuple[Tensor, Tensor, bool]:
    """See `inshrink_core.ops.changes.apply_changes`."""
    before, (old, known) = _bits(earlier), _history(history)
    words, new = new_array(before.size, before.dtype.type), new_array(before.size, np.uint8)
    block = np.empty(_BLOCK, before.dtype), np.empty(_BLOCK, np.uint8)
    intact = _apply(tokens.numpy(), extra, before, old, known, rule.first_octave, *block, words, new)
    if not intact:
        return earlier.clone(), torch.zeros_like(tokens), False
    return torch.from_numpy(words).view(earlier.dtype), torch.from_numpy(new), True


def find_contexts(earlier: Tensor, history: Tensor | None, mapping: Tensor, rule: ChangeRule) -> Tensor:
    """See `inshrink_core.ops.changes.find_contexts`."""
    before, (old, known) = _bits(earlier), _history(history)
    values = mapping.numpy()
    out = new_array(before.size, values.dtype.type)
    places = np.empty(_BLOCK, np.int16)
    _contexts(before, old, known, values, rule.mantissa, rule.top, places, out)
    return torch.from_numpy(out)
