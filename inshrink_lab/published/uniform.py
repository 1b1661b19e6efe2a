"""The uniform codec, a plain baseline: uniform levels per tensor, deltas of level numbers, one entropy coder.

Asymmetric uniform quantization between the smallest and the largest value of each tensor, as
Check-N-Run (Eisenman et al., NSDI 2022, "Quantization") applies it to embedding rows; the difference
of level numbers to the previous checkpoint's, modulo their number; a static entropy coder.

Notes
-----
This is a baseline rather than a complete published system. The choices are: 8 bits; one grid per tensor, not
per row; the previous frame's grid is reused while it covers the values and spans at most a quarter more than
they do, so that level numbers change only where weights move (``grid="refit"`` follows the values in every
frame); tensors of at most one dimension, and tensors other than weights, are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from inshrink_lab.published.flat import BITS
from inshrink_lab.published.grid import MAX_BITS, GridCodec, GridReference

if TYPE_CHECKING:
    from inshrink_core.checkpoint import TensorSpec

__all__ = ["UniformCodec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformCodec(GridCodec[None]):
    """Weights on a grid; everything else exact.

    Parameters
    ----------
    bits
        Width of a level number, 1..8: ``2**bits`` levels. One less makes errors twice as large.
    grid
        ``held`` or ``refit``; refitting costs bits when the range of a tensor moves.
    coder
        ``rans``, ``huffman``, ``zstd`` or ``lzma``.
    vectors
        Weights of at most one dimension: ``exact`` or ``quantized``.

    Raises
    ------
    ConfigError
        A value is out of its range or of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.checkpoint import TensorRole, TensorSpec
    >>> from inshrink_core.codec import TensorInput
    >>> spec = TensorSpec(name="fc.weight", role=TensorRole.WEIGHT, dtype="float32", shape=(64, 64))
    >>> item = TensorInput(spec=spec, tensor=torch.linspace(0, 3, 4096).view(64, 64))
    >>> UniformCodec(bits=2).encode(item, None, None).reference.decoded().unique()
    tensor([0., 1., 2., 3.])
    """

    name = "uniform"
    bitstream = "uniform/1"
    ranges: ClassVar = {"bits": (1, MAX_BITS)}
    label = "Uniform"
    tuning = BITS
    compared = (("Uniform, 8 bit", {"bits": 8}), ("Uniform, 4 bit", {"bits": 4}))

    bits: int = 8
    grid: str = "held"
    coder: str = "rans"
    vectors: str = "exact"

    def bits_of(self, spec: TensorSpec, plan: None, previous: GridReference | None) -> int:
        """Return the same for every tensor."""
        return self.bits
