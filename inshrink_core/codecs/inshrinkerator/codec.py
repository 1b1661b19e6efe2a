"""The Inshrinkerator codec: non-uniform quantization with pruning, protection and a delta of symbols.

Agrawal et al., "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic
Quantization" (SoCC'24). What the paper leaves open is decided in `InshrinkeratorConfig`; the default
codebook fit is the exact one of `inshrink_core.quantization`, the paper's own is ``fit="published"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from inshrink_core.checkpoint import LayerType, TensorRole, TensorSpec
from inshrink_core.codec import (
    Codec,
    CodecConfig,
    Decoded,
    Encoded,
    FrameContext,
    Knob,
    Switch,
    TensorInput,
    TensorReference,
    Tuning,
    within_memory,
)
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.exact import decode_exact, encode_exact, worst_case_exact_bytes
from inshrink_core.codecs.inshrinkerator.block import (
    ROUNDED,
    InshrinkeratorReference,
    RoundedReference,
    fits,
    pack_quantized,
    pack_rounded,
    parse_quantized,
    parse_rounded,
    worst_case_payload_bytes,
)
from inshrink_core.codecs.inshrinkerator.quantizer import Observation, is_finite, known_gradient, quantize
from inshrink_core.errors import ConfigError, DamagedError, IncompatibleError
from inshrink_core.frame import Block
from inshrink_core.ops.quantize import MAGNITUDE_KEYS, histogram16, sensitivity_histogram
from inshrink_core.quantization.partition import KeyCounts, Thresholds, merge, thresholds

__all__ = [
    "InshrinkeratorCodec",
    "InshrinkeratorConfig",
    "InshrinkeratorPlan",
    "InshrinkeratorReference",
    "has_symbols",
    "is_quantized",
]

MIN_BINS, MAX_BINS = 2, 254
"""Bounds of a number of bins: with the symbols of pruned and protected they fill a byte."""

_MAX_PRUNE = 0.95
"""More leaves no model to speak of."""

_MAX_PROTECT = 0.5
"""Protection by magnitude or sensitivity may take twice its fraction."""

_QUANTIZED_DTYPES = frozenset({"float32", "bfloat16", "float16"})

_WORDS = {
    "prune_metric": ("magnitude", "sensitivity"),
    "pool": ("layer_type", "tensor"),
    "fit": ("exact", "published"),
    "codebook": ("held", "refit"),
    "centroids": ("bfloat16", "stored"),
    "entropy": ("huffman", "rans"),
    "vectors": ("exact", "bfloat16"),
    "buffers": ("exact", "bfloat16"),
}
"""The words a field takes."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "bins": (MIN_BINS, MAX_BINS),
    "embedding_bins": (MIN_BINS, MAX_BINS),
    "prune": (0.0, _MAX_PRUNE),
    "embedding_prune": (0.0, _MAX_PRUNE),
    "protect": (0.0, _MAX_PROTECT),
    "sigma": (0.0, 1.0),
    "alpha": (1e-4, 0.5),
    "hold_factor": (1.0, 100.0),
    "seed": (0, 2**63 - 1),
}
"""The closed range of a number."""

_WHOLE = frozenset({"bins", "embedding_bins", "seed"})


@dataclass(frozen=True, kw_only=True, slots=True)
class InshrinkeratorConfig(CodecConfig):
    """Settings of the Inshrinkerator codec; every one may change from frame to frame.

    Parameters
    ----------
    bins
        Centroids of a tensor that is not an embedding, 2..254, powers of two or not. Fewer make smaller
        frames and larger errors.
    embedding_bins
        Centroids of an embedding, 2..254.
    prune
        Fraction of each layer type set to zero, 0..0.95; embeddings apart.
    embedding_prune
        Fraction of the embeddings set to zero, 0..0.95.
    prune_metric
        ``magnitude``: prune the smallest abs(w). ``sensitivity``: the smallest abs(g·w); a tensor whose
        gradient is not known is pruned by magnitude.
    protect
        Fraction kept in bfloat16 (float16 tensors: as they are), 0..0.5, for being largest in magnitude
        or largest in sensitivity: up to twice the fraction in all. Costs up to 16 bits each.
    pool
        ``layer_type``: thresholds are quantiles over all tensors of a layer type. ``tensor``: over each.
    fit
        ``exact``: codebook of least squared error. ``published``: sketch and weighted k-means.
    sigma
        Share of frequency in the published fit's weights, 0..1.
    alpha
        Relative error of the published fit's sketch, 0.0001..0.5.
    codebook
        ``refit``: a new codebook every frame, as published. ``held``: keep the reference's codebook while
        its squared error is within `hold_factor` of a new one's, so that symbols change only where
        weights moved, and the codebook costs nothing.
    hold_factor
        At least 1; 1.1 holds a codebook until a new one would have 9 % less squared error.
    centroids
        ``bfloat16``: centroids take two bytes, at an error of 2^-9 of their value. ``stored``: they have
        the precision of the tensor's dtype.
    entropy
        ``huffman``: run lengths and Huffman codes, as published. ``rans``: context rANS of the same deltas,
        smaller.
    vectors
        Weights of at most one dimension (biases, norms): ``exact`` or rounded to ``bfloat16``.
    buffers
        The same for buffers.
    seed
        Of the published fit, 0..2^63 - 1.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> InshrinkeratorConfig(bins=12, prune=0.1).bins
    12
    """

    bins: int = 32
    embedding_bins: int = 32
    prune: float = 0.0
    embedding_prune: float = 0.0
    prune_metric: str = "magnitude"
    protect: float = 0.01
    pool: str = "layer_type"
    fit: str = "exact"
    sigma: float = 0.2
    alpha: float = 0.01
    codebook: str = "held"
    hold_factor: float = 1.1
    centroids: str = "bfloat16"
    entropy: str = "huffman"
    vectors: str = "exact"
    buffers: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ConfigError(
                    f"'{name}' takes one of a few words",
                    expected=" or ".join(words),
                    found=_shown(self, name),
                )
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high)

    def bins_of(self, spec: TensorSpec) -> int:
        """Return the number of centroids a tensor may have."""
        return self.embedding_bins if spec.layer is LayerType.EMBEDDING else self.bins

    def prune_of(self, spec: TensorSpec) -> float:
        """Return the fraction of a tensor's group that is pruned."""
        return self.embedding_prune if spec.layer is LayerType.EMBEDDING else self.prune

    def group_of(self, spec: TensorSpec) -> str:
        """Return the name of the group whose thresholds a tensor shares."""
        return spec.key if self.pool == "tensor" or spec.layer is None else spec.layer.value

    @property
    def wants_gradients(self) -> bool:
        """Whether sensitivity decides anything."""
        prunes = max(self.prune, self.embedding_prune) > 0 and self.prune_metric == "sensitivity"
        return self.protect > 0 or prunes

    @property
    def partitions(self) -> bool:
        """Whether any parameter may be pruned or protected, so that thresholds are needed."""
        return max(self.prune, self.embedding_prune, self.protect) > 0


def _shown(config: InshrinkeratorConfig, name: str) -> str:
    return repr(getattr(config, name))


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number, a bool among them, and NaN, which no comparison catches from outside."""
    whole = name in _WHOLE
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(
            f"'{name}' is out of range", expected=f"{kind} {low:g}..{high:g}", found=repr(value)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InshrinkeratorPlan:
    """What one frame decides for all its tensors together.

    Parameters
    ----------
    config
        The request it was made from.
    thresholds
        Where each group is cut, by `InshrinkeratorConfig.group_of`; groups without finite values of
        theirs are absent and are not cut.
    without_gradient
        Keys of the quantized tensors that were partitioned by magnitude alone although the config asks
        for sensitivity, because their gradient is not known; sorted.
    """

    config: InshrinkeratorConfig
    thresholds: Mapping[str, Thresholds]
    without_gradient: tuple[str, ...] = ()

    def thresholds_of(self, spec: TensorSpec) -> Thresholds:
        """Return where a tensor is cut."""
        return self.thresholds.get(self.config.group_of(spec), Thresholds())


def has_symbols(spec: TensorSpec) -> bool:
    """Whether a block of symbols can be that of a tensor: two or more dimensions, not empty, a float."""
    return spec.dtype in _QUANTIZED_DTYPES and len(spec.shape) >= 2 and spec.numel > 0


def is_quantized(spec: TensorSpec) -> bool:
    """Whether the codec's lossy rule covers a tensor: weights that can have symbols and may be changed."""
    return spec.role is TensorRole.WEIGHT and has_symbols(spec) and not spec.exact


_SEARCHED = (
    Knob(settings=("bins",), values=(32, 16, 12, 8, 6, 4), label="Bins", unit="centroids"),
    Knob(settings=("prune",), values=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5), label="Pruned share"),
    Knob(settings=("protect",), values=(0.01, 0.005, 0.0005), label="Protected share"),
    Knob(
        # Embeddings mind quantization more, so their bins are apart.
        settings=("embedding_bins",),
        values=(32, 16),
        label="Bins of embeddings",
        unit="centroids",
        layer=LayerType.EMBEDDING,
    ),
)
"""The published space (Agrawal et al., SoCC 2024, section "Search space"): 6 × 6 × 3, twice for the pruning
metric, 216 in all; bins are one number for all layers that are not embeddings."""

_TINY = 64
"""Elements up to which the exact block is tried too: above, symbols and codebook are always smaller."""


class InshrinkeratorCodec(Codec):
    """Weights of two or more dimensions in symbols; everything else exact, or rounded if asked.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec, config = InshrinkeratorCodec(), InshrinkeratorConfig(bins=4, protect=0.0)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(-1, 1, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None, config)], config)
    >>> block, reference = codec.encode(item, plan, None)
    >>> codec.decode(spec, block, None).tensor.unique()
    tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """

    name = "inshrinkerator"
    bitstream = "inshrinkerator/1"
    reads = frozenset({"inshrinkerator/1", EXACT})
    config_type: ClassVar[type[CodecConfig]] = InshrinkeratorConfig
    label = "Inshrinkerator"
    tuning = Tuning(
        knob=Knob(
            settings=("bins", "embedding_bins"),
            values=(254, 128, 64, 48, 32, 24, 16, 12, 8, 6, 4),
            label="Bins",
            unit="centroids",
        ),
        axes=_SEARCHED,
        switch=Switch("prune_metric", _WORDS["prune_metric"], idle_at=1),
    )
    compared = (("Inshrinkerator", {}),)

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the gradient's role where sensitivity decides anything."""
        return frozenset({TensorRole.GRADIENT}) if self.checked(config).wants_gradients else frozenset()

    def observe(
        self, item: TensorInput, reference: TensorReference | None, config: CodecConfig
    ) -> Observation | None:
        """Return histograms of abs(w) and abs(g·w) over integer keys; None if no threshold needs them."""
        asked = self.checked(config)
        if not (asked.partitions and is_quantized(item.spec)):
            return None
        dense = histogram16(item.tensor).numpy()
        if not is_finite(dense):
            return None
        gradient = known_gradient(item) if asked.wants_gradients else None
        sensitivity = None if gradient is None else sensitivity_histogram(item.tensor, gradient).numpy()
        return Observation(
            KeyCounts.from_dense(dense.reshape(2, MAGNITUDE_KEYS).sum(0)),
            None if sensitivity is None else KeyCounts.from_dense(sensitivity),
        )

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> InshrinkeratorPlan:
        """Return thresholds per group, pooled over its tensors in their order."""
        asked = self.checked(config)
        groups: dict[str, list[tuple[TensorSpec, Observation]]] = {}
        for spec, observation in zip(specs, statistics, strict=True):
            if isinstance(observation, Observation):
                groups.setdefault(asked.group_of(spec), []).append((spec, observation))
        cuts: dict[str, Thresholds] = {}
        for group, members in groups.items():
            known = [seen.sensitivity for _, seen in members if seen.sensitivity is not None]
            cuts[group] = thresholds(
                merge(seen.magnitude for _, seen in members),
                merge(known) if known else None,
                prune=asked.prune_of(members[0][0]),
                protect=asked.protect,
                by_sensitivity=asked.prune_metric == "sensitivity",
            )
        blind = [s.key for members in groups.values() for s, seen in members if seen.sensitivity is None]
        return InshrinkeratorPlan(
            config=asked,
            thresholds=cuts,
            without_gradient=tuple(sorted(blind)) if asked.wants_gradients else (),
        )

    def encode(self, item: TensorInput, plan: Any, reference: TensorReference | None) -> Encoded:
        """Encode one tensor; what is not finite or not covered by the config becomes an exact block."""
        if not isinstance(plan, InshrinkeratorPlan):
            raise ConfigError("this plan is not one of the codec 'inshrinkerator'", where=item.spec.key)
        if is_quantized(item.spec):
            item.spec.check(item.tensor)
            return self._encode_quantized(item, plan, reference)
        if _is_rounded(item.spec, plan.config) and bool(torch.isfinite(item.tensor).all()):
            payload, state = pack_rounded(item.spec, item.tensor, reference)
            return Encoded(Block(self.bitstream, payload), state)
        return encode_exact(item.spec, item.tensor, reference)

    def _encode_quantized(
        self, item: TensorInput, plan: InshrinkeratorPlan, reference: TensorReference | None
    ) -> Encoded:
        state = quantize(item, plan, fits(reference, item.spec))
        if state is None:
            return encode_exact(item.spec, item.tensor, reference)
        rans = plan.config.entropy == "rans"
        payload = pack_quantized(item.spec, state, fits(reference, item.spec), rans=rans)
        if item.spec.numel <= _TINY:
            exact = encode_exact(item.spec, item.tensor, reference)
            if len(exact.block.payload) <= len(payload):
                return exact
        return Encoded(Block(self.bitstream, payload), state)

    @within_memory
    def decode(self, spec: TensorSpec, block: Block, reference: TensorReference | None) -> Decoded:
        """Decode one block of the bitstreams in `reads`."""
        payload = memoryview(block.payload)
        if block.codec == EXACT:
            return decode_exact(spec, payload, reference)
        if block.codec not in self.reads:
            raise IncompatibleError(
                "the codec 'inshrinkerator' does not read this bitstream",
                where=spec.key,
                expected=self.bitstream,
                found=block.codec,
            )
        if len(payload) < 2:
            raise DamagedError("the block is cut short")
        state: TensorReference
        if payload[0] & ROUNDED:
            state = parse_rounded(spec, payload, reference)
        elif has_symbols(spec):
            state = parse_quantized(spec, payload, reference)
        else:
            raise DamagedError("a tensor of this kind has no symbols")
        return Decoded(state.decoded(), state)

    def rekey(self, spec: TensorSpec, reference: TensorReference) -> Block:
        """Return a block that stands alone; references of other codecs become exact blocks."""
        state = fits(reference, spec)
        if state is not None:
            return Block(self.bitstream, pack_quantized(spec, state, None))
        if isinstance(reference, RoundedReference):
            return Block(self.bitstream, pack_rounded(spec, reference.decoded(), None)[0])
        return encode_exact(spec, reference.decoded(), None).block

    def worst_case_bytes(self, spec: TensorSpec) -> int:
        """Return a bound on payloads of every kind this codec writes."""
        return max(worst_case_exact_bytes(spec), worst_case_payload_bytes(spec))


def _is_rounded(spec: TensorSpec, config: InshrinkeratorConfig) -> bool:
    """Whether the config lets a tensor outside the quantized ones be kept in bfloat16."""
    if spec.exact or spec.dtype != "float32" or spec.numel == 0:
        return False
    if spec.role is TensorRole.BUFFER:
        return config.buffers == "bfloat16"
    return spec.role is TensorRole.WEIGHT and len(spec.shape) <= 1 and config.vectors == "bfloat16"
