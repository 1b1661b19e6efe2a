"""Weights as small as asked for: the finest lattice that reaches a ratio, found by measuring."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from inshrink_core.chain import ChainConfig, ChainState, FrameEncoder
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.codec import DEFAULT_CODEC, Tuning, get_codec
from inshrink_core.execution import default_threads
from inshrink_core.frame import Block

FLOAT32_NBYTES: Final = 4
"""Size of a weight that a ratio of exported weights is relative to, for every dtype."""

# About the coarseness that makes keyframes an eighth of float32.
_FIRST_COARSENESS: Final = 8.0

_MOST_TRIALS: Final = 6

# Share of the bytes allowed from which a result is near enough: the rest would not pay a trial.
_NEAR: Final = 0.97

# How far beyond the coarseness that should suffice the next trial goes: doubling it saves just under a bit.
_MARGIN: Final = 1.015

# Relative error beyond which weights are not coarsened further.
_MOST_ERROR: Final = 0.5


class Coarsened(NamedTuple):
    """Encoded weights: the blocks by tensor, what made them, their bytes, and what they lost."""

    blocks: tuple[tuple[TensorSpec, Block], ...]
    config: ChainConfig
    nbytes: int
    relative_error: float


def coarsen(
    view: Checkpoint, full: Checkpoint, nbytes: float, tried: Callable[[int], None], device: str = "cpu"
) -> Coarsened:
    """Return the weights on the finest lattice whose blocks take no more than some bytes.

    Parameters
    ----------
    view
        What to encode: weights and buffers.
    full
        The same, and the tensors that weights' sensitivities come from.
    nbytes
        What they may take.
    tried
        Called before each trial with its number; may raise to cancel.
    device
        Where to encode, as torch names it.

    Notes
    -----
    Half the precision saves a bit a weight, which gives the next trial; two or three are usual. Each encodes
    all weights once; the encoded bytes of the best result stay in memory.
    Where even `_MOST_ERROR` does not suffice, the coarsest result below it is returned.
    """
    target, best, at = max(nbytes, 1.0), None, _FIRST_COARSENESS

    def order(found: Coarsened) -> tuple[bool, float]:
        """Prefer what fits; of two that fit the more exact, of two that do not the smaller."""
        fits = found.nbytes <= target
        return not fits, found.relative_error if fits else found.nbytes

    n_values = max(sum(spec.numel for spec in view.specs if spec.role in MODEL_ROLES), 1)
    for number in range(_MOST_TRIALS):
        tried(number)
        found = _encode(view, full, at, device)
        if best is not None and found.relative_error > _MOST_ERROR:
            break
        best = found if best is None else min(best, found, key=order)
        excess_bits = 8 * (found.nbytes - target) / n_values
        following = min(max(at * 2.0**excess_bits * _MARGIN, 1e-3), 1e4)
        if _NEAR * target <= found.nbytes <= target or following == at:
            break
        at = following
    return found if best is None else best


def _encode(view: Checkpoint, full: Checkpoint, coarseness: float, device: str) -> Coarsened:
    """Encode all weights once."""
    codec = get_codec(DEFAULT_CODEC)
    config = ChainConfig(
        config=codec(**cast("Tuning", codec.tuning).settings(coarseness)),
        optimizer="drop",
        device=device,
        threads=default_threads(),
    )
    _, results = FrameEncoder(config).encode(full, ChainState(), view.specs)
    blocks, error, norm = [], 0.0, 0.0
    for row in results:  # not its state, which is larger than the block
        blocks.append((row.spec, row.block))
        error += row.squared_error
        norm += row.squared_norm
    return Coarsened(
        blocks=tuple(blocks),
        config=config,
        nbytes=sum(len(block.payload) for _, block in blocks),
        relative_error=math.sqrt(error / norm) if norm > 0 else 0.0,
    )
