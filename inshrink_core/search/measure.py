"""Encoding one step in memory, against what its frame would be encoded against, and what comes back.

The decoded tensors are the states that encoding returns: by the closed-loop law of codecs they are, bit for
bit, what decoding the frame from disk will give.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.archive.document import compress_document, pack_value
from inshrink_core.archive.index import INDEX_DICTIONARY, BlockColumns, FrameIndex, SmallBlocks, pack_index
from inshrink_core.archive.layout import FRAME_HEADER_NBYTES, LARGE_BLOCK_NBYTES, TRAILER_NBYTES, align
from inshrink_core.chain import ChainConfig, FrameEncoder, Standing, stored_view
from inshrink_core.chain.encoder import FramePlan, TensorResult
from inshrink_core.chain.needs import pack_attributes
from inshrink_core.chain.parts import LAYOUT_KEY
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.metrics import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import Block

__all__ = ["EncodedStep", "encode_chain", "encode_step", "following", "frame_overhead"]

_PART_NBYTES: Final = 64
"""About what a skeleton takes that hardly differs from the last one's. Its own bytes are not the weights',
the number of digits of its length in the index is."""


_EXACT: Final = "exact/1"

_SECOND_MOMENTS: Final = frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ})

_LOSSY_HEAD_NBYTES: Final = 16

_SMALL_NBYTES: Final = 256
"""Up to this size a tensor is mostly stored as it is, behind a byte that says so."""


@dataclass(frozen=True, kw_only=True)
class EncodedStep:
    """One step as its frame would hold it.

    Parameters
    ----------
    checkpoint
        The original.
    plan
        What its frame is made by; more of it can be encoded.
    results
        What was encoded, by key.
    seconds
        Time it took.
    """

    checkpoint: Checkpoint = field(repr=False)
    plan: FramePlan = field(repr=False)
    results: Mapping[str, TensorResult] = field(repr=False)
    seconds: float
    _frame: Callable[[], tuple[int, FrameIndex]] = field(repr=False)

    @cached_property
    def _framed(self) -> tuple[int, FrameIndex]:
        return self._frame()

    @property
    def index(self) -> FrameIndex:
        """About what the frame's index would be."""
        return self._framed[1]

    @property
    def overhead_nbytes(self) -> int:
        """Header, index, trailer and padding."""
        return self._framed[0]

    @cached_property
    def references(self) -> Mapping[str, TensorReference]:
        """States after it: what it decodes to, and what the next delta is encoded against."""
        return {key: result.reference for key, result in self.results.items()}

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Bytes of each block, by key."""
        return {key: len(result.block.payload) for key, result in self.results.items()}

    @cached_property
    def squared_errors(self) -> Mapping[str, float]:
        """Squared error of each weight and buffer, by key."""
        return {key: result.squared_error for key, result in self.results.items()}

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
        norm = math.fsum(result.squared_norm for result in self.results.values())
        return math.sqrt(math.fsum(self.squared_errors.values()) / norm) if norm else 0.0

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
        return self.references[spec.key].decoded_anew()

    def skeleton(self, layout: FileLayout) -> bytes:
        return b""


def _roles_of(chain: ChainConfig) -> frozenset[TensorRole]:
    """Return the roles that a trial encodes: the model's, and whatever else the codec takes."""
    return MODEL_ROLES | chain.config.takes()


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
    plan = FrameEncoder(chain).plan(checkpoint, standing, chosen)
    results = {result.spec.key: result for result in plan.encode(chosen)}

    def frame() -> tuple[int, FrameIndex]:
        blocks = {key: result.block for key, result in results.items()}
        remembered = {} if plan.memory is None else {"memory": plan.memory}
        meta = chain.record() | {"content": _any_digest(blocks)} | remembered
        return frame_overhead(stored_view(checkpoint, chain.optimizer), blocks, chain, meta, index)

    return EncodedStep(
        checkpoint=checkpoint if keys is None else replace(checkpoint, specs=chosen, aliases={}),
        plan=plan,
        results=results,
        seconds=time.perf_counter() - begun,
        _frame=frame,
    )


def _any_digest(blocks: Mapping[str, Block]) -> bytes:
    """Return 16 bytes in the place of the content's digest: they neither compress nor repeat."""
    lengths = "".join(f"{key} {len(block.payload)} " for key, block in blocks.items())
    return hashlib.sha256(lengths.encode()).digest()[:16]


def encode_chain(
    chain: ChainConfig,
    checkpoints: Iterable[Checkpoint],
    keys: frozenset[str] | None = None,
    foreseen: Any = None,
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
    foreseen
        What the first frame is planned with (`inshrink_core.chain.FrameEncoder.look_ahead`).
    """
    before: EncodedStep | None = None
    for number, checkpoint in enumerate(checkpoints):
        standing, index = following(before, keyframe=number % chain.keyframe_every == 0, foreseen=foreseen)
        before = encode_step(chain, checkpoint, standing, index, keys)
        yield before


def following(
    before: EncodedStep | None, *, keyframe: bool, foreseen: Any = None
) -> tuple[Standing, FrameIndex | None]:
    """Return what a step is encoded against after another, and the index it inherits from.

    A first step has nothing before it but what was foreseen.
    """
    if before is None:
        return Standing(memory=foreseen), None
    if keyframe:
        return Standing(memory=before.plan.memory), None
    return Standing(references=before.references, memory=before.plan.memory), before.index


def frame_overhead(
    checkpoint: Checkpoint,
    blocks: Mapping[str, Block],
    chain: ChainConfig,
    meta: Mapping[str, Any],
    parent: FrameIndex | None,
) -> tuple[int, FrameIndex]:
    """Return the bytes of a frame that are neither tensors nor parts, and its index for the next frame.

    Parameters
    ----------
    checkpoint
        What the frame holds, as stored.
    blocks
        Blocks by key; tensors without one (optimizer state that was not encoded) count as entries only.
    chain
        How the frame is made: which codec takes a tensor without a block.
    meta
        What the frame says of how it was made.
    parent
        Index of the frame before; None for a keyframe, which inherits nothing.

    Notes
    -----
    Header, index, trailer and padding, as `inshrink_core.chain.FrameSize.overhead_nbytes` has them, to a
    few bytes: checksums and digests are as long, but not the same.
    """
    keys = [spec.key for spec in checkpoint.specs]
    paths = [LAYOUT_KEY, *(file.path for file in checkpoint.files)]
    parties = chain.parties()
    bitstreams, sizes = [], []
    for spec in checkpoint.specs:
        block = blocks.get(spec.key)
        codec = next(party.codec for party in parties if spec.role in party.roles)
        bitstreams.append(block.codec if block else codec.bitstream if codec.lossy else _EXACT)
        sizes.append(len(block.payload) if block else _unknown_size(spec, lossy=codec.lossy))
    sizes += [_PART_NBYTES for _ in paths]
    alike = {spec.key for spec in checkpoint.specs if spec.numel == 1}
    small, back = SmallBlocks(), []
    for number, (key, nbytes) in enumerate(zip([*keys, *paths], sizes, strict=True)):
        payload = blocks[key].payload if key in blocks else _any_bytes("" if key in alike else key, nbytes)
        back.append(small.add(number, payload))
    large = [i for i, before in enumerate(back) if before is None]
    index = FrameIndex(
        BlockColumns(
            tuple(keys),
            tuple(bitstreams),
            tuple(_as_tuple(pack_attributes(spec)) for spec in checkpoint.specs),
        ),
        BlockColumns(tuple(paths), tuple("raw" for _ in paths), tuple(() for _ in paths)),
        (len(keys), len(paths)),
        tuple(sizes),
        tuple(_digest(f"{number} {sizes[number]}") for number in large),
        {key: pack_value(value) for key, value in meta.items()},
        tuple(before or 0 for before in back),
    )
    document = compress_document(pack_index(index, parent), INDEX_DICTIONARY)
    # A tensor's bytes that are stored with another's were counted with both.
    twice = sum(
        len(blocks[key].payload) for key, before in zip(keys, back, strict=False) if before and key in blocks
    )
    padding = _padding([sizes[number] for number in large])
    return FRAME_HEADER_NBYTES + padding + len(document) + TRAILER_NBYTES - twice, index


def _any_bytes(name: str, nbytes: int) -> bytes:
    """Return bytes in the place of a payload that is not known, and of a large one as many as make it so."""
    nbytes = min(nbytes, LARGE_BLOCK_NBYTES)
    return (_digest(name).to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


def _unknown_size(spec: TensorSpec, *, lossy: bool) -> int:
    """Return a size like a coded tensor's: a byte more where it hardly compresses, irregular elsewhere.

    Of optimizer state under a lossy rule: a bit an element of first moments, a small share of one of second.
    """
    share = _digest(spec.key) / 2**32
    if lossy:
        share_of_byte = (0.5 + share) / (24 if spec.role in _SECOND_MOMENTS else 8)
        return _LOSSY_HEAD_NBYTES + int(spec.numel * share_of_byte)
    return int(spec.nbytes * (1 + share) / 2) if spec.nbytes > _SMALL_NBYTES else spec.nbytes + 1


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")


def _as_tuple(value: Any) -> Any:
    """Sequences as the archive reads them back, so that what is inherited compares equal."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _padding(sizes: Sequence[int]) -> int:
    offset, padding = FRAME_HEADER_NBYTES, 0
    for size in sizes:
        start = align(offset, size)
        padding += start - offset
        offset = start + size
    return padding
