"""What a user asks of the Inshrinkerator codec, and what one frame decided from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inshrink_core.checkpoint import LayerType, TensorRole, TensorSpec
from inshrink_core.codec import CodecConfig
from inshrink_core.errors import ConfigError
from inshrink_core.partition import Thresholds

__all__ = ["InshrinkeratorConfig", "InshrinkeratorPlan", "has_symbols", "is_quantized"]

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
