"""The QD codec: quantize each layer over its own range, then take differences, then Huffman.

Jin et al., "QD-Compressor: a Quantization-based Delta Compression Framework for Deep Neural Networks"
(ICCD 2021; extended in IEEE TPDS, 2023): layer-based local-sensitive quantization, a bit width per
layer from a weighted entropy, delta of quantized values, lossless coding. The cyclic difference of bin
numbers and the Huffman coder are as Agrawal et al. (Inshrinkerator, SoCC 2024, "Evaluation") describe it.

Notes
-----
Only the abstracts and that description were available, so these points are assumptions. The layer of the
largest weighted entropy has 8 bits. The weighted entropy of a layer is that of its symbols, or of their
difference once a reference exists. The weight of a symbol is the mean square of its values relative to the
layer's mean square. A layer gets one bit less for each halving of its entropy against the largest, at most
`spread` less. It keeps its width along a chain, because the difference of numbers of two widths is noise. The
grid follows the layer's range in every frame. The papers' error feedback corrects the training and is not
part of the coding, so it is omitted. Tensors other than weights are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from inshrink_core.codec import FrameContext, TensorInput, TensorReference
from inshrink_core.codecs.fallback import host_values
from inshrink_lab.published.flat import BITS
from inshrink_lab.published.grid import MAX_BITS, Grid, GridCodec, GridReference, level_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inshrink_core.checkpoint import TensorSpec

__all__ = ["QdCodec", "weighted_entropy"]


def weighted_entropy(symbols: NDArray[np.uint8], importance: NDArray[np.float64]) -> float:
    """Return the entropy of symbols, each weighted by the relative importance of its values.

    Parameters
    ----------
    symbols
        UInt8[n].
    importance
        Float64[n], not negative.

    Returns
    -------
    float
        ``-Σ I_s P_s log2 P_s`` in bits. P_s is the frequency of symbol s, and I_s the mean importance of its
        values over that of all values. 0 if the total importance is zero.

    Examples
    --------
    >>> weighted_entropy(np.array([0, 1], np.uint8), np.array([1.0, 1.0]))
    1.0
    """
    counts = np.bincount(symbols, minlength=256)
    sums = np.bincount(symbols, weights=importance, minlength=256)
    total = float(np.cumsum(sums)[-1])
    if total <= 0:
        return 0.0
    used = counts > 0
    shares = sums[used] / total  # I_s P_s: share of a symbol in the total importance
    return float(np.cumsum(-shares * np.log2(counts[used] / symbols.size))[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class QdCodec(GridCodec[Mapping[str, int]]):
    """Weights on grids whose width follows the layer; everything else exact.

    A plan is the width by tensor key; tensors that are exact are absent.

    Parameters
    ----------
    bits
        Width of the layer with the largest weighted entropy, 1..8.
    spread
        Bits that a layer may have less than that, 0..7; 0 gives every layer the same.
    grid
        ``refit``, as published: bins follow the range of a layer; ``held`` keeps them while they fit.
    coder
        ``huffman``, as published; ``rans``, ``lzma`` or ``zstd``.
    vectors
        Weights of at most one dimension: ``quantized`` like every layer, or ``exact``.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> codec = QdCodec(bits=2)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(0, 3, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None)])
    >>> codec.encode(item, plan, None).reference.decoded().unique()
    tensor([0., 1., 2., 3.])
    """

    name = "qd"
    bitstream = "qd/1"
    ranges: ClassVar = {"bits": (1, MAX_BITS), "spread": (0, MAX_BITS - 1)}
    label = "QD"
    tuning = BITS
    compared = (("QD", {}),)

    bits: int = 8
    spread: int = 1
    grid: str = "refit"
    coder: str = "huffman"
    vectors: str = "quantized"

    @property
    def fewest_bits(self) -> int:
        """Minimum width of a layer."""
        return max(1, self.bits - self.spread)

    def observe(self, item: TensorInput, reference: TensorReference | None) -> float | None:
        """Return the weighted entropy of a layer at the full width; None for exact tensors."""
        if not self.covers(item.spec):
            return None
        values = host_values(item.tensor)
        if not np.isfinite(values).all():
            return None
        grid = Grid(self.bits, float(values.min()), float(values.max()))
        symbols = level_numbers(values, grid)
        if isinstance(reference, GridReference) and reference.shape == item.spec.shape:
            symbols = symbols - level_numbers(host_values(reference.decoded()), grid)
        wide = values.astype(np.float64)
        return weighted_entropy(symbols, wide * wide)

    def plan(
        self, specs: Sequence[TensorSpec], statistics: Sequence[Any], context: FrameContext | None = None
    ) -> Mapping[str, int]:
        """Return the width of every layer: one bit less for each halving of the weighted entropy."""
        largest = max((seen for seen in statistics if seen is not None), default=0.0)
        bits: dict[str, int] = {}
        for spec, seen in zip(specs, statistics, strict=True):
            if seen is not None:
                fewer = math.floor(math.log2(largest / seen)) if seen > 0 else self.spread
                bits[spec.key] = max(self.fewest_bits, self.bits - fewer)
        return bits

    def bits_of(self, spec: TensorSpec, plan: Mapping[str, int], previous: GridReference | None) -> int:
        """Return the width of the chain so far where the settings allow it, else that of the plan."""
        if previous is not None and self.fewest_bits <= previous.grid.bits <= self.bits:
            return previous.grid.bits
        return plan.get(spec.key, self.bits)
