"""What a codec made of one tensor, element by element: its level, and whether it was pruned or protected."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import PARTS, PROTECTED, PRUNED, QUANTIZED
from inshrink_core.codecs.exact import BITSTREAM as EXACT_BITSTREAM
from inshrink_core.codecs.exact import LosslessReference
from inshrink_core.codecs.inshrinkerator.block import FIRST_BIN, InshrinkeratorReference, RoundedReference
from inshrink_core.codecs.lattice.block import LatticeReference
from inshrink_core.codecs.published.grid import GridReference
from inshrink_core.ops.quantize import PROTECTED as PROTECTED_SYMBOL
from inshrink_core.ops.quantize import PRUNED as PRUNED_SYMBOL
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.codec import TensorReference

__all__ = ["PARTS", "PROTECTED", "PRUNED", "QUANTIZED", "Levels", "entropy_of_symbols", "levels_of"]

_MOST_LEVELS = 256
"""More distinct decoded values than symbols of a byte are no codebook."""

_CHUNK = 1 << 20
_FARTHEST = 1 << 15
"""Symbols of changes beyond this many steps count as one: they are too rare to move an entropy."""


class Levels(NamedTuple):
    """The levels of one tensor after one frame.

    Parameters
    ----------
    kind
        ``codebook``: levels anywhere. ``lattice`` and ``grid``: evenly spaced. ``rounded``: each value in
        bfloat16. ``exact``: bit for bit. ``other``: the codec has no levels of its own.
    points : Float[ndarray, "c"]
        Every level, ascending, where they are at most 256; else empty.
    spacing
        From one lattice point to the next; None without a lattice or a grid.
    parts : UInt8[ndarray, "n"] or int
        Index into `PARTS` for each element, or one for all of them.
    symbols : Int[ndarray, "n"] or None
        Level number of each element, where the codec has one.
    """

    kind: str
    points: NDArray[np.float64]
    spacing: float | None
    parts: NDArray[np.uint8] | int
    symbols: NDArray[np.integer] | None


_NONE: NDArray[np.float64] = np.empty(0, np.float64)


def levels_of(state: TensorReference, bitstream: str = EXACT_BITSTREAM) -> Levels:
    """Return the levels of a decoded state.

    Parameters
    ----------
    state
        After a frame.
    bitstream
        Of the tensor's block in it: rivals keep the state of the exact coder although they are lossy.

    Notes
    -----
    O(n) for codebooks and lattices; a codec that is not known here is asked for its values, which are
    sorted.
    """
    if isinstance(state, InshrinkeratorReference):
        return _codebook(state)
    if isinstance(state, LatticeReference):
        return _lattice(state)
    if isinstance(state, GridReference):
        levels = state.grid.levels().astype(np.float64)
        width = float(levels[1] - levels[0]) if levels.size > 1 else None
        return Levels("grid", np.unique(levels), width, QUANTIZED, state.symbols.numpy())
    if isinstance(state, LosslessReference) and bitstream == EXACT_BITSTREAM:
        return Levels("exact", _NONE, None, PROTECTED, None)
    if isinstance(state, RoundedReference):
        return Levels("rounded", _NONE, None, PROTECTED, None)
    return _distinct(state.decoded())


def _codebook(state: InshrinkeratorReference) -> Levels:
    symbols = state.symbols.numpy()
    part_of = np.full(256, QUANTIZED, np.uint8)
    part_of[PRUNED_SYMBOL], part_of[PROTECTED_SYMBOL] = PRUNED, PROTECTED
    points = state.codebook.numpy().astype(np.float64)
    used = np.bincount(symbols, minlength=256)[FIRST_BIN : FIRST_BIN + points.size]
    return Levels("codebook", points[used > 0], None, part_of[symbols], symbols)


def _lattice(state: LatticeReference) -> Levels:
    if state.exact is not None:
        return Levels("exact", _NONE, None, PROTECTED, None)
    parts: NDArray[np.uint8] | int = QUANTIZED
    if state.exact_at.numel():
        parts = np.full(state.integers.numel(), QUANTIZED, np.uint8)
        parts[state.exact_at.numpy()] = PROTECTED
    unit = math.ldexp(1.0, state.spacing.exponent)
    integers = state.integers.numpy()
    points = np.unique(integers).astype(np.float64) * unit if integers.size <= _CHUNK else _NONE
    points = points if points.size <= _MOST_LEVELS else _NONE
    return Levels("lattice", points, state.spacing.width, parts, integers)


def _distinct(decoded: Tensor) -> Levels:
    """Take the distinct values as levels, where there are few enough to be a codebook."""
    import torch

    values = magnitudes(decoded.reshape(-1), torch.float64).numpy()
    distinct, symbols = np.unique(values, return_inverse=True)
    if distinct.size > min(_MOST_LEVELS, values.size // 2) or not np.isfinite(distinct).all():
        return Levels("other", _NONE, None, QUANTIZED, None)
    return Levels("codebook", distinct, None, QUANTIZED, symbols)


def entropy_of_symbols(state: TensorReference, reference: TensorReference | None) -> float | None:
    """Return the entropy of what a frame tells of one tensor, in bits an element.

    Parameters
    ----------
    state
        After the frame.
    reference
        Before it; None in a keyframe.

    Returns
    -------
    float or None
        Of lattices: of the change in whole steps. Of level numbers: given the element's level number
        before, or on their own in a keyframe. None where there are no symbols. An entropy coder with finer
        contexts may stay below it.
    """
    now = levels_of(state).symbols
    if now is None or now.size == 0:
        return None
    before = levels_of(reference) if reference is not None and type(reference) is type(state) else None
    known = None if before is None or before.symbols is None else before.symbols
    if known is not None and known.shape != now.shape:
        known = None
    if isinstance(state, LatticeReference):
        return _entropy_of_changes(now, known, state, reference)
    if known is None:
        return _entropy(_counts(now))
    return _entropy(_pair_counts(known, now)) - _entropy(_counts(known))


def _entropy_of_changes(
    now: NDArray[np.integer],
    before: NDArray[np.integer] | None,
    state: LatticeReference,
    reference: TensorReference | None,
) -> float:
    """Count changes in steps; a reference in coarser units is brought to those of the state."""
    shift = 0
    if isinstance(reference, LatticeReference):
        shift = reference.spacing.exponent - state.spacing.exponent
    counts = np.zeros(2 * _FARTHEST + 1, np.int64)
    for start in range(0, now.size, _CHUNK):
        part = now[start : start + _CHUNK].astype(np.int64)
        if before is not None:
            part = part - (before[start : start + _CHUNK].astype(np.int64) << max(shift, 0))
        steps = np.clip(part // state.spacing.step, -_FARTHEST, _FARTHEST) + _FARTHEST
        counts += np.bincount(steps, minlength=counts.size)
    return _entropy(counts)


def _counts(symbols: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.bincount(symbols.reshape(-1), minlength=256)


def _pair_counts(before: NDArray[np.integer], now: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count pairs of symbols chunk by chunk: a pair needs more bits than a symbol."""
    counts = np.zeros(1 << 16, np.int64)
    for start in range(0, now.size, _CHUNK):
        pair = before[start : start + _CHUNK].astype(np.int64) << 8
        counts += np.bincount(pair | now[start : start + _CHUNK].astype(np.int64), minlength=counts.size)
    return counts


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of a histogram, in bits."""
    positive = counts[counts > 0].astype(np.float64)
    total = float(positive.sum())
    return float(np.log2(total) - (positive * np.log2(positive)).sum() / total) if total else 0.0
