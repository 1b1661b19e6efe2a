"""The Inshrinkerator codec: non-uniform quantization with pruning, protection and deltas of symbols.

Agrawal et al., "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic
Quantization" (SoCC'24). `InshrinkeratorCodec` documents the choices that the paper leaves open. Codebooks are
fitted exactly by default (`inshrink_core.quantization`); ``fit="published"`` selects the paper's method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch

from inshrink_core.checkpoint import LayerType, TensorRole, TensorSpec
from inshrink_core.codec import (
    Encoded,
    FrameContext,
    Switch,
    TensorInput,
    TensorReference,
    Tunable,
    Tuning,
    state_as,
)
from inshrink_core.codecs.fallback import FallbackCodec
from inshrink_core.codecs.inshrinkerator.block import (
    FIRST_BIN,
    InshrinkeratorReference,
    pack_quantized,
    parse_quantized,
)
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.ops.quantize import (
    INFINITE_KEY,
    MAGNITUDE_KEYS,
    assign,
    gather_protected,
    histogram16,
    sensitivity_histogram,
)
from inshrink_core.quantization.codebook import (
    assignment_table,
    fit_exact,
    key_histogram,
    round_centroids,
    round_to_bfloat16,
    squared_error,
)
from inshrink_core.quantization.partition import NO_UPPER, KeyCounts, Thresholds, merge, thresholds
from inshrink_core.quantization.published import fit_published

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["InshrinkeratorCodec"]

_BINS = (2, 254)
"""Range of the number of bins; with the symbols for pruned and protected they fit a byte."""

_PRUNED = (0.0, 0.95)
"""Range of the pruned share; more destroys the model."""

_HOLD_FACTOR = 1.1
"""A codebook is reused until a new one would have 9 % less squared error."""

_METRICS = ("magnitude", "sensitivity")

_SEARCHED = (
    Tunable(settings=("bins",), values=(32, 16, 12, 8, 6, 4), label="Bins", unit="centroids"),
    Tunable(settings=("prune",), values=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5), label="Pruned share"),
    Tunable(settings=("protect",), values=(0.01, 0.005, 0.0005), label="Protected share"),
    Tunable(
        # Embeddings are more sensitive to quantization, so they have separate bins.
        settings=("embedding_bins",),
        values=(32, 16),
        label="Bins of embeddings",
        unit="centroids",
        layer=LayerType.EMBEDDING,
    ),
)
"""The published search space (Agrawal et al., SoCC 2024, section "Search space"): 6 × 6 × 3 combinations for
each of two pruning metrics, 216 in total. All layers that are not embeddings share one number of bins."""


class PartitionStatistics(NamedTuple):
    """Histograms of one finite tensor: of abs(w), and of abs(g·w) if the gradient is known."""

    magnitude: KeyCounts
    sensitivity: KeyCounts | None


Plan: TypeAlias = "Mapping[str, Thresholds]"
"""Thresholds by layer type; types without finite values are absent and have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InshrinkeratorCodec(FallbackCodec[Plan]):
    """Weights of two or more dimensions as symbols; all other tensors exact.

    All settings may change from frame to frame.

    Parameters
    ----------
    bins
        Number of centroids of tensors that are not embeddings, 2..254; it need not be a power of two. Fewer
        make smaller frames and larger errors.
    embedding_bins
        Number of centroids of embeddings, 2..254.
    prune
        Fraction of each layer type to set to zero, 0..0.95; embeddings excepted.
    embedding_prune
        Fraction of the embeddings to set to zero, 0..0.95.
    prune_metric
        ``magnitude``: prune the smallest abs(w). ``sensitivity``: prune the smallest abs(g·w); a tensor
        without a known gradient is pruned by magnitude.
    protect
        Fraction to store in bfloat16 (float16 tensors: exactly), 0..0.5, applied to the largest magnitudes
        and to the largest sensitivities: up to twice the fraction in total. Costs up to 16 bits an element.
    fit
        ``exact``: codebook with the least squared error. ``published``: sketch and weighted k-means.
    codebook
        ``refit``: fit a new codebook in every frame, as published. ``held``: reuse the reference's codebook
        while its squared error is within `hold_factor` of a new one's. Symbols then change only where
        weights move, and the codebook takes no bytes.

    Raises
    ------
    ConfigError
        A value is out of range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec = InshrinkeratorCodec(bins=4, protect=0.0)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None)])
    >>> block, reference = codec.encode(item, plan, None)
    >>> codec.decode(spec, block, None).decoded().unique()
    tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """

    name = "inshrinkerator"
    bitstream = "inshrinkerator/1"
    words: ClassVar = {
        "prune_metric": _METRICS,
        "fit": ("exact", "published"),
        "codebook": ("held", "refit"),
    }
    ranges: ClassVar = {
        "bins": _BINS,
        "embedding_bins": _BINS,
        "prune": _PRUNED,
        "embedding_prune": _PRUNED,
        "protect": (0.0, 0.5),  # applied by magnitude and by sensitivity: up to twice that in total
    }
    constants: ClassVar = {
        **{"pool": "layer_type", "sigma": 0.2, "alpha": 0.01, "seed": 0, "hold_factor": _HOLD_FACTOR},
        **{"centroids": "bfloat16", "entropy": "huffman", "vectors": "exact", "buffers": "exact"},
    }
    vectors: ClassVar = "exact"
    label = "Inshrinkerator"
    tuning = Tuning(
        tunable=Tunable(
            settings=("bins", "embedding_bins"),
            values=(254, 128, 64, 48, 32, 24, 16, 12, 8, 6, 4),
            label="Bins",
            unit="centroids",
        ),
        axes=_SEARCHED,
        switch=Switch("prune_metric", _METRICS, idle_at=1),
    )
    compared = (("Inshrinkerator", {}),)

    bins: int = 32
    embedding_bins: int = 32
    prune: float = 0.0
    embedding_prune: float = 0.0
    prune_metric: str = "magnitude"
    protect: float = 0.01
    fit: str = "exact"
    codebook: str = "held"

    def observe(self, item: TensorInput, reference: TensorReference | None) -> PartitionStatistics | None:
        """Return histograms of abs(w) and abs(g·w) over integer keys; None if no threshold needs them."""
        if not (max(self.prune, self.embedding_prune, self.protect) > 0 and self.covers(item.spec)):
            return None
        dense = histogram16(item.tensor).numpy()
        if not _is_finite(dense):
            return None
        gradient = self._gradient(item)
        sensitivity = None if gradient is None else sensitivity_histogram(item.tensor, gradient).numpy()
        return PartitionStatistics(
            KeyCounts.from_dense(dense.reshape(2, MAGNITUDE_KEYS).sum(0)),
            None if sensitivity is None else KeyCounts.from_dense(sensitivity),
        )

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> Plan:
        """Return thresholds for each layer type, pooled over its tensors in their order."""
        groups: dict[str, list[tuple[TensorSpec, PartitionStatistics]]] = {}
        for spec, observation in zip(specs, statistics, strict=True):
            if observation is not None:
                groups.setdefault(_group(spec), []).append((spec, observation))
        cuts: dict[str, Thresholds] = {}
        for group, members in groups.items():
            cuts[group] = thresholds(
                merge(seen.magnitude for _, seen in members),
                merge(seen.sensitivity for _, seen in members if seen.sensitivity is not None),
                prune=self.embedding_prune if members[0][0].layer is LayerType.EMBEDDING else self.prune,
                protect=self.protect,
                by_sensitivity=self.prune_metric == "sensitivity",
            )
        return cuts

    def encode_lossy(
        self, item: TensorInput, plan: Plan, reference: TensorReference | None
    ) -> Encoded | None:
        """Partition, fit and assign; None if the tensor has infinities or NaN."""
        spec, previous = item.spec, state_as(InshrinkeratorReference, reference, item.spec)
        cut, gradient = plan.get(_group(spec), Thresholds()), self._gradient(item)
        by_sensitivity = gradient is not None and self.prune_metric == "sensitivity"
        prune_below = 0 if by_sensitivity else cut.prune_magnitude
        bounds = (cut.prune_sensitivity if by_sensitivity else 0, cut.protect_sensitivity)
        dense = histogram16(item.tensor).numpy()
        if not _is_finite(dense):
            return None
        if gradient is not None and bounds != (0, NO_UPPER):
            dense = histogram16(item.tensor, gradient, *bounds).numpy()
        else:
            gradient = None
        halves = dense.reshape(2, MAGNITUDE_KEYS)
        halves[:, :prune_below] = 0
        halves[:, cut.protect_magnitude :] = 0
        histogram = key_histogram(dense, spec.dtype)
        k = self.embedding_bins if spec.layer is LayerType.EMBEDDING else self.bins
        fitted = fit_published(histogram, k) if self.fit == "published" else fit_exact(histogram, k)
        codebook = round_centroids(fitted, spec.dtype)
        if self.codebook == "held" and previous is not None and previous.codebook.numel() <= k:
            before = previous.codebook.numpy()
            if squared_error(histogram, before) <= _HOLD_FACTOR * squared_error(histogram, codebook):
                codebook = before.copy()
        table = assignment_table(
            codebook,
            spec.dtype,
            first_symbol=FIRST_BIN,
            prune_below=prune_below,
            protect_from=cut.protect_magnitude,
        )
        symbols = assign(item.tensor, torch.from_numpy(table), gradient, *bounds)
        state = InshrinkeratorReference(
            dtype=spec.dtype,
            shape=spec.shape,
            symbols=symbols,
            codebook=torch.from_numpy(codebook),
            protected=round_to_bfloat16(gather_protected(item.tensor, symbols)),
        )
        return Encoded(Block(self.bitstream, pack_quantized(spec, state, previous)), state)

    def _gradient(self, item: TensorInput) -> Tensor | None:
        """Return the gradient; None if it has no effect, or its shape or dtype does not fit the tensor."""
        prunes = max(self.prune, self.embedding_prune) > 0 and self.prune_metric == "sensitivity"
        if not prunes and not self.protect > 0:
            return None
        gradient = item.auxiliary(TensorRole.GRADIENT, TensorRole.EXP_AVG)
        fits = gradient is not None and gradient.shape == item.tensor.shape
        return gradient if gradient is not None and fits and gradient.dtype.is_floating_point else None

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> TensorReference:
        """Return the state after a payload."""
        if len(spec.shape) < 2:
            raise DamagedError(f"a tensor of this kind has no {self.name} blocks")
        return parse_quantized(spec, payload, state_as(InshrinkeratorReference, reference, spec), device)

    def rekey(self, spec: TensorSpec, reference: TensorReference, *, unchanged: bool = False) -> Block:
        """Return a standalone block, or a delta of zeros that reuses the codebook."""
        state = state_as(InshrinkeratorReference, reference, spec)
        if state is None:
            return FallbackCodec.rekey(self, spec, reference, unchanged=unchanged)
        return Block(self.bitstream, pack_quantized(spec, state, state if unchanged else None))


def _group(spec: TensorSpec) -> str:
    """Return the name of the group that shares thresholds with a tensor."""
    return spec.key if spec.layer is None else spec.layer.value


def _is_finite(dense: NDArray[np.int64]) -> bool:
    """Return whether the counts contain only keys of finite values."""
    return not dense.reshape(2, MAGNITUDE_KEYS)[:, INFINITE_KEY:].any()
