"""The QD codec: quantize each layer over its own range, then take differences, then Huffman.

Jin et al., "QD-Compressor: a Quantization-based Delta Compression Framework for Deep Neural Networks"
(ICCD 2021; extended in IEEE TPDS, 2023): layer-based local-sensitive quantization, a bit width per
layer from a weighted entropy, delta of quantized values, lossless coding. The cyclic difference of bin
numbers and the Huffman coder are as Agrawal et al. (Inshrinkerator, SoCC 2024, "Evaluation") describe it.

Notes
-----
Only the abstracts and that description were at hand; assumed here: 8 bits for the layer that needs most; the
weighted entropy of a layer is that of its symbols (of their difference, once there is a reference),
where a symbol counts by the mean square of its values relative to the layer's mean square, and a layer gets
one bit less for each halving of it against the largest, at most `spread` less; a layer keeps its width along
a chain, because the difference of numbers of two widths is noise; the grid follows the layer's range in every
frame. The papers' error feedback corrects the training itself and is no part of a checkpoint's
coding; it is left out. Tensors that are not weights are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import CodecConfig, FrameContext, TensorInput, TensorReference
from inshrink_core.codecs.exact import BITSTREAM as EXACT
from inshrink_core.codecs.published.fallback import BITS, FLAT_CODERS, check_number, check_word, host_values
from inshrink_core.codecs.published.grid import (
    GRID_WORDS,
    MAX_BITS,
    Grid,
    GridCodec,
    GridReference,
    level_numbers,
)
from inshrink_core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["QdCodec", "QdConfig", "QdPlan", "weighted_entropy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QdConfig(CodecConfig):
    """Settings of the QD codec.

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
    """

    bits: int = 8
    spread: int = 1
    grid: str = "refit"
    coder: str = "huffman"
    vectors: str = "quantized"

    def __post_init__(self) -> None:
        check_number("bits", self.bits, 1, MAX_BITS, whole=True)
        check_number("spread", self.spread, 0, MAX_BITS - 1, whole=True)
        check_word("grid", self.grid, GRID_WORDS)
        check_word("coder", self.coder, tuple(FLAT_CODERS))
        check_word("vectors", self.vectors, ("quantized", "exact"))

    @property
    def fewest_bits(self) -> int:
        """Width of the layers that need least."""
        return max(1, self.bits - self.spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class QdPlan:
    """What one frame decides: the width of each layer.

    Parameters
    ----------
    config
        The request it was made from.
    bits
        Width by tensor key; absent for tensors that are exact.
    """

    config: QdConfig
    bits: Mapping[str, int] = field(default_factory=dict)


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
        ``-sum I_s P_s log2 P_s`` in bits, P the frequency of a symbol and I the mean importance of its
        values over that of all; 0 where nothing is important.

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
    shares = sums[used] / total  # I_s P_s: the share of a symbol in all importance
    return float(np.cumsum(-shares * np.log2(counts[used] / symbols.size))[-1])


class QdCodec(GridCodec):
    """Weights on grids whose width follows the layer; everything else exact.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole
    >>> codec, config = QdCodec(), QdConfig(bits=2)
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(0, 3, 4096).view(64, 64))
    >>> plan = codec.plan([spec], [codec.observe(item, None, config)], config)
    >>> codec.encode(item, plan, None).reference.decoded().unique()
    tensor([0., 1., 2., 3.])
    """

    name = "qd"
    bitstream = "qd/1"
    reads = frozenset({"qd/1", EXACT})
    config_type: ClassVar[type[CodecConfig]] = QdConfig
    label = "QD"
    tuning = BITS
    compared = (("QD", {}),)

    def observe(
        self, item: TensorInput, reference: TensorReference | None, config: CodecConfig
    ) -> float | None:
        """Return the weighted entropy of a layer at the full width; None for exact tensors."""
        asked: QdConfig = self.checked(config)
        if not self.covers(item.spec, asked):
            return None
        values = host_values(item.tensor)
        if not np.isfinite(values).all():
            return None
        symbols = level_numbers(values, Grid(asked.bits, float(values.min()), float(values.max())))
        wide = values.astype(np.float64)
        if isinstance(reference, GridReference) and reference.shape == item.spec.shape:
            before = host_values(reference.decoded())
            grid = Grid(asked.bits, float(values.min()), float(values.max()))
            symbols = symbols - level_numbers(before, grid)
        return weighted_entropy(symbols, wide * wide)

    def plan(
        self,
        specs: Sequence[TensorSpec],
        statistics: Sequence[Any],
        config: CodecConfig,
        context: FrameContext | None = None,
    ) -> QdPlan:
        """Return the width of every layer: one bit less for each halving of the weighted entropy."""
        asked: QdConfig = self.checked(config)
        known = [seen for seen in statistics if isinstance(seen, float)]
        largest = max(known, default=0.0)
        bits: dict[str, int] = {}
        for spec, seen in zip(specs, statistics, strict=True):
            if isinstance(seen, float):
                fewer = math.floor(math.log2(largest / seen)) if seen > 0 else asked.spread
                bits[spec.key] = max(asked.fewest_bits, asked.bits - fewer)
        return QdPlan(config=asked, bits=bits)

    def _config_of(self, plan: Any) -> QdConfig:
        if not isinstance(plan, QdPlan):
            raise ConfigError("this plan is not one of the codec 'qd'")
        return plan.config

    def _bits_of(self, spec: TensorSpec, plan: Any, previous: GridReference | None) -> int:
        config = self._config_of(plan)
        if previous is not None and config.fewest_bits <= previous.grid.bits <= config.bits:
            return previous.grid.bits
        chosen: int = plan.bits.get(spec.key, config.bits)
        return chosen
