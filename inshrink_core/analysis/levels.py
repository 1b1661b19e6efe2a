"""Levels of a decoded state, and the entropy of a tensor's symbols in a frame."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.codec import Levels, TensorReference
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.exact import LosslessReference
from inshrink_core.values import magnitudes

_MAX_LEVELS = 256
"""Maximum number of distinct decoded values of a codebook: the symbols of a byte."""

_CHUNK = 1 << 20
_FARTHEST = 1 << 15
"""Number of steps beyond which all changes share a symbol: they are too rare to affect the entropy."""


def levels_of(state: TensorReference, bitstream: str = EXACT) -> Levels:
    """Return the levels of a decoded state; `Levels.points` is empty beyond 256 levels.

    Parameters
    ----------
    state
        State after a frame.
    bitstream
        Bitstream of the tensor's block in it; some lossy codecs use the state of the exact codec.

    Notes
    -----
    O(n) for states that store their levels; for other states the values are sorted.
    """
    levels = state.levels()
    if levels.kind == "other" or (isinstance(state, LosslessReference) and bitstream != EXACT):
        return _distinct(state.decoded())
    few = levels.points is not None and levels.points.size <= _MAX_LEVELS
    return levels if few else levels._replace(points=None)


def _distinct(decoded: Tensor) -> Levels:
    """Return the distinct values as levels, if they are few enough for a codebook."""
    values = magnitudes(decoded.reshape(-1), torch.float64).numpy()
    distinct, symbols = np.unique(values, return_inverse=True)
    if distinct.size > min(_MAX_LEVELS, values.size // 2) or not np.isfinite(distinct).all():
        return Levels("other")
    return Levels("codebook", distinct, symbols=symbols)


def entropy_of_symbols(state: TensorReference, reference: TensorReference | None) -> float | None:
    """Return the entropy of a tensor's symbols in a frame, in bits per element.

    With p the frequencies of the symbols, the entropy is ``-Σ p log2 p``.

    Parameters
    ----------
    state
        State after the frame.
    reference
        State before it; None in a keyframe.

    Returns
    -------
    float or None
        For lattices, the entropy of the change in steps. For level numbers, the conditional entropy given the
        element's previous level number, or the plain entropy in a keyframe. None without symbols. An entropy
        coder with finer contexts may need fewer bits.
    """
    now = levels_of(state)
    if now.symbols is None or now.symbols.size == 0:
        return None
    before = levels_of(reference) if reference is not None and type(reference) is type(state) else None
    if before is None or before.symbols is None or before.symbols.shape != now.symbols.shape:
        before = None
    if now.unit is not None:
        return _entropy(_changes(now.symbols, now.unit, before))
    if before is None or before.symbols is None:
        return _entropy(_counts(now.symbols))
    return _entropy(_pairs(before.symbols, now.symbols)) - _entropy(_counts(before.symbols))


def _changes(now: NDArray[np.integer], unit: tuple[int, int], before: Levels | None) -> NDArray[np.int64]:
    """Return changes in steps; a reference in coarser units is converted to those of the state."""
    exponent, step_size = unit
    counts = np.zeros(2 * _FARTHEST + 1, np.int64)
    for start in range(0, now.size, _CHUNK):
        part = now[start : start + _CHUNK].astype(np.int64)
        if before is not None and before.symbols is not None and before.unit is not None:
            shift = max(before.unit[0] - exponent, 0)
            part = part - (before.symbols[start : start + _CHUNK].astype(np.int64) << shift)
        changes = np.clip(part // step_size, -_FARTHEST, _FARTHEST) + _FARTHEST
        counts += np.bincount(changes, minlength=counts.size)
    return counts


def _counts(symbols: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.bincount(symbols.reshape(-1), minlength=256)


def _pairs(before: NDArray[np.integer], now: NDArray[np.integer]) -> NDArray[np.int64]:
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
