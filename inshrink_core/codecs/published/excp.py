"""The ExCP codec: residuals pruned jointly with Adam's moments, 15 centroids, LZMA.

Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking" (ICML 2024),
sections "Residual checkpoint", "Joint weight-momentum pruning" and "Non-uniform quantization":

- the residual of a weight is taken against the last reconstructed weight and kept where it is larger than
  ``min(2.5, alpha / sqrt(mean(exp_avg_sq)))`` times the median of its magnitudes;
- both moments are kept where the residual is kept and ``abs(exp_avg) > beta * mean(abs(exp_avg))``; they are
  not differenced;
- what is kept goes to the nearest of ``2**bits - 1`` centroids, per tensor; two 4-bit symbols a byte; LZMA.

Notes
-----
Paper and released code differ: the default follows the code (one factor a tensor, capped at 2.5, and the
median of the residual); ``indicator="element"`` takes the paper's ``alpha / sqrt(exp_avg_sq)`` for each
element, with the code's cap and median. Assumed where both leave it open: centroids are the exact optimum of
one-dimensional k-means (the code samples and iterates, which errs more); the codebook has float16 as in the
code, but float32 where float16 would move a centroid by more than a part in 32 (second moments underflow);
LZMA runs tensor by tensor, so that one tensor decodes alone (7-zip saw all of them at once); a weight
without second moment takes the cap as its factor; moments whose weight has no residual are pruned by
`beta` alone; the first checkpoint is exact, moments included; buffers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from inshrink_core.checkpoint import MODEL_ROLES, TensorRole, TensorSpec
from inshrink_core.codec import CodecConfig, FrameContext, Knob, TensorInput, TensorReference, Tuning
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.published.fallback import (
    FLAT_CODERS,
    check_number,
    check_word,
    host_values,
    ordered_mean,
)
from inshrink_core.codecs.published.residual import (
    KEYFRAME_WORDS,
    MAX_CENTROIDS,
    Quantized,
    ResidualCodec,
    fit_nearest,
    residual_of,
)
from inshrink_core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ExcpCodec", "ExcpConfig", "ExcpPlan", "kept_moments", "kept_residuals"]

_INDICATORS = ("tensor", "element")
_FILLS = ("zero", "mean")
_VECTORS = ("quantized", "exact")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcpConfig(CodecConfig):
    """Settings of the ExCP codec.

    Parameters
    ----------
    alpha
        Weight pruning: a larger one prunes more residuals, 0..1. It has the unit of a gradient.
    beta
        Moment pruning: multiples of the mean magnitude of the first moment, 0..100.
    bits
        Width of a symbol, 1..8: ``2**bits - 1`` centroids.
    indicator
        ``tensor``: one threshold a tensor, as in the released code. ``element``: one a value, as in the
        paper.
    pruned_second_moment
        What pruned second moments become: ``zero``, as published, which makes the first updates after
        a restore as large as the learning rate allows, or the ``mean`` of those pruned (4 bytes a tensor).
    moments
        ``quantized``, as published; ``exact`` leaves them to what stores the rest of the optimizer.
    coder
        ``lzma``, as published; ``rans``, ``huffman`` or ``zstd`` on the same symbols.
    keyframe
        ``exact``, as published, or ``quantized`` to 255 centroids.
    vectors
        Tensors of at most one dimension: ``quantized`` like all others, or ``exact``.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.
    """

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4
    indicator: str = "tensor"
    pruned_second_moment: str = "zero"
    moments: str = "quantized"
    coder: str = "lzma"
    keyframe: str = "exact"
    vectors: str = "quantized"

    def __post_init__(self) -> None:
        self._check(coders=tuple(FLAT_CODERS))

    def _check(self, *, coders: Sequence[str]) -> None:
        check_number("alpha", self.alpha, 0.0, 1.0)
        check_number("beta", self.beta, 0.0, 100.0)
        check_number("bits", self.bits, 1, 8, whole=True)
        check_word("indicator", self.indicator, _INDICATORS)
        check_word("pruned_second_moment", self.pruned_second_moment, _FILLS)
        check_word("moments", self.moments, ("quantized", "exact"))
        check_word("coder", self.coder, coders)
        check_word("keyframe", self.keyframe, KEYFRAME_WORDS)
        check_word("vectors", self.vectors, _VECTORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcpPlan:
    """What one frame decides: for each parameter, which elements of its moments are kept.

    Parameters
    ----------
    config
        The request it was made from.
    kept
        By parameter name, one bit an element (`numpy.packbits`); an eighth of a byte a parameter, while the
        frame is encoded. Parameters without moments in the frame are absent.
    """

    config: ExcpConfig
    kept: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


_FACTOR_CAP = 2.5
"""Largest share of the median a residual may have to exceed; in the released code, not in the paper."""

_HALF_TOLERANCE = 1 / 32
"""A quarter of the distance of neighbours among 15 centroids of a normal distribution, about."""

_LARGEST = float(np.finfo(np.float32).max)

_MOMENTS = frozenset({TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ})


class _Mask(NamedTuple):
    """What `observe` found of one tensor: packed bits."""

    bits: NDArray[np.uint8]


def kept_residuals(
    residual: NDArray[np.float32], second_moment: NDArray[np.float32] | None, config: ExcpConfig
) -> NDArray[np.bool_]:
    """Return which residuals of a weight survive.

    Parameters
    ----------
    residual, second_moment
        Float32[n], finite; the second moment may be unknown.
    config
        `alpha` and `indicator`.

    Examples
    --------
    >>> second = np.full(4, 1e-8, np.float32)
    >>> residual = np.array([1.0, -2.0, 3.0, 0.5], np.float32)  # factor .5, median 1
    >>> kept_residuals(residual, second, ExcpConfig()).tolist()
    [True, True, True, False]
    """
    magnitudes = np.abs(residual)
    middle = (residual.size - 1) // 2  # the lower of two middles, as torch.median takes
    median = float(np.partition(magnitudes, middle)[middle])
    if second_moment is None:
        # Residuals are finite: a bound that float32 does not hold is one that none exceeds.
        return magnitudes > np.float32(min(_FACTOR_CAP * median, float(np.finfo(np.float32).max)))
    if config.indicator == "element":
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = config.alpha / np.sqrt(second_moment.astype(np.float64))
        factors = np.where(factors < _FACTOR_CAP, factors, _FACTOR_CAP)
        kept: NDArray[np.bool_] = magnitudes > factors * median
        return kept
    mean = ordered_mean(second_moment)
    factor = config.alpha / math.sqrt(mean) if mean > 0 else _FACTOR_CAP
    return magnitudes > np.float32(min(factor, _FACTOR_CAP) * median)


def kept_moments(first_moment: NDArray[np.float32], config: ExcpConfig) -> NDArray[np.bool_]:
    """Return where a first moment is large enough; float32[n], finite."""
    magnitudes = np.abs(first_moment)
    return magnitudes > np.float32(min(config.beta * ordered_mean(magnitudes), _LARGEST))


class ExcpCodec(ResidualCodec):
    """Weights as pruned residuals, and both moments where they survive; everything else exact.

    Examples
    --------
    >>> import torch
    >>> codec, config = ExcpCodec(), ExcpConfig()
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(2, 50))
    >>> weight, moved = torch.zeros(2, 50), torch.linspace(-1, 1, 100).view(2, 50)
    >>> plan = codec.plan([spec], [None], config)
    >>> first = codec.encode(TensorInput(spec=spec, tensor=weight), plan, None)
    >>> second = codec.encode(TensorInput(spec=spec, tensor=moved), plan, first.reference)
    >>> int((codec.decode(spec, second.block, first.reference).tensor != 0).sum())
    0
    """

    name = "excp"
    bitstream = "excp/1"
    reads = frozenset({"excp/1", EXACT})
    config_type: ClassVar[type[CodecConfig]] = ExcpConfig
    label = "ExCP"
    tuning = Tuning(
        knob=Knob(
            # From the published 5e-5 in steps of about √10 to where everything but the largest is pruned.
            settings=("alpha",),
            values=(5e-5, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
            label="Pruning of residuals",
            unit="alpha",
        ),
        # The published exact keyframe would be most of a short chain, whatever the deltas cost.
        beside={"keyframe": "quantized"},
    )
    compared = (("ExCP", {}),)
    lossy_roles = frozenset({TensorRole.WEIGHT}) | _MOMENTS

    def takes(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the roles of the model, and of both moments unless the config leaves them out."""
        return MODEL_ROLES | _MOMENTS if self.checked(config).moments == "quantized" else MODEL_ROLES

    def companions(self, config: CodecConfig) -> frozenset[TensorRole]:
        """Return the second moment's role: it decides which residuals are kept."""
        return frozenset({TensorRole.EXP_AVG_SQ})

    def covers(self, spec: TensorSpec, config: CodecConfig) -> bool:
        """Whether the lossy rule applies to a tensor."""
        return super().covers(spec, config) and (spec.role not in _MOMENTS or spec.role in self.takes(config))

    def observe(self, item: TensorInput, reference: TensorReference | None, config: CodecConfig) -> Any:
        """Return where a residual, or a first moment, survives; None for tensors that prune no other."""
        asked: ExcpConfig = self.checked(config)
        if not self.covers(item.spec, asked) or asked.moments == "exact":
            return None
        if item.spec.role is TensorRole.EXP_AVG:
            values = host_values(item.tensor)
            return _Mask(np.packbits(kept_moments(values, asked))) if np.isfinite(values).all() else None
        if item.spec.role is not TensorRole.WEIGHT:
            return None
        residual = residual_of(item.tensor, item.spec, reference)
        if residual is None:
            return None
        return _Mask(np.packbits(kept_residuals(residual, _second_moment(item), asked)))

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> ExcpPlan:
        """Return which elements of each pair of moments are kept: where weight and first moment say so."""
        asked: ExcpConfig = self.checked(config)
        with_moments = {spec.name for spec in specs if spec.role in _MOMENTS}
        kept: dict[str, NDArray[np.uint8]] = {}
        for spec, seen in zip(specs, statistics, strict=True):
            if isinstance(seen, _Mask) and spec.name in with_moments:
                before = kept.get(spec.name)
                fits = before is not None and before.size == seen.bits.size
                kept[spec.name] = before & seen.bits if before is not None and fits else seen.bits
        return ExcpPlan(config=asked, kept=kept)

    def _config_of(self, plan: Any) -> ExcpConfig:
        if not isinstance(plan, ExcpPlan) or not isinstance(plan.config, self.config_type):
            raise ConfigError(f"this plan is not one of the codec '{self.name}'")
        return plan.config

    def _is_delta(self, spec: TensorSpec) -> bool:
        return spec.role is TensorRole.WEIGHT

    def _quantize(
        self, item: TensorInput, values: NDArray[np.float32], plan: Any, *, delta: bool
    ) -> Quantized:
        config = self._config_of(plan)
        n_centroids = (1 << config.bits) - 1
        if item.spec.role in _MOMENTS:
            kept = _unpacked(plan.kept.get(item.spec.name), values.size)
            fill = _fill(item.spec, values, kept, config)
            return fit_nearest(values, kept, n_centroids, _HALF_TOLERANCE, fill)
        if not delta:
            return fit_nearest(values, values != 0, MAX_CENTROIDS, tolerance=0.0)
        kept = kept_residuals(values, _second_moment(item), config)
        return fit_nearest(values, kept, n_centroids, _HALF_TOLERANCE)


def _second_moment(item: TensorInput) -> NDArray[np.float32] | None:
    """Return the second moment where it can be this weight's."""
    second = item.second_moment
    if second is None or second.shape != item.tensor.shape or not second.dtype.is_floating_point:
        return None
    values = host_values(second)
    return values if np.isfinite(values).all() and float(values.min()) >= 0 else None


def _unpacked(bits: NDArray[np.uint8] | None, n: int) -> NDArray[np.bool_]:
    """Return a mask of `n` elements; everything is kept where none was made."""
    if bits is None or bits.size != (n + 7) // 8:
        return np.ones(n, np.bool_)
    return np.unpackbits(bits, count=n).astype(np.bool_)


def _fill(
    spec: TensorSpec, values: NDArray[np.float32], kept: NDArray[np.bool_], config: ExcpConfig
) -> float:
    """Return what pruned values of a tensor become."""
    if spec.role is not TensorRole.EXP_AVG_SQ or config.pruned_second_moment == "zero" or kept.all():
        return 0.0
    return float(np.float32(ordered_mean(values[~kept])))
