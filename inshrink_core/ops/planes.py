"""Words of a tensor as byte planes: the bytes of one significance together, after a delta or rotation."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from inshrink_core.ops.registry import op


class Transform(IntEnum):
    """What is done to a word of w bits before it is split into bytes; each has an inverse.

    `ZIGZAG` maps small signed integers to small unsigned ones. `ROTATE` moves a float's sign to the
    end, so that the exponent begins a byte in float32. The deltas subtract the reference modulo 2^w
    and apply zigzag; `ORDERED_DELTA` does so on order-preserving integers of floats.
    """

    NONE = 0
    ZIGZAG = 1
    ROTATE = 2
    DELTA = 3
    ORDERED_DELTA = 4


@op
def split_planes(words: Tensor, reference: Tensor | None, transform: Transform) -> Tensor:
    """Return the byte planes of transformed words, least significant first.

    Parameters
    ----------
    words
        (n,) of uint8, int16, int32 or int64: the bits of the values.
    reference
        Same shape and dtype; the deltas need it, the others ignore it.
    transform
        What to do before.

    Returns
    -------
    Tensor
        uint8, (bytes per word, n).
    """
    raise NotImplementedError


@op
def merge_planes(planes: Tensor, reference: Tensor | None, transform: Transform, out: Tensor) -> None:
    """Undo `split_planes` into `out`.

    Parameters
    ----------
    planes
        UInt8, (bytes per word, n).
    reference, transform
        As given to `split_planes`.
    out
        (n,), contiguous, of the words' dtype.
    """
    raise NotImplementedError
