"""Encoding one step in memory, against what its frame would be encoded against, and what comes back.

The decoded tensors are the states that encoding returns: by the closed-loop law of codecs they are, bit for
bit, what decoding the frame from disk will give.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, Standing, stored_view
from inshrink_core.chain.encode import encode_tensors
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorReference, get_codec
from inshrink_core.metrics import ratio
from inshrink_core.search.sizes import frame_overhead

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import Block

__all__ = ["EncodedStep", "encode_chain", "encode_step", "following"]


@dataclass(frozen=True, kw_only=True)
class EncodedStep:
    """One step as its frame would hold it.

    Parameters
    ----------
    checkpoint
        The original.
    references
        States after it: what it decodes to, and what the next delta is encoded against.
    memory
        What the codec wants to remember.
    index
        About what the frame's index would be.
    nbytes
        Bytes of each block, by key.
    squared_errors
        Squared error of each weight and buffer, by key.
    squared_norm
        Squared norm of what was encoded.
    overhead_nbytes
        Header, index, trailer and padding.
    seconds
        Time it took.
    """

    checkpoint: Checkpoint = field(repr=False)
    references: Mapping[str, TensorReference] = field(repr=False)
    memory: Any = field(repr=False)
    index: FrameIndex = field(repr=False)
    nbytes: Mapping[str, int]
    squared_errors: Mapping[str, float]
    squared_norm: float
    overhead_nbytes: int
    seconds: float

    @property
    def raw_weights(self) -> int:
        """Raw bytes of weights and buffers."""
        return self.checkpoint.raw_bytes(MODEL_ROLES)

    @property
    def weights_nbytes(self) -> int:
        """Bytes that hold weights and buffers, overhead included."""
        model = [spec.key for spec in self.checkpoint.specs if spec.role in MODEL_ROLES]
        return sum(self.nbytes[key] for key in model) + self.overhead_nbytes

    @property
    def ratio_weights(self) -> float:
        """Raw bytes of the weights over the bytes that hold them; 0 for a model without any."""
        return ratio(self.raw_weights, self.weights_nbytes) or 0.0

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared norm; 0 where nothing has a norm."""
        return (
            math.sqrt(math.fsum(self.squared_errors.values()) / self.squared_norm)
            if self.squared_norm
            else 0.0
        )

    def restored(self) -> Checkpoint:
        """Return the step as it would be restored: weights, buffers and what the codec stores beside them."""
        kept = {spec.key for spec in self.checkpoint.specs if spec.key in self.references}
        return replace(
            self.checkpoint,
            specs=tuple(spec for spec in self.checkpoint.specs if spec.key in kept),
            aliases={name: key for name, key in self.checkpoint.aliases.items() if key in kept},
            source=_States(self.references),
        )


@dataclass(frozen=True)
class _States:
    """A `TensorSource` over states in memory."""

    references: Mapping[str, TensorReference]

    def read(self, spec: TensorSpec) -> Tensor:
        return self.references[spec.key].decoded().clone()

    def skeleton(self, layout: FileLayout) -> bytes:
        return b""


def _roles_of(chain: ChainConfig) -> frozenset[TensorRole]:
    """Return the roles that a trial encodes: the model's, and whatever else the codec takes."""
    return MODEL_ROLES | get_codec(chain.codec).takes(chain.config)


def _rates_of(checkpoint: Checkpoint) -> dict[str, float]:
    """Return learning rates by parameter name, where the checkpoint's optimizer says them."""
    return {name: group["lr"] for name, group in checkpoint.hyperparameters.items() if "lr" in group}


def encode_step(
    chain: ChainConfig,
    checkpoint: Checkpoint,
    standing: Standing,
    index: FrameIndex | None = None,
    keys: frozenset[str] | None = None,
) -> EncodedStep:
    """Encode weights and buffers of a step; nothing is written, and the standing is as it was.

    Parameters
    ----------
    chain
        How the frame would be made.
    checkpoint
        The step.
    standing
        What it is encoded against.
    index
        Index of the frame before, which that of a delta inherits from.
    keys
        Encode these tensors only, for an estimate; by default all of that the codec takes.

    Notes
    -----
    Costs what the weights' share of writing the frame costs. Holds the states before and after.
    """
    begun = time.perf_counter()
    roles = _roles_of(chain)
    chosen = tuple(
        spec for spec in checkpoint.specs if spec.role in roles and (keys is None or spec.key in keys)
    )
    stored = replace(checkpoint, specs=chosen, files=(), aliases={})
    old = dict(standing.references)
    memory, results = encode_tensors(chain, stored, checkpoint, old, standing.context, standing.restored)
    blocks, references, errors, squared_norm = {}, {}, {}, 0.0
    for result in results:
        blocks[result.spec.key] = result.block
        references[result.spec.key] = result.reference
        errors[result.spec.key] = result.squared_error
        squared_norm += result.squared_norm
    meta = chain.record() | {"content": _any_digest(blocks)} | ({} if memory is None else {"memory": memory})
    whole = stored_view(checkpoint, chain.optimizer)
    overhead, index = frame_overhead(whole, blocks, chain, meta, index)
    return EncodedStep(
        checkpoint=checkpoint if keys is None else replace(checkpoint, specs=chosen, aliases={}),
        references=references,
        memory=memory,
        index=index,
        nbytes={key: len(block.payload) for key, block in blocks.items()},
        squared_errors=errors,
        squared_norm=squared_norm,
        overhead_nbytes=overhead,
        seconds=time.perf_counter() - begun,
    )


def _any_digest(blocks: Mapping[str, Block]) -> bytes:
    """Return 16 bytes in the place of the content's digest: they neither compress nor repeat."""
    lengths = "".join(f"{key} {len(block.payload)} " for key, block in blocks.items())
    return hashlib.sha256(lengths.encode()).digest()[:16]


def encode_chain(
    chain: ChainConfig, checkpoints: Iterable[Checkpoint], keys: frozenset[str] | None = None
) -> Iterator[EncodedStep]:
    """Yield the steps of a chain, each encoded in memory against the one before.

    Parameters
    ----------
    chain
        How its frames are made.
    checkpoints
        The steps, in order.
    keys
        Encode these tensors only.
    """
    before: EncodedStep | None = None
    for number, checkpoint in enumerate(checkpoints):
        standing, index = following(before, checkpoint, keyframe=number % chain.keyframe_every == 0)
        before = encode_step(chain, checkpoint, standing, index, keys)
        yield before


def following(
    before: EncodedStep | None, checkpoint: Checkpoint, *, keyframe: bool
) -> tuple[Standing, FrameIndex | None]:
    """Return what a step is encoded against after another, and the index it inherits from."""
    memory = None if before is None else before.memory
    context = FrameContext(learning_rates=_rates_of(checkpoint), memory=memory)
    if before is None or keyframe:
        return Standing(context=context), None
    return Standing(references=before.references, context=context), before.index
