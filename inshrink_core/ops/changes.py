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
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError
