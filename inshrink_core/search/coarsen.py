"""Weights at a target size: search the finest lattice that reaches a compression ratio."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from inshrink_core.chain import ChainConfig, ChainState, FramePlan
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.codec import DEFAULT_CODEC, Tuning, get_codec
from inshrink_core.execution.threads import default_threads
from inshrink_core.frame import Block

FLOAT32_NBYTES: Final = 4
"""Bytes of a float32 weight, the reference size of the ratio of exported weights for every dtype."""

# Approximate coarseness at which keyframes take an eighth of float32.
_FIRST_COARSENESS: Final = 8.0

_MAX_TRIALS: Final = 6

# Share of the allowed bytes from which a result is near enough: a better one is not worth another trial.
_NEAR: Final = 0.97

# Factor by which the next trial exceeds the coarseness that should suffice; doubling it saves almost one bit.
_MARGIN: Final = 1.015

# Relative error from which weights are not coarsened further.
_MAX_ERROR: Final = 0.5


class Coarsened(NamedTuple):
    """Encoded weights: blocks by tensor, the codec, the size in bytes, and the error."""

    blocks: tuple[tuple[TensorSpec, Block], ...]
    config: ChainConfig
    nbytes: int
    relative_error: float


def coarsen(
    view: Checkpoint, full: Checkpoint, nbytes: float, tried: Callable[[int], None], device: str = "cpu"
) -> Coarsened:
    """Return the weights on the finest lattice whose blocks fit a number of bytes.

    Parameters
    ----------
    view
        Weights and buffers to encode.
    full
        The same, plus the tensors that the sensitivities of weights come from.
    nbytes
        Maximum size of the blocks.
    tried
        Callback before each trial with its number; may raise to cancel.
    device
        Device to encode on, as PyTorch names it.

    Notes
    -----
    Doubling the step size saves one bit per weight, which gives the next trial; two or three trials are
    usual. Each trial encodes all weights; the encoded bytes of the best result stay in memory. If even
    `_MAX_ERROR` does not suffice, the function returns the coarsest result below it.
    """
    target, best, at = max(nbytes, 1.0), None, _FIRST_COARSENESS

    def order(found: Coarsened) -> tuple[bool, float]:
        """Prefer results that fit: then the most exact one, otherwise the smallest."""
        fits = found.nbytes <= target
        return not fits, found.relative_error if fits else found.nbytes

    n_values = max(sum(spec.numel for spec in view.specs if spec.role in MODEL_ROLES), 1)
    for number in range(_MAX_TRIALS):
        tried(number)
        found = _encode(view, full, at, device)
        if best is not None and found.relative_error > _MAX_ERROR:
            break
        best = found if best is None else min(best, found, key=order)
        excess_bits = 8 * (found.nbytes - target) / n_values
        following = min(max(at * 2.0**excess_bits * _MARGIN, 1e-3), 1e4)
        if _NEAR * target <= found.nbytes <= target or following == at:
            break
        at = following
    return found if best is None else best


def _encode(view: Checkpoint, full: Checkpoint, coarseness: float, device: str) -> Coarsened:
    """Encode all weights."""
    codec = get_codec(DEFAULT_CODEC)
    config = ChainConfig(
        config=codec(**cast("Tuning", codec.tuning).settings(coarseness)),
        optimizer="drop",
        device=device,
        threads=default_threads(),
    )
    results = FramePlan(config, full, ChainState(), view.specs).encode(view.specs)
    blocks, error, norm = [], 0.0, 0.0
    for row in results:  # without the state, which is larger than the block
        blocks.append((row.spec, row.block))
        error += row.squared_error
        norm += row.squared_norm
    return Coarsened(
        blocks=tuple(blocks),
        config=config,
        nbytes=sum(len(block.payload) for _, block in blocks),
        relative_error=math.sqrt(error / norm) if norm > 0 else 0.0,
    )
