"""Encoding steps in memory, whole or a sample of their tensors, and what a chain of them would take.

The decoded tensors are the states that encoding returns: by the closed-loop law of codecs they are, bit for
bit, what decoding the frame from disk will give.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inshrink_core.archive.index import ExpectedBlock, FrameIndex, expected_index
from inshrink_core.archive.layout import LARGE_BLOCK_NBYTES
from inshrink_core.chain import ChainConfig, ChainState, FrameEncoder, stored_view
from inshrink_core.chain.attachments import LAYOUT_KEY, attachments_of, encode_attachments
from inshrink_core.chain.encoder import FramePlan, TensorResult
from inshrink_core.chain.meta import pack_attributes
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, TensorReference
from inshrink_core.metrics import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import Block


_ATTACHMENT_NBYTES: Final = 64
"""About what a skeleton takes that hardly differs from the last one's. Its own bytes are not the weights',
the number of digits of its length in the index is."""


_EXACT: Final = "exact/1"

_SECOND_MOMENTS: Final = frozenset({TensorRole.EXP_AVG_SQ, TensorRole.MAX_EXP_AVG_SQ})

_LOSSY_HEAD_NBYTES: Final = 16

# Elements of a sample: a tenth of a second to encode, and thousands of symbols of every layer type.
_SAMPLE_NUMEL: Final = 1 << 20

# Tensors up to this size are all sampled: they cost nothing and differ most.
_SMALL_NUMEL: Final = 1 << 12

# Consecutive steps from which everything but weights is estimated: a keyframe and two deltas.
_STEPS: Final = 3

_SMALL_NBYTES: Final = 256
"""Up to this size a tensor is mostly stored as it is, behind a byte that marks it."""


@dataclass(frozen=True, kw_only=True)
class EncodedStep:
    """One step as its frame would hold it, or a sample of its tensors.

    Parameters
    ----------
    chain
        How its frame is made.
    checkpoint
        The original.
    specs
        The encoded tensors.
    plan
        Of the frame; more of it can be encoded.
    results
        The encoded tensors, by key.
    parent
        Index of the frame before, which that of a delta inherits from.
    """

    chain: ChainConfig
    checkpoint: Checkpoint = field(repr=False)
    specs: Sequence[TensorSpec] = field(repr=False)
    plan: FramePlan = field(repr=False)
    results: Mapping[str, TensorResult] = field(repr=False)
    parent: FrameIndex | None = field(repr=False)

    @cached_property
    def _framed(self) -> tuple[int, FrameIndex]:
        blocks = {key: result.block for key, result in self.results.items()}
        remembered = {} if self.plan.memory is None else {"memory": self.plan.memory}
        meta = self.chain.record() | {"content": _any_digest(blocks)} | remembered
        stored = stored_view(self.checkpoint, self.chain.optimizer)
        return frame_overhead(stored, blocks, self.chain, meta, self.parent)

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
    def moments(self) -> Mapping[str, TensorReference]:
        """States of the first moments that the next delta's rounding follows; encoded where it does."""
        specs = self.chain.first_moments(stored_view(self.checkpoint, self.chain.optimizer), self.specs)
        return {result.spec.key: result.reference for result in self.plan.encode(specs)}

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
        return sum(spec.nbytes for spec in _model(self.specs))

    @property
    def weights_nbytes(self) -> int:
        """Bytes that hold weights and buffers, overhead included."""
        return sum(self.nbytes[spec.key] for spec in _model(self.specs)) + self.overhead_nbytes

    @property
    def relative_error(self) -> float:
        """Root of squared error over squared norm; 0 where nothing has a norm."""
        norm = math.fsum(result.squared_norm for result in self.results.values())
        return math.sqrt(math.fsum(self.squared_errors.values()) / norm) if norm else 0.0

    def restored(self) -> Checkpoint:
        """Return the step as it would be restored: weights, buffers and what the codec stores beside them."""
        return restored_from(self.checkpoint, self.references)

    @property
    def scaled_nbytes(self) -> float:
        """Bytes that hold the weights of the whole step; header and index are those of all tensors."""
        return self._scaled(self.nbytes) + self.overhead_nbytes

    def scaled_damage(self, h: Mapping[str, float]) -> float | None:
        """Return ½ Σ h·e² of the weights of the whole step; None where no h is known."""
        damages = {key: 0.5 * h[key] * error for key, error in self.squared_errors.items() if key in h}
        return self._scaled(damages) if damages else None

    def _scaled(self, values: Mapping[str, float]) -> float:
        """Return the sum over all weights of the step, each layer type's scaled by its share of raw bytes."""
        full, sampled = (_raw_by("layer", _model(specs)) for specs in (self.checkpoint.specs, self.specs))
        totals: dict[Any, float] = dict.fromkeys(sampled, 0)
        for spec in _model(self.specs):
            totals[spec.layer] += values.get(spec.key, 0)
        return sum(totals[layer] * full[layer] / sampled[layer] for layer in sampled if sampled[layer])


def restored_from(checkpoint: Checkpoint, references: Mapping[str, TensorReference]) -> Checkpoint:
    """Return as much of a checkpoint as there are states of, with their values."""
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
        return self.references[spec.key].decoded_anew().cpu()

    def skeleton(self, layout: FileLayout) -> bytes:
        return b""


def encode_step(
    chain: ChainConfig,
    checkpoint: Checkpoint,
    state: ChainState,
    index: FrameIndex | None = None,
    keys: frozenset[str] | None = None,
) -> EncodedStep:
    """Encode weights and buffers of a step; nothing is written, and the state is as it was.

    Parameters
    ----------
    chain
        How the frame would be made.
    checkpoint
        The step.
    state
        What it is encoded against.
    index
        Index of the frame before, which that of a delta inherits from.
    keys
        Encode these tensors only, for an estimate; by default all of that the codec takes.

    Notes
    -----
    Costs what the weights' share of writing the frame costs. Holds the states before and after.
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
    plan = FrameEncoder(chain).plan(checkpoint, state, specs)
    results = {result.spec.key: result for result in plan.encode(specs)}
    return EncodedStep(
        chain=chain, checkpoint=checkpoint, specs=specs, plan=plan, results=results, parent=index
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
        state, index = following(before, keyframe=number % chain.keyframe_every == 0, foreseen=foreseen)
        before = encode_step(chain, checkpoint, state, index, keys)
        yield before


def following(
    before: EncodedStep | None, *, keyframe: bool, foreseen: Any = None
) -> tuple[ChainState, FrameIndex | None]:
    """Return what a step is encoded against after another, and the index it inherits from.

    A first step has nothing before it but what was foreseen.
    """
    if before is None:
        return ChainState(memory=foreseen), None
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
    """Return the bytes of a frame that are neither tensors nor attachments, and its index for the next frame.

    Parameters
    ----------
    checkpoint
        What the frame holds, as stored.
    blocks
        Blocks by key; tensors without one (optimizer state that was not encoded) count as entries only.
    chain
        How the frame is made: which codec takes a tensor without a block.
    meta
        Metadata of the frame.
    parent
        Index of the frame before; None for a keyframe, which inherits nothing.

    Notes
    -----
    Header, index, trailer and padding, as `inshrink_core.chain.FrameSize.overhead_nbytes` has them, to a
    few bytes: checksums and digests are as long, but not the same.
    """
    by_role = chain.codecs_by_role()
    tensors = []
    for spec in checkpoint.specs:
        block, attributes = blocks.get(spec.key), pack_attributes(spec)
        if block is not None:
            payload = bytes(block.payload)
            tensors.append(ExpectedBlock(spec.key, block.codec, attributes, len(payload), payload))
            continue
        codec = by_role[spec.role]
        lossy = codec.name != FALLBACK_CODEC
        bitstream, nbytes = codec.bitstream if lossy else _EXACT, _unknown_size(spec, lossy=lossy)
        # Counters of steps are all alike.
        payload = _any_bytes("" if spec.numel == 1 else spec.key, nbytes)
        tensors.append(ExpectedBlock(spec.key, bitstream, attributes, nbytes, payload))
    attachments = [
        ExpectedBlock(path, "raw", (), _ATTACHMENT_NBYTES, _any_bytes(path, _ATTACHMENT_NBYTES))
        for path in (LAYOUT_KEY, *(file.path for file in checkpoint.files))
    ]
    nbytes, index = expected_index(tensors, attachments, meta, parent)
    # A tensor's bytes that are stored with another's were counted with both.
    twice = sum(
        tensor.nbytes
        for tensor, back in zip(tensors, index.back, strict=False)
        if back and tensor.key in blocks
    )
    return nbytes - twice, index


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


def sample_keys(
    checkpoint: Checkpoint, numel: int = _SAMPLE_NUMEL, n_tensors: int | None = None
) -> frozenset[str]:
    """Return a sample of the model's tensors: of every layer type, about its share of elements.

    Parameters
    ----------
    checkpoint
        Any step of the run.
    numel
        About how many elements to take; everything where the model is no larger.
    n_tensors
        About how many tensors to take; by default any number.

    Notes
    -----
    Deterministic. All small tensors are taken, for they cost little and differ most. Of each layer type's
    larger ones, at least one is taken, and more of them at even distances in file order, so that every depth
    is met. Where these are too many tensors, the same is done with all of them.
    """
    specs = _model(checkpoint.specs)
    total = sum(spec.numel for spec in specs)
    small = {spec.key for spec in specs if spec.layer is LayerType.VECTOR or spec.numel < _SMALL_NUMEL}
    taken = small | _spread([spec for spec in specs if spec.key not in small], numel / max(1, total))
    if n_tensors is not None and len(taken) > n_tensors:
        return frozenset(_spread([spec for spec in specs if spec.key in taken], n_tensors / len(taken)))
    return frozenset(taken)


def _spread(specs: Iterable[TensorSpec], share: float) -> set[str]:
    """Return a share of the tensors of every layer type, at even distances, at least one of each."""
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


def _raw_by(name: str, specs: Iterable[TensorSpec]) -> dict[Any, int]:
    """Raw bytes by an attribute."""
    raw: dict[Any, int] = {}
    for spec in specs:
        raw[getattr(spec, name)] = raw.get(getattr(spec, name), 0) + spec.nbytes
    return raw


def step_ratio(
    chain: ChainConfig, checkpoint: Checkpoint, state: ChainState, index: FrameIndex | None
) -> float:
    """Return about what ratio a step's weights will have, by encoding a sample of its tensors.

    Parameters
    ----------
    chain
        How the frame would be made.
    checkpoint
        The step.
    state, index
        What it is encoded against.
    """
    keys = sample_keys(checkpoint)
    is_whole = keys >= {spec.key for spec in _model(checkpoint.specs)}
    encoded = encode_step(chain, checkpoint, state, index, None if is_whole else keys)
    nbytes = encoded.weights_nbytes if is_whole else encoded.scaled_nbytes
    raw: float = checkpoint.raw_bytes(MODEL_ROLES)
    if state.shards is not None:
        raw, nbytes = map(sum, zip(*state.shards.gathered((raw, nbytes)), strict=True))
    return raw / nbytes if nbytes else 0.0


def middle_of(steps: Sequence[int], n: int = _STEPS) -> Sequence[int]:
    """Return the few steps in the middle of a chain that an estimate encodes; all where there are no more."""
    first = max(0, (len(steps) - n) // 2)
    return steps[first : first + n]


def in_proportion(
    keyframes: Sequence[float], deltas: Sequence[float], n_steps: int, keyframe_every: int
) -> float:
    """Return the bytes of a chain from those of a few frames, in the proportion that the chain has them."""
    n_keyframes = math.ceil(n_steps / keyframe_every)
    others = deltas or keyframes
    total = n_keyframes * math.fsum(keyframes) / len(keyframes)
    return total + (n_steps - n_keyframes) * math.fsum(others) / len(others)


class Rest(NamedTuple):
    """Raw and stored bytes of everything of a whole chain but its weights and buffers; the latter about."""

    raw: float
    nbytes: float

    def ratio_total(self, raw_weights: float, weights_nbytes: float) -> float | None:
        """Return the ratio of everything, from the bytes of the weights and those that hold them."""
        return ratio(round(raw_weights + self.raw), round(weights_nbytes + self.nbytes))


def estimate_rest(
    chain: ChainConfig,
    checkpoints: Sequence[Checkpoint],
    n_steps: int,
    keys: frozenset[str],
    foreseen: Any = None,
) -> Rest:
    """Encode optimizer state and files of a few steps, and estimate those of a chain.

    Parameters
    ----------
    chain
        How its frames are made.
    checkpoints
        Those of `middle_of` the chain; the first is encoded as a keyframe.
    n_steps
        Steps of the chain.
    keys
        A sample of the model's tensors (`sample_keys`): of its optimizer
        state, what belongs to these is encoded, and scaled by role.
    foreseen
        What the chain's first frame is planned with (`FrameEncoder.look_ahead`).

    Notes
    -----
    The sampled weights are encoded too: how they are rounded decides how first moments are.
    """
    plain = replace(chain, overrides=())
    state, attachments = ChainState(memory=foreseen), dict[str, bytes]()
    raw, sizes = 0, []
    for checkpoint in checkpoints:
        stored = stored_view(checkpoint, chain.optimizer)
        model, rest = _model(stored.specs), [spec for spec in stored.specs if spec.role not in MODEL_ROLES]
        # The optimizer state of sampled tensors, and what belongs to no tensor of the model.
        taken = {spec.name: spec.key in keys for spec in model}
        sampled = [spec for spec in rest if taken.get(spec.parameter, True)]
        weights = [spec for spec in model if spec.key in keys]
        encoded = _encode(plain, checkpoint, state, None, [*weights, *sampled])
        state = ChainState(references=encoded.references, memory=encoded.plan.memory)
        content = dict(attachments_of(stored))
        files = sum(len(payload) for _, _, payload in encode_attachments(content, attachments))
        attachments = content
        full, part = _raw_by("role", rest), _raw_by("role", sampled)
        sampled_nbytes = dict.fromkeys(part, 0)
        for spec in sampled:
            sampled_nbytes[spec.role] += encoded.nbytes[spec.key]
        sizes.append(
            files + sum(sampled_nbytes[role] * full[role] / part[role] for role in part if part[role])
        )
        raw += sum(spec.nbytes for spec in rest)
    nbytes = in_proportion(sizes[:1], sizes[1:], n_steps, chain.keyframe_every)
    return Rest(n_steps * raw / len(checkpoints), nbytes)
