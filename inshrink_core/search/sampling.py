"""A sample of a step's tensors, and ratios estimated on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from inshrink_core.archive.index import FrameIndex
from inshrink_core.chain import ChainConfig, Standing
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, LayerType, TensorSpec
from inshrink_core.search.measure import EncodedStep, encode_step
from inshrink_core.search.space import Candidate

__all__ = ["SAMPLE_NUMEL", "RatioEstimate", "sample_keys", "scaled_damage", "scaled_nbytes"]

SAMPLE_NUMEL: Final = 1 << 20
"""Elements of a sample: a tenth of a second to encode, and thousands of symbols of every layer type."""


def sample_keys(checkpoint: Checkpoint, numel: int = SAMPLE_NUMEL) -> frozenset[str]:
    """Return tensors of the model that stand for all: of every layer type, about its share of elements.

    Parameters
    ----------
    checkpoint
        Any step of the run.
    numel
        About how many elements to take; everything where the model is no larger.

    Notes
    -----
    Deterministic. Small tensors are all taken, for they cost nothing and differ most; of each layer type's
    larger ones every so-manieth in file order, so that all depths are met, at least one.
    """
    specs = [spec for spec in checkpoint.specs if spec.role in MODEL_ROLES]
    total = sum(spec.numel for spec in specs)
    if total <= numel:
        return frozenset(spec.key for spec in specs)
    taken = {spec.key for spec in specs if _is_small(spec)}
    groups: dict[LayerType | None, list[TensorSpec]] = {}
    for spec in specs:
        if spec.key not in taken:
            groups.setdefault(spec.layer, []).append(spec)
    for group in groups.values():
        n = max(1, round(len(group) * numel / total))
        taken.update(group[(2 * k + 1) * len(group) // (2 * n)].key for k in range(n))
    return frozenset(taken)


def _is_small(spec: TensorSpec) -> bool:
    return spec.layer is LayerType.VECTOR or spec.numel < 1 << 12


def scaled_nbytes(encoded: EncodedStep, checkpoint: Checkpoint) -> float:
    """Return the bytes that hold a step's weights, from a sample of its tensors.

    Each layer type's bytes are scaled by its share of raw bytes; header and index are those of all tensors.
    """
    whole, sampled, blocks = _raw(checkpoint), _raw(encoded.checkpoint), _blocks(encoded)
    held = sum(blocks[layer] * whole[layer] / sampled[layer] for layer in sampled if sampled[layer])
    return held + encoded.overhead_nbytes


def _raw(checkpoint: Checkpoint) -> dict[LayerType | None, int]:
    """Raw bytes of the model by layer type."""
    raw: dict[LayerType | None, int] = {}
    for spec in checkpoint.specs:
        if spec.role in MODEL_ROLES:
            raw[spec.layer] = raw.get(spec.layer, 0) + spec.nbytes
    return raw


def _blocks(encoded: EncodedStep) -> dict[LayerType | None, int]:
    """Bytes of the blocks by layer type."""
    blocks: dict[LayerType | None, int] = {}
    for spec in encoded.checkpoint.specs:
        if spec.role in MODEL_ROLES:
            blocks[spec.layer] = blocks.get(spec.layer, 0) + encoded.nbytes[spec.key]
    return blocks


def scaled_damage(encoded: EncodedStep, checkpoint: Checkpoint, h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e² of a step's weights, from a sample of its tensors; None where no h is known."""
    whole, sampled = _raw(checkpoint), _raw(encoded.checkpoint)
    terms = [
        0.5 * h[spec.key] * encoded.squared_errors[spec.key] * whole[spec.layer] / sampled[spec.layer]
        for spec in encoded.checkpoint.specs
        if spec.role in MODEL_ROLES and spec.key in h and sampled[spec.layer]
    ]
    return math.fsum(terms) if terms else None


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
            whole = self._keys >= {spec.key for spec in self._checkpoint.specs if spec.role in MODEL_ROLES}
            keys = None if whole else self._keys
            encoded = encode_step(chain, self._checkpoint, self._standing, self._index, keys)
            nbytes = encoded.weights_nbytes if whole else scaled_nbytes(encoded, self._checkpoint)
            self._known[candidate.digest] = self._raw / nbytes if nbytes else 0.0
        return self._known[candidate.digest]
