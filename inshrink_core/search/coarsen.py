"""Weights as small as asked for: the finest lattice that reaches a ratio, found by measuring."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from inshrink_core.chain import ChainConfig, FrameEncoder, Standing
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.codec import get_codec
from inshrink_core.execution import default_threads
from inshrink_core.frame import Block

__all__ = ["FLOAT32_NBYTES", "Coarsened", "coarsen"]

FLOAT32_NBYTES: Final = 4
"""What a ratio of exported weights is measured against, whatever dtype they are stored in."""

_CODEC: Final = "lattice"

_FIRST_COARSENESS: Final = 8.0
"""About the coarseness that makes keyframes an eighth of float32."""

_NEAR: Final = 0.97
"""Share of the bytes allowed from which a result is near enough: the rest would not pay a trial."""

_MARGIN: Final = 1.015
"""How far beyond the step that should suffice the next trial goes: a doubled step saves a little less
than a bit."""

_MOST_TRIALS: Final = 6

_MOST_ERROR: Final = 0.5
"""Relative error beyond which weights are not coarsened further, whatever ratio was asked for."""


class Coarsened(NamedTuple):
    """Encoded weights: the blocks by tensor, what made them, their bytes, and what they lost."""

    blocks: tuple[tuple[TensorSpec, Block], ...]
    config: ChainConfig
    nbytes: int
    relative_error: float


def coarsen(view: Checkpoint, whole: Checkpoint, nbytes: float, tried: Callable[[int], None]) -> Coarsened:
    """Return the weights on the finest lattice whose blocks take no more than some bytes.

    Parameters
    ----------
    view
        What to encode: weights and buffers.
    whole
        The same and whatever tells how sensitive a weight is.
    nbytes
        What they may take.
    tried
        Called before each trial with its number; may raise to cancel.

    Notes
    -----
    Halving the precision saves a bit a weight, which gives the next step to try; two or three trials
    are usual. Each encodes all weights once and holds the encoded bytes. Where even `_MOST_ERROR` does
    not suffice, the coarsest result below it is returned.
    """
    n_values = sum(spec.numel for spec in view.specs if spec.role in MODEL_ROLES)
    target = max(nbytes, 1.0)
    tried(0)
    coarseness = _FIRST_COARSENESS
    best = found = _encode(view, whole, coarseness)
    for trial in range(1, _MOST_TRIALS):
        if _NEAR * target <= found.nbytes <= target:
            break
        excess_bits = 8 * (found.nbytes - target) / max(n_values, 1)
        coarseness = min(max(coarseness * 2.0**excess_bits * _MARGIN, 1e-3), 1e4)
        tried(trial)
        found = _encode(view, whole, coarseness)
        if found.relative_error > _MOST_ERROR:
            break
        if _is_better(found, best, target):
            best = found
    return best


def _is_better(found: Coarsened, best: Coarsened, target: float) -> bool:
    """Prefer what fits; of two that fit the more exact, of two that do not the smaller."""
    fits, best_fits = found.nbytes <= target, best.nbytes <= target
    if fits != best_fits:
        return fits
    return found.relative_error < best.relative_error if fits else found.nbytes < best.nbytes


def _encode(view: Checkpoint, whole: Checkpoint, coarseness: float) -> Coarsened:
    """Encode all weights once."""
    settings: dict[str, float] = {"coarseness": coarseness}
    config = ChainConfig(
        codec=_CODEC,
        config=get_codec(_CODEC)(**settings),
        optimizer="drop",
        threads=default_threads(),
    )
    _, results = FrameEncoder(config).encode(whole, Standing(), view.specs)
    blocks, error, norm = [], 0.0, 0.0
    for row in results:  # its state, which is larger than the block, is not kept
        blocks.append((row.spec, row.block))
        error += row.squared_error
        norm += row.squared_norm
    return Coarsened(
        blocks=tuple(blocks),
        config=config,
        nbytes=sum(len(block.payload) for _, block in blocks),
        relative_error=math.sqrt(error / norm) if norm > 0 else 0.0,
    )
