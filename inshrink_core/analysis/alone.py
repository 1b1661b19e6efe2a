"""Encoding one tensor of a run by itself: what a frame of that tensor alone would hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.chain import ChainConfig, ChainState, FrameEncoder
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.formats.source import peek

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.chain import Archive
    from inshrink_core.formats import Run


class Coded(NamedTuple):
    """A tensor's state after a frame and before it, the bitstream of its block, and its sizes."""

    state: TensorReference
    reference: TensorReference | None
    bitstream: str
    nbytes: int
    keyframe_nbytes: int | None


def step_before(series: Run | Archive, step: int, spec: TensorSpec) -> Checkpoint | None:
    """Return the checkpoint before a step, if it has the same tensor."""
    earlier = max((other for other in series.steps if other < step), default=None)
    if earlier is None:
        return None
    checkpoint = series[earlier]
    if spec.key not in checkpoint:
        return None
    old = checkpoint.spec(spec.key)
    return checkpoint if (old.dtype, old.shape) == (spec.dtype, spec.shape) else None


def encode_alone(
    chain: ChainConfig, checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec
) -> Coded:
    """Encode a tensor alone and, where there is one, against its predecessor, which is encoded first."""
    encoder = FrameEncoder(chain)
    _, (alone,) = encoder.encode(checkpoint, ChainState(), [spec])
    size = len(alone.block.payload)
    if before is None:
        return Coded(alone.reference, None, alone.block.codec, size, size)
    memory, (first,) = encoder.encode(before, ChainState(), [spec])
    state = ChainState(references={spec.key: first.reference}, memory=memory)
    _, (after,) = encoder.encode(checkpoint, state, [spec])
    return Coded(after.reference, first.reference, after.block.codec, len(after.block.payload), size)


def peek_if_there(checkpoint: Checkpoint, key: str) -> Tensor | None:
    """Return a tensor for a look at it (`formats.source.peek`); None where the checkpoint has none."""
    return peek(checkpoint.source, checkpoint.spec(key)) if key in checkpoint else None
