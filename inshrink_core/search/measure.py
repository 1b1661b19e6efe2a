"""Encoding of steps in memory, complete or sampled, and estimates of the size of a chain.

Encoding returns the decoded tensors as states. By the closed-loop property of codecs they are bit-identical
to the result of decoding the frame from disk.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inshrink_core.archive.index import FrameIndex, IndexBuilder
from inshrink_core.archive.layout import LARGE_BLOCK_NBYTES
from inshrink_core.chain import ChainConfig, ChainState, FramePlan, stored_view
from inshrink_core.chain.attachments import LAYOUT_KEY, attachments_of, encode_attachments
from inshrink_core.chain.encoder import TensorResult
from inshrink_core.chain.meta import pack_attributes
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, TensorReference
from inshrink_core.frame import Block
from inshrink_core.metrics import ratio

if TYPE_CHECKING:
    from torch import Tensor


_ATTACHMENT_NBYTES: Final = 64
"""Approximate size of a skeleton that barely differs from the last one. Its bytes do not count as weights;
the number of digits of its length in the index does."""


_EXACT: Final = "exact/1"

_SECOND_MOMENTS: Final = frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ})

_LOSSY_HEAD_NBYTES: Final = 16

# Elements of a sample: it encodes in a tenth of a second, and gives thousands of symbols per layer type.
_SAMPLE_NUMEL: Final = 1 << 20

# All tensors up to this size are sampled: they cost little and differ most.
_SMALL_NUMEL: Final = 1 << 12

# Consecutive steps from which the size of everything but weights is estimated: a keyframe and two deltas.
_STEPS: Final = 3

_SMALL_NBYTES: Final = 256
"""A tensor up to this size is usually stored raw, after a marker byte."""


@dataclass(frozen=True, kw_only=True)
class EncodedStep:
    """A step as its frame would store it, or a sample of its tensors.

    Parameters
    ----------
    chain
        Configuration of the frame.
    checkpoint
        The original.
    specs
        The encoded tensors.
    plan
        Plan of the frame; it can encode further tensors.
    results
        The encoded tensors, by key.
    parent
        Index of the previous frame, which that of a delta inherits from.
    """

    chain: ChainConfig
    checkpoint: Checkpoint = field(repr=False)
    specs: Sequence[TensorSpec] = field(repr=False)
    plan: FramePlan = field(repr=False)
    results: Mapping[str, TensorResult] = field(repr=False)
    parent: FrameIndex | None = field(repr=False)

    @functools.cached_property
    def _framed(self) -> tuple[int, FrameIndex]:
        blocks = {key: result.block for key, result in self.results.items()}
        remembered = {} if self.plan.memory is None else {"memory": self.plan.memory}
        meta = self.chain.record() | {"content": _any_digest(blocks)} | remembered
        stored = stored_view(self.checkpoint, self.chain.optimizer)
        return frame_overhead(stored, blocks, self.chain, meta, self.parent)

    @property
    def index(self) -> FrameIndex:
        """Approximate index of the frame."""
        return self._framed[1]

    @property
    def overhead_nbytes(self) -> int:
        """Size of header, index, trailer and padding."""
        return self._framed[0]

    @functools.cached_property
    def references(self) -> Mapping[str, TensorReference]:
        """States after the step: its decoded values, which the next delta is encoded against."""
        return {key: result.reference for key, result in self.results.items()}

    @functools.cached_property
    def moments(self) -> Mapping[str, TensorReference]:
        """First-moment states for the rounding of the next delta; encoded if the rounding uses them."""
        specs = self.chain.first_moments(stored_view(self.checkpoint, self.chain.optimizer), self.specs)
        return {result.spec.key: result.reference for result in self.plan.encode(specs)}

    @functools.cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Size of each block in bytes, by key."""
        return {key: len(result.block.payload) for key, result in self.results.items()}

    @functools.cached_property
    def squared_errors(self) -> Mapping[str, float]:
        """Squared error of each weight and buffer, by key."""
        return {key: result.squared_error for key, result in self.results.items()}

    @property
    def raw_weights(self) -> int:
        """Raw size of weights and buffers in bytes."""
        return sum(spec.nbytes for spec in _model(self.specs))

    @property
    def weights_nbytes(self) -> int:
        """Stored size of weights and buffers in bytes, including overhead."""
        return sum(self.nbytes[spec.key] for spec in _model(self.specs)) + self.overhead_nbytes

    @property
    def relative_error(self) -> float:
        """``sqrt(Σ e² / Σ w²)`` for errors e and weights w; 0 if all norms are 0."""
        norm = math.fsum(result.squared_norm for result in self.results.values())
        return math.sqrt(math.fsum(self.squared_errors.values()) / norm) if norm else 0.0

    def restored(self) -> Checkpoint:
        """Return the restored step: weights, buffers and the codec's auxiliary tensors."""
        return restored_from(self.checkpoint, self.references)

    @property
    def scaled_nbytes(self) -> float:
        """Estimated size of all weights of the step; header and index already cover all tensors."""
        return self._scaled(self.nbytes) + self.overhead_nbytes

    def scaled_damage(self, h: Mapping[str, float]) -> float | None:
        """Return the estimated ½ Σ h·e² of all weights of the step, or None without any known h."""
        damages = {key: 0.5 * h[key] * error for key, error in self.squared_errors.items() if key in h}
        return self._scaled(damages) if damages else None

    def _scaled(self, values: Mapping[str, float]) -> float:
        return _scaled("layer", _model(self.checkpoint.specs), _model(self.specs), values)


def restored_from(checkpoint: Checkpoint, references: Mapping[str, TensorReference]) -> Checkpoint:
    """Return the part of a checkpoint that has states, with their values."""
    return replace(
        checkpoint,
        specs=tuple(spec for spec in checkpoint.specs if spec.key in references),
        aliases={name: key for name, key in checkpoint.aliases.items() if key in references},
        source=_States(references),
    )


@dataclass(frozen=True)
class _States:
    """A `TensorSource` over states in memory."""

    references: Mapping[str, TensorReference]

    def read(self, spec: TensorSpec) -> Tensor:
        return self.references[spec.key].decoded().cpu().clone()

    def skeleton(self, layout: FileLayout) -> bytes:
        return b""


def encode_step(
    chain: ChainConfig,
    checkpoint: Checkpoint,
    state: ChainState,
    index: FrameIndex | None = None,
    keys: frozenset[str] | None = None,
) -> EncodedStep:
    """Encode weights and buffers of a step in memory; write nothing and leave the state unchanged.

    Parameters
    ----------
    chain
        Configuration of the frame.
    checkpoint
        The step.
    state
        State to encode against.
    index
        Index of the previous frame, which that of a delta inherits from.
    keys
        Encode only these tensors, for an estimate. By default, encode all tensors that the codec takes.

    Notes
    -----
    The cost equals the weights' share of writing the frame. The states before and after stay in memory.
    """
    roles = MODEL_ROLES | chain.config.takes()
    chosen = [spec for spec in checkpoint.specs if spec.role in roles and (keys is None or spec.key in keys)]
    return _encode(chain, checkpoint, state, index, chosen)


def _encode(
    chain: ChainConfig,
    checkpoint: Checkpoint,
    state: ChainState,
    index: FrameIndex | None,
    specs: Sequence[TensorSpec],
) -> EncodedStep:
    plan = FramePlan(chain, checkpoint, state, specs)
    results = {result.spec.key: result for result in plan.encode(specs)}
    return EncodedStep(
        chain=chain, checkpoint=checkpoint, specs=specs, plan=plan, results=results, parent=index
    )


def _any_digest(blocks: Mapping[str, Block]) -> bytes:
    """Return 16 bytes in place of the content digest; they neither compress nor repeat."""
    lengths = "".join(f"{key} {len(block.payload)} " for key, block in blocks.items())
    return hashlib.sha256(lengths.encode()).digest()[:16]


def encode_chain(
    chain: ChainConfig,
    checkpoints: Iterable[Checkpoint],
    keys: frozenset[str] | None = None,
    initial: Any = None,
) -> Iterator[EncodedStep]:
    """Yield the steps of a chain, each encoded in memory against the previous one.

    Parameters
    ----------
    chain
        Configuration of the frames.
    checkpoints
        The steps, in order.
    keys
        Encode only these tensors.
    initial
        Encoder memory before the first frame (`inshrink_core.chain.look_ahead`).
    """
    before: EncodedStep | None = None
    for number, checkpoint in enumerate(checkpoints):
        state, index = following(before, keyframe=number % chain.keyframe_every == 0, initial=initial)
        before = encode_step(chain, checkpoint, state, index, keys)
        yield before


def following(
    before: EncodedStep | None, *, keyframe: bool, initial: Any = None
) -> tuple[ChainState, FrameIndex | None]:
    """Return the state that the next step is encoded against, and the index that it inherits from.

    The first step has no predecessor, only the plan.
    """
    if before is None:
        return ChainState(memory=initial), None
    if keyframe:
        return ChainState(memory=before.plan.memory), None
    references = {**before.references, **before.moments}
    return ChainState(references=references, memory=before.plan.memory), before.index


def frame_overhead(
    checkpoint: Checkpoint,
    blocks: Mapping[str, Block],
    chain: ChainConfig,
    meta: Mapping[str, Any],
    parent: FrameIndex | None,
) -> tuple[int, FrameIndex]:
    """Return the overhead of a frame without tensors and attachments, and its index for the next frame.

    Parameters
    ----------
    checkpoint
        Content of the frame, as stored.
    blocks
        Blocks by key. Tensors without one (optimizer state that was not encoded) count as entries only.
    chain
        Configuration of the frame: it names the codec of a tensor without a block.
    meta
        Metadata of the frame.
    parent
        Index of the previous frame; None for a keyframe, which inherits nothing.

    Notes
    -----
    The overhead is header, index, trailer and padding, as in `FrameSize.overhead_nbytes`, to a few bytes:
    checksums and digests have other values of the same length.
    """
    by_role, builder = chain.codecs_by_role(), IndexBuilder()
    for place, spec in enumerate(checkpoint.specs):
        block, codec = blocks.get(spec.key), by_role[spec.role]
        if block is not None:
            bitstream, payload = block.codec, bytes(block.payload)
            nbytes = len(payload)
        else:
            bitstream = _EXACT if codec.name == FALLBACK_CODEC else codec.bitstream
            nbytes, payload = _unknown_payload(spec, bitstream)
        builder.add((spec.key, bitstream, pack_attributes(spec)), payload, place, nbytes)
    for path in (LAYOUT_KEY, *(file.path for file in checkpoint.files)):
        builder.add((path, "raw", ()), _any_bytes(path, _ATTACHMENT_NBYTES), None, _ATTACHMENT_NBYTES)
    index = builder.finish(meta)
    # Bytes of a tensor that are stored with another tensor were counted twice.
    tensors = index.entries[: len(checkpoint.specs)]
    twice = sum(entry.nbytes for entry in tensors if entry.back and entry.key in blocks)
    return builder.overhead(index, parent) - twice, index


@functools.lru_cache(1 << 14)
def _unknown_payload(spec: TensorSpec, bitstream: str) -> tuple[int, bytes]:
    """Return a plausible size for a block that was not encoded, and bytes in its place.

    The size is one byte more if the tensor barely compresses, irregular otherwise. For optimizer state under
    a lossy rule, it is one bit per element of first moments, and a small share of second moments.
    """
    share = _digest(spec.key) / 2**32
    if bitstream != _EXACT:
        share_of_byte = (0.5 + share) / (24 if spec.role in _SECOND_MOMENTS else 8)
        nbytes = _LOSSY_HEAD_NBYTES + int(spec.numel * share_of_byte)
    else:
        nbytes = int(spec.nbytes * (1 + share) / 2) if spec.nbytes > _SMALL_NBYTES else spec.nbytes + 1
    # Step counters are all alike.
    return nbytes, _any_bytes("" if spec.numel == 1 else spec.key, nbytes)


def _any_bytes(name: str, nbytes: int) -> bytes:
    """Return bytes in place of an unknown payload; a large one gets just enough to count as large."""
    nbytes = min(nbytes, LARGE_BLOCK_NBYTES)
    return (_digest(name).to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")


def sample_keys(
    checkpoint: Checkpoint, numel: int = _SAMPLE_NUMEL, n_tensors: int | None = None
) -> frozenset[str]:
    """Return a sample of the model's tensors that covers every layer type by about its share of elements.

    Parameters
    ----------
    checkpoint
        Any step of the run.
    numel
        Approximate number of elements to take; all tensors of a smaller model are taken.
    n_tensors
        Approximate number of tensors to take; by default any number.

    Notes
    -----
    The choice is deterministic. All small tensors are taken, because they cost little and differ most. Of the
    larger tensors of each layer type at least one is taken, and more at even distances in file order, so that
    the sample covers every depth. If this gives too many tensors, the same is done with all of them.
    """
    specs = _model(checkpoint.specs)
    total = sum(spec.numel for spec in specs)
    small = {spec.key for spec in specs if spec.layer is LayerType.VECTOR or spec.numel < _SMALL_NUMEL}
    taken = small | _spread([spec for spec in specs if spec.key not in small], numel / max(1, total))
    if n_tensors is not None and len(taken) > n_tensors:
        return frozenset(_spread([spec for spec in specs if spec.key in taken], n_tensors / len(taken)))
    return frozenset(taken)


def _spread(specs: Iterable[TensorSpec], share: float) -> set[str]:
    """Return a share of the tensors of every layer type, evenly spaced, at least one of each."""
    groups: dict[LayerType | None, list[str]] = {}
    for spec in specs:
        groups.setdefault(spec.layer, []).append(spec.key)
    taken: set[str] = set()
    for group in groups.values():
        n = min(len(group), max(1, round(len(group) * share)))
        taken.update(group[(2 * k + 1) * len(group) // (2 * n)] for k in range(n))
    return taken


def _model(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if spec.role in MODEL_ROLES]


def _scaled(
    name: str, specs: Iterable[TensorSpec], sampled: Iterable[TensorSpec], values: Mapping[str, float]
) -> float:
    """Return the sum over all tensors; scale each layer type or role by its sampled share of raw bytes."""
    full, raw, totals = (defaultdict[Any, float](int) for _ in range(3))
    for spec in specs:
        full[getattr(spec, name)] += spec.nbytes
    for spec in sampled:
        raw[getattr(spec, name)] += spec.nbytes
        totals[getattr(spec, name)] += values.get(spec.key, 0)
    return sum(totals[group] * full[group] / raw[group] for group in raw if raw[group])


def step_ratio(
    chain: ChainConfig, checkpoint: Checkpoint, state: ChainState, index: FrameIndex | None
) -> float:
    """Estimate the compression ratio of a step's weights by encoding a sample of its tensors.

    The stored bytes are Σ b_t · R_t / r_t over layer types t, with the stored bytes b and raw bytes r of the
    sample, and the raw bytes R of all tensors.

    Parameters
    ----------
    chain
        Configuration of the frame.
    checkpoint
        The step.
    state, index
        State that the step is encoded against, and its index.
    """
    keys = sample_keys(checkpoint)
    is_complete = keys >= {spec.key for spec in _model(checkpoint.specs)}
    encoded = encode_step(chain, checkpoint, state, index, None if is_complete else keys)
    nbytes = encoded.weights_nbytes if is_complete else encoded.scaled_nbytes
    raw: float = checkpoint.raw_bytes(MODEL_ROLES)
    if state.shards is not None:
        raw, nbytes = map(sum, zip(*state.shards.gathered((raw, nbytes)), strict=True))
    return raw / nbytes if nbytes else 0.0


def middle_of(steps: Sequence[int], n: int = _STEPS) -> Sequence[int]:
    """Return the `n` steps in the middle of a chain that an estimate encodes; all of a shorter chain."""
    first = max(0, (len(steps) - n) // 2)
    return steps[first : first + n]


def in_proportion(
    keyframes: Sequence[float], deltas: Sequence[float], n_steps: int, keyframe_every: int
) -> float:
    """Scale the bytes of a few frames to a chain, by the chain's proportion of keyframes and deltas."""
    n_keyframes = math.ceil(n_steps / keyframe_every)
    others = deltas or keyframes
    total = n_keyframes * math.fsum(keyframes) / len(keyframes)
    return total + (n_steps - n_keyframes) * math.fsum(others) / len(others)


class Rest(NamedTuple):
    """Raw bytes, and approximate stored bytes, of everything in a chain except weights and buffers."""

    raw: float
    nbytes: float

    def ratio_total(self, raw_weights: float, weights_nbytes: float) -> float | None:
        """Return the total compression ratio, from the raw and stored bytes of the weights."""
        return ratio(round(raw_weights + self.raw), round(weights_nbytes + self.nbytes))


def estimate_rest(
    chain: ChainConfig,
    checkpoints: Sequence[Checkpoint],
    n_steps: int,
    keys: frozenset[str],
    files: Sequence[int],
    initial: Any = None,
) -> Rest:
    """Encode optimizer state and files of a few steps, and estimate those of the chain.

    Parameters
    ----------
    chain
        Configuration of the frames.
    checkpoints
        The checkpoints of `middle_of` the chain; the first is encoded as a keyframe.
    n_steps
        Number of steps of the chain.
    keys
        A sample of the model's tensors (`sample_keys`). Its optimizer state is encoded, and scaled by role.
    files
        The checkpoints' `attachment_sizes`.
    initial
        Encoder memory before the first frame (`look_ahead`).

    Notes
    -----
    The sampled weights are encoded too, because their rounding affects the rounding of first moments.
    """
    plain = replace(chain, overrides=())
    state, raw, sizes = ChainState(memory=initial), 0, list[float]()
    for checkpoint, attached in zip(checkpoints, files, strict=True):
        stored = stored_view(checkpoint, chain.optimizer)
        model, rest = _model(stored.specs), [spec for spec in stored.specs if spec.role not in MODEL_ROLES]
        # Optimizer state of sampled tensors, and state that belongs to no tensor of the model.
        taken = {spec.name: spec.key in keys for spec in model}
        sampled = [spec for spec in rest if taken.get(spec.parameter, True)]
        weights = [spec for spec in model if spec.key in keys]
        encoded = _encode(plain, checkpoint, state, None, [*weights, *sampled])
        state = ChainState(references=encoded.references, memory=encoded.plan.memory)
        sizes.append(attached + _scaled("role", rest, sampled, encoded.nbytes))
        raw += sum(spec.nbytes for spec in rest)
    nbytes = in_proportion(sizes[:1], sizes[1:], n_steps, chain.keyframe_every)
    return Rest(n_steps * raw / len(checkpoints), nbytes)


def attachment_sizes(checkpoints: Iterable[Checkpoint], optimizer: str) -> list[int]:
    """Return the stored bytes of the attachments of consecutive steps, the first a keyframe."""
    sizes, before = [], dict[str, bytes]()
    for checkpoint in checkpoints:
        content = dict(attachments_of(stored_view(checkpoint, optimizer)))
        sizes.append(sum(len(payload) for _, _, payload in encode_attachments(content, before)))
        before = content
    return sizes
