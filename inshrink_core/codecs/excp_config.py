"""What a user asks of the ExCP codec, and what one frame decided from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inshrink_core.codec import CodecConfig
from inshrink_core.codecs.fallback import check_number, check_word
from inshrink_core.codecs.flat_symbols import FLAT_CODERS
from inshrink_core.codecs.residual import KEYFRAME_WORDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ExcpConfig", "ExcpPlan"]

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
