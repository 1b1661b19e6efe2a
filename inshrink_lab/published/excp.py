"""The ExCP codec: residuals pruned jointly with Adam's moments, 15 centroids, LZMA.

Li et al., "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking" (ICML 2024),
sections "Residual checkpoint", "Joint weight-momentum pruning" and "Non-uniform quantization":

- the residual of a weight is relative to the last reconstructed weight, and survives if its magnitude exceeds
  ``min(2.5, alpha / sqrt(mean(exp_avg_sq)))`` times the median magnitude;
- both moments survive if the residual survives and ``abs(exp_avg) > beta * mean(abs(exp_avg))``; moments are
  stored without a difference;
- surviving values go to the nearest of ``2**bits - 1`` centroids per tensor; two 4-bit symbols per byte;
  LZMA.

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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from inshrink_core.checkpoint import MODEL_ROLES, TensorRole, TensorSpec
from inshrink_core.codec import FrameContext, TensorInput, TensorReference, Tunable, Tuning
from inshrink_core.codecs.fallback import host_values
from inshrink_core.quantization.codebook import ordered_mean
from inshrink_lab.published.flat import Floats, Mask, Symbols
from inshrink_lab.published.residual import (
    MAX_CENTROIDS,
    Quantized,
    ResidualCodec,
    decoded_before,
    fit_nearest,
    residual_of,
)

__all__ = ["ExcpCodec", "KeptMoments", "surviving_moments", "surviving_residuals"]

_FACTOR_CAP = 2.5
"""Maximum multiple of the median that a residual must exceed; in the released code, not in the paper."""

_HALF_TOLERANCE = 1 / 32
"""About a quarter of the distance between neighbours among 15 centroids of a normal distribution."""

_LARGEST = float(np.finfo(np.float32).max)

_MOMENTS = frozenset({TensorRole.EXP_AVG, TensorRole.EXP_AVG_SQ})

KeptMoments = Mapping[str, Symbols]
"""Plan of a frame: by parameter name, a mask of the surviving moment elements, one bit each
(`numpy.packbits`). Parameters without moments in the frame are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcpCodec(ResidualCodec[KeptMoments]):
    """Weights as pruned residuals, and both moments where they survive; everything else exact.

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

    Examples
    --------
    >>> import torch
    >>> codec = ExcpCodec()
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(2, 50))
    >>> weight, moved = torch.zeros(2, 50), torch.linspace(-1, 1, 100).view(2, 50)
    >>> plan = codec.plan([spec], [None])
    >>> first = codec.encode(TensorInput(spec=spec, tensor=weight), plan, None)
    >>> second = codec.encode(TensorInput(spec=spec, tensor=moved), plan, first.reference)
    >>> int((codec.decode(spec, second.block, first.reference).decoded() != 0).sum())
    0
    """

    name = "excp"
    bitstream = "excp/1"
    lossy_roles = frozenset({TensorRole.WEIGHT}) | _MOMENTS
    ranges: ClassVar = {"alpha": (0.0, 1.0), "beta": (0.0, 100.0), "bits": (1, 8)}
    words: ClassVar = {
        "indicator": ("tensor", "element"),
        "pruned_second_moment": ("zero", "mean"),
        "moments": ("quantized", "exact"),
        **ResidualCodec.words,
    }
    label = "ExCP"
    tuning = Tuning(
        tunable=Tunable(
            # From the published 5e-5 in steps of about √10 up to where only the largest residuals survive.
            settings=("alpha",),
            values=(5e-5, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
            label="Pruning of residuals",
            unit="alpha",
        ),
        # With the published exact keyframe, a short chain would consist mostly of the keyframe.
        beside={"keyframe": "quantized"},
    )
    compared: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = (("ExCP", {}),)

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4
    indicator: str = "tensor"
    pruned_second_moment: str = "zero"
    moments: str = "quantized"
    coder: str = "lzma"
    keyframe: str = "exact"
    vectors: str = "quantized"

    def takes(self) -> frozenset[TensorRole]:
        """Return the roles of the model, and of both moments unless the settings leave them out."""
        return MODEL_ROLES | _MOMENTS if self.moments == "quantized" else MODEL_ROLES

    def covers(self, spec: TensorSpec) -> bool:
        """Return whether the lossy rule applies to a tensor."""
        return spec.role in self.takes() and ResidualCodec.covers(self, spec)

    def observe(self, item: TensorInput, reference: TensorReference | None) -> Symbols | None:
        """Return the mask of surviving residuals or first moments; None for tensors that prune no others."""
        if not self.covers(item.spec) or self.moments == "exact":
            return None
        if item.spec.role is TensorRole.EXP_AVG:
            values = host_values(item.tensor)
            return np.packbits(surviving_moments(values, self)) if np.isfinite(values).all() else None
        if item.spec.role is not TensorRole.WEIGHT:
            return None
        previous = decoded_before(reference, item.spec)
        if previous is None or (residual := residual_of(item.tensor, previous)) is None:
            return None
        return np.packbits(surviving_residuals(residual, _second_moment(item), self))

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> KeptMoments:
        """Return the surviving elements of each pair of moments: weight and first moment both survive."""
        with_moments = {spec.name for spec in specs if spec.role in _MOMENTS}
        survives: dict[str, Symbols] = {}
        for spec, seen in zip(specs, statistics, strict=True):
            if seen is not None and spec.name in with_moments:
                before = survives.get(spec.name)
                fits = before is not None and before.size == seen.size
                survives[spec.name] = before & seen if before is not None and fits else seen
        return survives

    def quantize(self, item: TensorInput, values: Floats, plan: KeptMoments, *, delta: bool) -> Quantized:
        """Prune, then fit centroids to the surviving values."""
        n_centroids = (1 << self.bits) - 1
        if item.spec.role in _MOMENTS:
            survives = _unpacked(plan.get(item.spec.name), values.size)
            fill = _fill(item.spec, values, survives, self)
            return fit_nearest(values, survives, n_centroids, _HALF_TOLERANCE, fill)
        if not delta:
            return fit_nearest(values, values != 0, MAX_CENTROIDS, tolerance=0.0)
        survives = surviving_residuals(values, _second_moment(item), self)
        return fit_nearest(values, survives, n_centroids, _HALF_TOLERANCE)


def surviving_residuals(residual: Floats, second_moment: Floats | None, codec: ExcpCodec) -> Mask:
    """Return the mask of a weight's surviving residuals.

    Parameters
    ----------
    residual, second_moment
        Float32[n], finite; the second moment may be unknown.
    codec
        `alpha` and `indicator` of it.

    Examples
    --------
    >>> second = np.full(4, 1e-8, np.float32)
    >>> residual = np.array([1.0, -2.0, 3.0, 0.5], np.float32)  # factor .5, median 1
    >>> surviving_residuals(residual, second, ExcpCodec()).tolist()
    [True, True, True, False]
    """
    magnitudes = np.abs(residual)
    middle = (residual.size - 1) // 2  # the lower of two middles, as torch.median takes
    median = float(np.partition(magnitudes, middle)[middle])
    if second_moment is None:
        # Residuals are finite, so none exceeds a bound beyond the float32 range.
        return magnitudes > np.float32(min(_FACTOR_CAP * median, _LARGEST))
    if codec.indicator == "element":
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = codec.alpha / np.sqrt(second_moment.astype(np.float64))
        factors = np.where(factors < _FACTOR_CAP, factors, _FACTOR_CAP)
        survives: Mask = magnitudes > factors * median
        return survives
    mean = ordered_mean(second_moment)
    factor = codec.alpha / math.sqrt(mean) if mean > 0 else _FACTOR_CAP
    return magnitudes > np.float32(min(factor, _FACTOR_CAP) * median)


def surviving_moments(first_moment: Floats, codec: ExcpCodec) -> Mask:
    """Return the mask of first moments that are large enough; float32[n], finite."""
    magnitudes = np.abs(first_moment)
    return magnitudes > np.float32(min(codec.beta * ordered_mean(magnitudes), _LARGEST))


def _second_moment(item: TensorInput) -> Floats | None:
    """Return the second moment if it can belong to this weight."""
    second = item.auxiliary(TensorRole.EXP_AVG_SQ)
    if second is None or second.shape != item.tensor.shape or not second.dtype.is_floating_point:
        return None
    values = host_values(second)
    return values if np.isfinite(values).all() and float(values.min()) >= 0 else None


def _unpacked(bits: Symbols | None, n: int) -> Mask:
    """Return a mask of `n` elements; without bits all elements survive."""
    if bits is None or bits.size != (n + 7) // 8:
        return np.ones(n, np.bool_)
    return np.unpackbits(bits, count=n).astype(np.bool_)


def _fill(spec: TensorSpec, values: Floats, survives: Mask, codec: ExcpCodec) -> float:
    """Return the value of a tensor's pruned elements."""
    if spec.role is not TensorRole.EXP_AVG_SQ or codec.pruned_second_moment == "zero" or survives.all():
        return 0.0
    return float(np.float32(ordered_mean(values[~survives])))
