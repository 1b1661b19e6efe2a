"""Weights as small as asked for: the finest lattice that reaches a ratio, found by measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from inshrink_core.chain import ChainConfig, ChainState, FrameEncoder
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.codec import DEFAULT_CODEC, Tuning, get_codec
from inshrink_core.execution import default_threads
from inshrink_core.frame import Block
from inshrink_core.search.strategies import Halving, Outcome, explore

FLOAT32_NBYTES: Final = 4
"""What a ratio of exported weights is measured against, whatever dtype they are stored in."""

# About the coarseness that makes keyframes an eighth of float32.
_FIRST_COARSENESS: Final = 8.0

_MOST_TRIALS: Final = 6

# Relative error beyond which weights are not coarsened further, whatever ratio was asked for.
_MOST_ERROR: Final = 0.5


class Coarsened(NamedTuple):
    """Encoded weights: the blocks by tensor, what made them, their bytes, and what they lost."""

    blocks: tuple[tuple[TensorSpec, Block], ...]
    config: ChainConfig
    nbytes: int
    relative_error: float


def coarsen(
    view: Checkpoint, whole: Checkpoint, nbytes: float, tried: Callable[[int], None], device: str = "cpu"
) -> Coarsened:
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
    device
        Where to encode, as torch names it.

    Notes
    -----
    Two or three trials are usual. Each encodes all weights once; the encoded bytes of the best one are held.
    Where even `_MOST_ERROR` does not suffice, the coarsest result below it is returned.
    """
    target = max(nbytes, 1.0)
    best: list[Coarsened] = []
    n_tried = 0

    def measure(points: Sequence[float]) -> list[Outcome[float]]:
        nonlocal n_tried, best
        outcomes = []
        for point in points:
            tried(n_tried)
            n_tried += 1
            found = _encode(view, whole, point, device)
            bearable = found.relative_error <= _MOST_ERROR or not best
            best = [min([*best, found], key=lambda one: _order(one, target))] if bearable else best
            outcomes.append(Outcome(point, bearable, 0.0, found.nbytes / target, found.nbytes))
        return outcomes

    n_values = sum(spec.numel for spec in view.specs if spec.role in MODEL_ROLES)
    explore(Halving(start=_FIRST_COARSENESS, allowed=target, n_values=n_values), measure, budget=_MOST_TRIALS)
    return best[0]


def _order(found: Coarsened, target: float) -> tuple[bool, float]:
    """Prefer what fits; of two that fit the more exact, of two that do not the smaller."""
    fits = found.nbytes <= target
    return not fits, found.relative_error if fits else found.nbytes


def _encode(view: Checkpoint, whole: Checkpoint, coarseness: float, device: str) -> Coarsened:
    """Encode all weights once."""
    codec = get_codec(DEFAULT_CODEC)
    config = ChainConfig(
        config=codec(**cast("Tuning", codec.tuning).settings(coarseness)),
        optimizer="drop",
        device=device,
        threads=default_threads(),
    )
    _, results = FrameEncoder(config).encode(whole, ChainState(), view.specs)
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
