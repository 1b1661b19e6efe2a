"""Changes of floats, bit for bit: tokens of ordered integers, and the contexts they are coded in.

``o`` maps the bits of a float to an integer in the order of floats (`inshrink_core.ops.planes`), d is
``o(x) - o(r)`` modulo 2^w in the signed range, r being the reference. A change is *turned*, times the sign of
the element's last one; ``z = 2 d`` or ``-2 d - 1``, whichever is not negative. A token is z below
`FIRST_LARGE`; else, k being the place of its highest bit, ``4 k`` and the two bits below the highest. The
k - 2 bits below those are *extra bits*.

The *history* of an element is a byte: bits 0-3 the octave of its last change, 1 to 15 for all from there on,
0 where it has not changed yet; bits 4-5 its age, how many frames since then were without change, 3 for all
beyond; bit 6 is set if the change was negative. The *place* of an element is ``16 * (history & 63)`` and the
class of the reference's exponent: how many octaves it is below the top one, 0 to 15.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

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


_WORD_BITS = 32


def _ordered(words: Tensor, n_bits: int) -> Tensor:
    """Flip all bits but the sign of negative ones; its own inverse."""
    return torch.where(words < 0, words ^ ((1 << (n_bits - 1)) - 1), words)


def _bit_length(values: Tensor) -> Tensor:
    """Bits of numbers below 2**53."""
    return torch.frexp(values.double())[1].long()


def _history_before(history: Tensor | None, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64) if history is None else history.long()


def _next_history(tokens: Tensor, old: Tensor) -> Tensor:
    """History after tokens."""
    small = _bit_length((tokens + 1) >> 1)
    octave = torch.where(tokens < FIRST_LARGE, small, tokens >> 2)
    octave = octave.clamp(1, 15)
    negative = (tokens & 1) ^ (old >> 6)
    # The sign of a large change is its lowest bit, which is not in its token: `_turned` has set it there.
    kept = old & (15 | NEGATIVE)
    age = torch.where((old & 15) > 0, ((old >> 4 & 3) + 1).clamp(max=3), 0)
    return torch.where(tokens > 0, octave | negative * NEGATIVE, kept | age << 4)


@op
def find_changes(words: Tensor, earlier: Tensor, history: Tensor | None, rule: ChangeRule) -> Changes:
    """Return what changed from one tensor to the next.

    Parameters
    ----------
    words, earlier : Int16[Tensor, "n"] or Int32[Tensor, "n"]
        Bits of the values and of the reference, contiguous.
    history : UInt8[Tensor, "n"] or None
        Before the change, below `HISTORIES`; None: no element has changed.
    rule
        What the dtype and the frame say.

    Returns
    -------
    Changes
        O(n).
    """
    n_bits = 8 * words.element_size()
    old = _history_before(history, words.numel())
    delta = _ordered(words.long(), n_bits) - _ordered(earlier.long(), n_bits)
    delta = delta << (64 - n_bits) >> (64 - n_bits)
    delta = torch.where(old >= NEGATIVE, -delta, delta)
    # The one change that has no opposite stays as it is.
    delta = delta << (64 - n_bits) >> (64 - n_bits)
    z = torch.where(delta >= 0, 2 * delta, -2 * delta - 1)
    large = z >= FIRST_LARGE
    k = (_bit_length(z) - 1).clamp(min=2)
    tokens = torch.where(large, 4 * k + (z >> (k - 2) & 3), z)
    after = _next_history(torch.where(large, tokens & ~1 | z & 1, tokens), old)
    return Changes(tokens.to(torch.uint8), after.to(torch.uint8), _pack(z[large].numpy(), k[large].numpy()))


def _pack(z: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.uint32]:
    lengths = k - 2
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    bits = (np.repeat(z, lengths) >> within & 1).astype(np.uint8)
    padded = np.zeros(-(-bits.size // _WORD_BITS) * _WORD_BITS, np.uint8)
    padded[: bits.size] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


@op
def apply_changes(
    tokens: Tensor, extra: NDArray[np.uint32], earlier: Tensor, history: Tensor | None, rule: ChangeRule
) -> tuple[Tensor, Tensor, bool]:
    """Return the words and the history after changes, and whether the extra bits were exactly enough.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Below 64 for words of 16 bits, below 128 for those of 32.
    extra, earlier, history, rule
        As `find_changes` returned and got them.
    """
    n_bits = 8 * earlier.element_size()
    old = _history_before(history, tokens.numel())
    z = tokens.long()
    large = z >= FIRST_LARGE
    lengths = ((z >> 2) - 2)[large].numpy()
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    intact = extra.size == -(-total // _WORD_BITS) and not (
        total % _WORD_BITS and int(extra[-1]) >> total % _WORD_BITS
    )
    if not intact:
        return earlier.clone(), torch.zeros_like(tokens), False
    bits = np.unpackbits(extra.astype("<u4").view(np.uint8), bitorder="little")[:total].astype(np.int64)
    within = np.arange(total) - np.repeat(ends - lengths, lengths)
    low = np.bincount(np.repeat(np.arange(lengths.size), lengths), bits << within, lengths.size)
    high = (4 | z[large] & 3) << torch.from_numpy(lengths)
    z[large] = high | torch.from_numpy(low.astype(np.int64))
    delta = torch.where(z % 2 == 1, -((z + 1) >> 1), z >> 1)
    delta = torch.where(old >= NEGATIVE, -delta, delta)
    x = (_ordered(earlier.long(), n_bits) + delta) << (64 - n_bits) >> (64 - n_bits)
    after = _next_history(torch.where(large, tokens.long() & ~1 | z & 1, z), old)
    return _ordered(x, n_bits).to(earlier.dtype), after.to(torch.uint8), True


@op
def find_contexts(earlier: Tensor, history: Tensor | None, mapping: Tensor, rule: ChangeRule) -> Tensor:
    """Return the entry of a mapping for the place of each element.

    Parameters
    ----------
    earlier, history, rule
        As `find_changes` gets them.
    mapping : (`N_PLACES`,)
        UInt8 or int16, as the result is.
    """
    old = _history_before(history, earlier.numel())
    top = (1 << (8 * earlier.element_size() - 1)) - 1
    below = rule.top - ((earlier.long() & top) >> rule.mantissa)
    return mapping[(old & 63) * N_CLASSES + below.clamp(0, N_CLASSES - 1)]
