"""Encoding one tensor of a run by itself: what a frame of that tensor alone would hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import CodecConfig, FrameContext, TensorInput, TensorReference

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.chain import Archive
    from inshrink_core.codec import Codec, Encoded
    from inshrink_core.formats import Run

__all__ = ["Coded", "encode_alone", "read_if_there", "step_before"]


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
    codec: Codec, config: CodecConfig, checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec
) -> tuple[Coded, Tensor]:
    """Encode a tensor alone and, where there is one, against its predecessor, which is encoded first."""
    item = _item(codec, config, checkpoint, spec)
    alone, _ = _encode_one(codec, config, checkpoint, item, None, None)
    size = len(alone.block.payload)
    if before is None:
        return Coded(alone.reference, None, alone.block.codec, size, size), item.tensor
    first, memory = _encode_one(codec, config, before, _item(codec, config, before, spec), None, None)
    after, _ = _encode_one(codec, config, checkpoint, item, first.reference, memory)
    coded = Coded(after.reference, first.reference, after.block.codec, len(after.block.payload), size)
    return coded, item.tensor


def _encode_one(
    codec: Codec,
    config: CodecConfig,
    checkpoint: Checkpoint,
    item: TensorInput,
    reference: TensorReference | None,
    memory: Any,
) -> tuple[Encoded, Any]:
    """Plan and encode a frame of one tensor; return also what the next one plans with."""
    rate = checkpoint.hyperparameters.get(item.spec.name, {}).get("lr")
    context = FrameContext(
        learning_rates={} if rate is None else {item.spec.name: rate},
        memory=memory,
    )
    seen = codec.observe(item, reference, config)
    plan = codec.plan([item.spec], [seen], config, context)
    return codec.encode(item, plan, reference), codec.remember(plan)


def _item(codec: Codec, config: CodecConfig, checkpoint: Checkpoint, spec: TensorSpec) -> TensorInput:
    """Read a tensor and the companions that the codec asks for."""
    wanted = codec.companions(config)
    gradient = second = None
    if TensorRole.GRADIENT in wanted:
        gradient = checkpoint.companion(spec, TensorRole.GRADIENT, TensorRole.EXP_AVG)
    if TensorRole.EXP_AVG_SQ in wanted:
        second = checkpoint.companion(spec, TensorRole.EXP_AVG_SQ)
    tensor = checkpoint[spec.key]
    return TensorInput(spec=spec, tensor=tensor, gradient=gradient, second_moment=second)


def read_if_there(checkpoint: Checkpoint, key: str) -> Tensor | None:
    """Read a tensor; None where the checkpoint does not have it."""
    if key not in checkpoint:
        return None
    return checkpoint[key]
