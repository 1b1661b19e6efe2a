"""What a chain takes, from a sample of a few of its steps: sizes, damage, optimizer state and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, FrameEncoder, Standing, stored_view
from inshrink_core.chain.parts import encode_parts, parts_of
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, LayerType, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.metrics import ratio
from inshrink_core.search.measure import EncodedStep, encode_step
from inshrink_core.search.space import Candidate

__all__ = [
    "RatioEstimate",
    "Rest",
    "estimate_rest",
    "in_proportion",
    "middle_of",
    "sample_keys",
    "scaled_damage",
    "scaled_nbytes",
]

# Elements of a sample: a tenth of a second to encode, and thousands of symbols of every layer type.
_SAMPLE_NUMEL: Final = 1 << 20

# Tensors up to this size are all sampled: they cost nothing and differ most.
_SMALL_NUMEL: Final = 1 << 12

# Consecutive steps that tell what is not weights: a keyframe and two deltas.
_STEPS: Final = 3


def sample_keys(checkpoint: Checkpoint, numel: int = _SAMPLE_NUMEL) -> frozenset[str]:
    """Return tensors of the model that stand for all: of every layer type, about its share of elements.

    Parameters
    ----------
    checkpoint
        Any step of the run.
    numel
        About how many elements to take; everything where the model is no larger.

    Notes
    -----
    Deterministic. All small tensors are taken, for they cost nothing and differ most. Of each layer type's
    larger ones, at least one is taken, and more of them at even distances in file order, so that every depth
    is met.
    """
    specs = _model(checkpoint)
    total = sum(spec.numel for spec in specs)
    if total <= numel:
        return frozenset(spec.key for spec in specs)
    taken = {spec.key for spec in specs if spec.layer is LayerType.VECTOR or spec.numel < _SMALL_NUMEL}
    groups: dict[LayerType | None, list[TensorSpec]] = {}
    for spec in specs:
        if spec.key not in taken:
            groups.setdefault(spec.layer, []).append(spec)
    for group in groups.values():
        n = max(1, round(len(group) * numel / total))
        taken.update(group[(2 * k + 1) * len(group) // (2 * n)].key for k in range(n))
    return frozenset(taken)


def scaled_nbytes(encoded: EncodedStep, checkpoint: Checkpoint) -> float:
    """Return the bytes that hold a step's weights, from a sample of its tensors.

    Each layer type's bytes are scaled by its share of raw bytes; header and index are those of all tensors.
    """
    whole, sampled = _raw_by_layer(checkpoint), _raw_by_layer(encoded.checkpoint)
    blocks = dict.fromkeys(sampled, 0)
    for spec in _model(encoded.checkpoint):
        blocks[spec.layer] += encoded.nbytes[spec.key]
    held = sum(blocks[layer] * whole[layer] / sampled[layer] for layer in sampled if sampled[layer])
    return held + encoded.overhead_nbytes


def scaled_damage(encoded: EncodedStep, checkpoint: Checkpoint, h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e² of a step's weights, from a sample of its tensors; None where no h is known."""
    whole, sampled = _raw_by_layer(checkpoint), _raw_by_layer(encoded.checkpoint)
    terms = [
        0.5 * h[spec.key] * encoded.squared_errors[spec.key] * whole[spec.layer] / sampled[spec.layer]
        for spec in _model(encoded.checkpoint)
        if spec.key in h and sampled[spec.layer]
    ]
    return math.fsum(terms) if terms else None


def _model(checkpoint: Checkpoint) -> list[TensorSpec]:
    return [spec for spec in checkpoint.specs if spec.role in MODEL_ROLES]


def _raw_by_layer(checkpoint: Checkpoint) -> dict[LayerType | None, int]:
    """Raw bytes of the model by layer type."""
    raw: dict[LayerType | None, int] = {}
    for spec in _model(checkpoint):
        raw[spec.layer] = raw.get(spec.layer, 0) + spec.nbytes
    return raw


class RatioEstimate:
    """Ratios of candidates at one step, each estimated once, by encoding a sample of its tensors.

    Parameters
    ----------
    base
        How frames are made, but for what a candidate sets.
    checkpoint
        The step.
    standing, index
        What it is encoded against.
    """

    def __init__(
        self, base: ChainConfig, checkpoint: Checkpoint, standing: Standing, index: FrameIndex | None
    ) -> None:
        self._base, self._checkpoint, self._standing, self._index = base, checkpoint, standing, index
        self._keys = sample_keys(checkpoint)
        self._raw = checkpoint.raw_bytes(MODEL_ROLES)
        self._known: dict[str, float] = {}

    def __call__(self, candidate: Candidate) -> float:
        """Return about what ratio the step's weights will have."""
        if candidate.digest not in self._known:
            chain = candidate.chain_config(self._base)
            whole = self._keys >= {spec.key for spec in _model(self._checkpoint)}
            keys = None if whole else self._keys
            encoded = encode_step(chain, self._checkpoint, self._standing, self._index, keys)
            nbytes = encoded.weights_nbytes if whole else scaled_nbytes(encoded, self._checkpoint)
            self._known[candidate.digest] = self._raw / nbytes if nbytes else 0.0
        return self._known[candidate.digest]


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
    """Encode optimizer state and files of a few steps, and tell what those of a whole chain would take.

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
    references: Mapping[str, TensorReference] = {}
    parts: dict[str, bytes] = {}
    raw, sizes, memory = 0, [], foreseen
    for checkpoint in checkpoints:
        stored = stored_view(checkpoint, chain.optimizer)
        rest = [spec for spec in stored.specs if spec.role not in MODEL_ROLES]
        sampled = _sampled(stored, rest, keys)
        weights = [spec for spec in stored.specs if spec.role in MODEL_ROLES and spec.key in keys]
        standing = Standing(references=references, memory=memory)
        memory, references, held = _encode(plain, checkpoint, [*weights, *sampled], standing)
        content = dict(parts_of(stored))
        files = sum(len(payload) for _, _, payload in encode_parts(content, parts))
        parts = content
        whole, part = _raw_by_role(rest), _raw_by_role(sampled)
        sizes.append(files + sum(held[role] * whole[role] / part[role] for role in held if part.get(role)))
        raw += sum(spec.nbytes for spec in rest)
    nbytes = in_proportion(sizes[:1], sizes[1:], n_steps, chain.keyframe_every)
    return Rest(n_steps * raw / len(checkpoints), nbytes)


def _sampled(stored: Checkpoint, rest: Sequence[TensorSpec], keys: frozenset[str]) -> list[TensorSpec]:
    """Return the optimizer state of sampled tensors, and what belongs to no tensor of the model."""
    model = {spec.name: spec.key in keys for spec in stored.specs if spec.role in MODEL_ROLES}
    return [spec for spec in rest if model.get(spec.parameter, True)]


def _encode(
    chain: ChainConfig, checkpoint: Checkpoint, specs: Sequence[TensorSpec], standing: Standing
) -> tuple[Any, dict[str, TensorReference], dict[TensorRole, int]]:
    """Return memory and states after some tensors of a step, and the bytes of their blocks by role."""
    after: dict[str, TensorReference] = {}
    held: dict[TensorRole, int] = {}
    memory = standing.memory
    if specs:
        memory, results = FrameEncoder(chain).encode(checkpoint, standing, specs)
        for result in results:
            after[result.spec.key] = result.reference
            held[result.spec.role] = held.get(result.spec.role, 0) + len(result.block.payload)
    return memory, after, held


def _raw_by_role(specs: Sequence[TensorSpec]) -> dict[TensorRole, int]:
    """Raw bytes by role."""
    raw: dict[TensorRole, int] = {}
    for spec in specs:
        raw[spec.role] = raw.get(spec.role, 0) + spec.nbytes
    return raw
