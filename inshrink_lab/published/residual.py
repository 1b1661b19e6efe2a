"""Base of the residual codecs: a small codebook for the difference to the last decoded frame (closed loop).

LC-Checkpoint, ExCP and the context-modelling codec are residual codecs. With reference r and codebook c, a
symbol s > 0 decodes to ``r + c[s - 1]``, and symbol 0 to r. Without a reference the codebook holds the values
themselves. ``docs/format-rivals.md`` (residual blocks) has the layout.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codec import Encoded, TensorInput, TensorReference
from inshrink_core.codecs.exact import LosslessReference
from inshrink_core.codecs.fallback import FallbackCodec, host_values
from inshrink_core.errors import DamagedError
from inshrink_core.frame import Block
from inshrink_core.ops.quantize import histogram16
from inshrink_core.quantization.codebook import fit_exact, key_histogram
from inshrink_lab.published.flat import FLAT_WORDS, Floats, Mask, Symbols, decode_flat, encode_flat

DELTA, WIDE, FILL = 1, 2, 4
"""Flags of a payload: the reference is added; centroids have four bytes instead of two; a value for symbol 0
follows the codebook."""

MAX_CENTROIDS = 255
"""Maximum number of centroids; together with symbol 0 they fit a byte."""


_Plan = TypeVar("_Plan")


class Quantized(NamedTuple):
    """Quantized values of one tensor.

    Parameters
    ----------
    symbols : UInt8[ndarray, "n"]
        0, or 1 + the index of a centroid.
    codebook : Float[ndarray, "c"]
        float32, strictly ascending, finite; c <= 255.
    fill
        Value of symbol 0 if it is not zero; never used with a reference.
    """

    symbols: Symbols
    codebook: Floats
    fill: float = 0.0


class ResidualCodec(FallbackCodec[_Plan]):
    """Base of the residual codecs: subclasses quantize the residual and choose the coder of symbols."""

    __slots__ = ()

    words: ClassVar = {"keyframe": ("exact", "quantized"), **FLAT_WORDS}
    coder: str
    keyframe: str

    @abstractmethod
    def quantize(self, item: TensorInput, values: Floats, plan: _Plan, *, delta: bool) -> Quantized:
        """Quantize residuals (`delta`), or values without a reference; float32[n], finite."""

    def pack_symbols(self, quantized: Quantized, spec: TensorSpec, before: TensorReference | None) -> bytes:
        """Return coded symbols."""
        return encode_flat(quantized.symbols, 1 + quantized.codebook.size, self.coder)

    def parse_symbols(
        self, stream: memoryview, spec: TensorSpec, n_symbols: int, before: TensorReference | None
    ) -> Symbols:
        """Undo `pack_symbols`."""
        return decode_flat(stream, spec.numel, n_symbols)

    def state_of(self, tensor: torch.Tensor, quantized: Quantized) -> TensorReference:
        """Return the state for the next delta; by default only the decoded tensor."""
        return LosslessReference(tensor)

    def encode_lossy(
        self, item: TensorInput, plan: _Plan, reference: TensorReference | None
    ) -> Encoded | None:
        """Return symbols of the residual, or of values without a reference; None if a value is not finite."""
        previous = decoded_before(reference, item.spec)
        if previous is None and self.keyframe == "exact":
            return None
        previous = previous if item.spec.role is TensorRole.WEIGHT else None  # moments are not differenced
        if (values := residual_of(item.tensor, previous)) is None:
            return None
        quantized = self.quantize(item, values, plan, delta=previous is not None)
        payload = _pack_head(quantized, previous) + self.pack_symbols(quantized, item.spec, reference)
        state = self.state_of(_reconstruct(item.spec, quantized, previous), quantized)
        return Encoded(Block(self.bitstream, payload), state)

    def decode_lossy(
        self, spec: TensorSpec, payload: memoryview, reference: TensorReference | None, device: str
    ) -> TensorReference:
        """Return the state a payload decodes to."""
        delta, codebook, fill, stream = _parse_head(payload)
        previous = decoded_before(reference, spec) if delta else None
        if delta and previous is None:
            raise DamagedError("the block is a delta against another reference")
        quantized = Quantized(self.parse_symbols(stream, spec, 1 + codebook.size, reference), codebook, fill)
        return self.state_of(_reconstruct(spec, quantized, previous), quantized)


def decoded_before(reference: TensorReference | None, spec: TensorSpec) -> torch.Tensor | None:
    """Return the decoded tensor of a reference if residuals to it are defined."""
    previous = None if reference is None else reference.decoded()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    fits = previous is not None and (previous.shape, previous.dtype) == (spec.shape, dtype)
    return previous if fits else None


def residual_of(tensor: torch.Tensor, previous: torch.Tensor | None) -> Floats | None:
    """Return a tensor less an earlier one, if any, float32[n]; None unless all of it is finite."""
    values = host_values(tensor)
    if previous is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values - host_values(previous)
    return values if np.isfinite(values).all() else None


def _pack_head(quantized: Quantized, previous: torch.Tensor | None) -> bytes:
    """Return flags, codebook and fill; entries take two bytes wherever float16 has them all."""
    codebook, fill = quantized.codebook, quantized.fill
    wide = not np.array_equal(_rounded_to_float16(codebook), codebook)
    flags = (0 if previous is None else DELTA) | (WIDE if wide else 0) | (FILL if fill else 0)
    head = bytes((flags, codebook.size)) + codebook.astype("<f4" if wide else "<f2").tobytes()
    return head + np.float32(fill).astype("<f4").tobytes() if fill else head


def _parse_head(payload: memoryview) -> tuple[bool, Floats, float, memoryview]:
    """Return whether it is a delta, codebook, fill and coded symbols."""
    flags, n_centroids = payload[0], payload[1]
    if flags & ~(DELTA | WIDE | FILL) or (flags & FILL and flags & DELTA):
        raise DamagedError("the block has unknown flags", found=f"{flags:#x}", expected="known ones")
    width = 4 if flags & WIDE else 2
    end = 2 + width * n_centroids
    after = end + (4 if flags & FILL else 0)
    if after > len(payload):
        raise DamagedError("the codebook is cut short", expected=f"{after} bytes", found=str(len(payload)))
    codebook = np.frombuffer(payload[2:end], f"<f{width}").astype(np.float32)
    fill = float(np.frombuffer(payload[end:after], "<f4")[0]) if flags & FILL else 0.0
    if not np.isfinite(codebook).all() or (codebook[1:] <= codebook[:-1]).any() or not np.isfinite(fill):
        raise DamagedError("the codebook is not finite and ascending")
    return bool(flags & DELTA), codebook, fill, payload[after:]


def _reconstruct(spec: TensorSpec, quantized: Quantized, previous: torch.Tensor | None) -> torch.Tensor:
    """One look-up and, with a reference, one float32 addition; symbol 0 leaves the reference's bits."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    values = np.append(np.float32(quantized.fill), quantized.codebook)[quantized.symbols]
    if previous is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            values = host_values(previous) + values
    largest = float(torch.finfo(dtype).max)
    decoded = torch.from_numpy(values).clamp_(-largest, largest).to(dtype).view(spec.shape)
    if previous is None:
        return decoded
    return torch.where(torch.from_numpy(quantized.symbols == 0).view(spec.shape), previous.to("cpu"), decoded)


def _rounded_to_float16(values: Floats) -> Floats:
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float16).astype(np.float32)


def narrowed(centroids: NDArray[np.float64], tolerance: float) -> Floats:
    """Round centroids to float16 if every relative error is small enough, else to float32.

    Parameters
    ----------
    centroids : Float[ndarray, "c"]
        Finite, ascending.
    tolerance
        Largest relative error of float16; 0 keeps float32.

    Returns
    -------
    Float[ndarray, "d"]
        float32, strictly ascending, finite; d <= c, as neighbours may round to one number.
    """
    largest = np.float64(np.finfo(np.float32).max)
    single = np.clip(centroids, -largest, largest).astype(np.float32)
    half = _rounded_to_float16(single)
    error = np.abs(half.astype(np.float64) - centroids)
    rounded = half if tolerance and bool((error <= tolerance * np.abs(centroids)).all()) else single
    return np.unique(rounded + np.float32(0.0))  # -0.0 + 0.0 is +0.0: one zero


def fit_nearest(values: Floats, survives: Mask, k: int, tolerance: float, fill: float = 0.0) -> Quantized:
    """Quantize surviving values to the k centroids of least squared error, and the others to symbol 0.

    Parameters
    ----------
    values : Float[ndarray, "n"]
        Finite.
    survives : Bool[ndarray, "n"]
        Values that get a centroid; zeros never do.
    k
        Maximum number of centroids, 1 to 255.
    tolerance
        As in `narrowed`.
    fill
        Value of symbol 0.

    Notes
    -----
    Centroids are fitted to the histogram of the upper halves of the float32 values (`fit_exact`). Each
    surviving value gets the nearest centroid, the lower one on a tie.
    """
    chosen = survives & (values != 0)
    survivors = values[chosen]
    symbols = np.zeros(values.size, np.uint8)
    if survivors.size == 0:
        return Quantized(symbols, np.zeros(0, np.float32), fill)
    dense = histogram16(torch.from_numpy(survivors)).numpy()
    codebook = narrowed(fit_exact(key_histogram(dense, "float32"), k), tolerance)
    wide = codebook.astype(np.float64)
    cuts = (wide[1:] + wide[:-1]) / 2
    symbols[chosen] = 1 + np.searchsorted(cuts, survivors.astype(np.float64), side="left")
    return Quantized(symbols, codebook, fill)
