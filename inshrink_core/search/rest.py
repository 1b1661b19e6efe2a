"""What a chain takes beside its weights: optimizer state and files, estimated from a sample of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from inshrink_core.chain import ChainConfig, FrameEncoder, Standing, stored_view
from inshrink_core.chain.parts import encode_part, parts_of
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.metrics import ratio

__all__ = ["Rest", "estimate_rest", "middle_of"]

_STEPS: Final = 3
"""Consecutive steps that are encoded: a keyframe and two deltas."""


def middle_of(steps: Sequence[int]) -> Sequence[int]:
    """Return the few steps in the middle of a chain that an estimate encodes; all where there are no more."""
    first = max(0, (len(steps) - _STEPS) // 2)
    return steps[first : first + _STEPS]


class Rest(NamedTuple):
    """Raw and stored bytes of everything of a whole chain but its weights and buffers; the latter about."""

    raw: float
    nbytes: float

    def ratio_total(self, raw_weights: float, weights_nbytes: float) -> float | None:
        """Return the ratio of everything, from the bytes of the weights and those that hold them."""
        return ratio(round(raw_weights + self.raw), round(weights_nbytes + self.nbytes))


def estimate_rest(
    chain: ChainConfig, checkpoints: Sequence[Checkpoint], n_steps: int, keys: frozenset[str]
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
        A sample of the model's tensors (`inshrink_core.search.sampling.sample_keys`): of its optimizer
        state, what belongs to these is encoded, and scaled by role.
    """
    plain = replace(chain, overrides=())
    references: Mapping[str, TensorReference] = {}
    parts: dict[str, bytes] = {}
    raw, sizes = 0, []
    for checkpoint in checkpoints:
        stored = stored_view(checkpoint, chain.optimizer)
        rest = [spec for spec in stored.specs if spec.role not in MODEL_ROLES]
        sampled = _sampled(stored, rest, keys)
        references, held = _encode(plain, checkpoint, sampled, references)
        content = dict(parts_of(stored))
        files = sum(len(encode_part(one, parts.get(key))[1]) for key, one in content.items())
        parts = content
        whole, part = _raw(rest), _raw(sampled)
        sizes.append(files + sum(held[role] * whole[role] / part[role] for role in held if part[role]))
        raw += sum(spec.nbytes for spec in rest)
    n_keyframes = math.ceil(n_steps / chain.keyframe_every)
    deltas = sizes[1:] or sizes
    nbytes = n_keyframes * sizes[0] + (n_steps - n_keyframes) * math.fsum(deltas) / len(deltas)
    return Rest(n_steps * raw / len(checkpoints), nbytes)


def _sampled(stored: Checkpoint, rest: Sequence[TensorSpec], keys: frozenset[str]) -> list[TensorSpec]:
    """Return the optimizer state of sampled tensors, and what belongs to no tensor of the model."""
    model = {spec.name: spec.key in keys for spec in stored.specs if spec.role in MODEL_ROLES}
    return [spec for spec in rest if model.get(spec.name, True)]


def _encode(
    chain: ChainConfig,
    checkpoint: Checkpoint,
    specs: Sequence[TensorSpec],
    references: Mapping[str, TensorReference],
) -> tuple[dict[str, TensorReference], dict[TensorRole, int]]:
    """Return the states after some tensors of a step, and the bytes of their blocks by role."""
    after: dict[str, TensorReference] = {}
    held: dict[TensorRole, int] = {}
    if specs:
        _, results = FrameEncoder(chain).encode(checkpoint, Standing(references=references), specs)
        for result in results:
            after[result.spec.key] = result.reference
            held[result.spec.role] = held.get(result.spec.role, 0) + len(result.block.payload)
    return after, held


def _raw(specs: Sequence[TensorSpec]) -> dict[TensorRole, int]:
    """Raw bytes by role."""
    raw: dict[TensorRole, int] = {}
    for spec in specs:
        raw[spec.role] = raw.get(spec.role, 0) + spec.nbytes
    return raw
