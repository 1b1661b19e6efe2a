"""Histograms of one tensor's values, by what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PARTS",
    "PROTECTED",
    "PRUNED",
    "QUANTIZED",
    "Part",
    "ValueHistogram",
    "bins_of",
    "chunks_of",
    "edges_of",
    "value_histogram",
]

PARTS = ("pruned", "quantized", "protected")
PRUNED, QUANTIZED, PROTECTED = range(3)
"""What can become of a value: zero, a level, or (nearly) itself."""

N_BINS = 120
"""Bins of a histogram: about one for every six pixels of a chart."""

_CHUNK = 1 << 20
"""Values turned to float64 at a time, 8 MB."""


class Part(NamedTuple):
    """The values of one tensor that became zero, a level, or themselves.

    Parameters
    ----------
    name
        ``pruned``, ``quantized`` or ``protected``.
    n, share
        How many they are, and of all values.
    smallest, largest
        Their magnitudes' range; None where there are none that are finite.
    """

    name: str
    n: int
    share: float
    smallest: float | None
    largest: float | None


class ValueHistogram(NamedTuple):
    """Values of one tensor in even bins, by part.

    Parameters
    ----------
    edges : Float[ndarray, "bins + 1"]
        Ascending; the last bin contains its upper edge. Empty where no value is finite.
    counts : Int[ndarray, "3 bins"]
        In the order of `PARTS`.
    parts
        Totals, in the same order.
    n_nonfinite
        NaN and infinite values, which are in no bin.
    rms
        Root mean square of the finite values; NaN where there are none.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    parts: tuple[Part, ...]
    n_nonfinite: int
    rms: float

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "edges": self.edges.tolist(),
            "counts": {name: row.tolist() for name, row in zip(PARTS, self.counts, strict=True)},
            "parts": [part._asdict() for part in self.parts],
            "n_nonfinite": self.n_nonfinite,
            "rms": None if np.isnan(self.rms) else self.rms,
        }


def value_histogram(values: Tensor, parts: NDArray[np.uint8] | int, n_bins: int = N_BINS) -> ValueHistogram:
    """Count the values of a tensor in even bins from the smallest to the largest, by part.

    Parameters
    ----------
    values
        Any shape and dtype; a complex number counts by its absolute value.
    parts : UInt8[ndarray, "n"] or int
        Index into `PARTS` for each element, or one for all.
    n_bins
        At least 1.

    Notes
    -----
    Two passes over chunks of float64; O(n).
    """
    low, high, square, n_finite = np.inf, -np.inf, 0.0, 0
    for _, chunk in chunks_of(values):
        finite = chunk[np.isfinite(chunk)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            with np.errstate(over="ignore"):  # an infinite sum of squares says what it has to
                square += float(np.square(finite).sum())
            n_finite += finite.size
    totals = np.zeros(len(PARTS), np.int64)
    ranges = [[np.inf, -np.inf] for _ in PARTS]
    edges = edges_of(low, high, n_bins)
    counts = np.zeros((len(PARTS), max(edges.size - 1, 0)), np.int64)
    for start, chunk in chunks_of(values):
        for part in range(len(PARTS)):
            mine = _of_part(chunk, parts, part, start)
            totals[part] += mine.size
            finite = mine[np.isfinite(mine)]
            if finite.size == 0:
                continue
            counts[part] += _count(finite, edges)
            magnitudes = np.abs(finite)
            ranges[part][0] = min(ranges[part][0], float(magnitudes.min()))
            ranges[part][1] = max(ranges[part][1], float(magnitudes.max()))
    n = max(int(totals.sum()), 1)
    return ValueHistogram(
        edges=edges,
        counts=counts,
        parts=tuple(
            Part(
                name,
                int(total),
                int(total) / n,
                *_range(smallest, largest),
            )
            for name, total, (smallest, largest) in zip(PARTS, totals, ranges, strict=True)
        ),
        n_nonfinite=int(totals.sum()) - n_finite,
        rms=float(np.sqrt(square / n_finite)) if n_finite else float("nan"),
    )


def _range(smallest: float, largest: float) -> tuple[float | None, float | None]:
    """Return a range, or nothing where no value is finite."""
    return (None, None) if smallest > largest else (smallest, largest)


def chunks_of(values: Tensor) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield the flat values in float64, some at a time, each with its first index."""
    import torch

    flat = values.detach().cpu().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk: NDArray[np.float64] = magnitudes(flat[start : start + _CHUNK], torch.float64).numpy()
        yield start, chunk


def _of_part(
    chunk: NDArray[np.float64], parts: NDArray[np.uint8] | int, part: int, start: int
) -> NDArray[np.float64]:
    if isinstance(parts, int):
        return chunk if parts == part else chunk[:0]
    mine: NDArray[np.float64] = chunk[parts[start : start + chunk.size] == part]
    return mine


def edges_of(low: float, high: float, n_bins: int) -> NDArray[np.float64]:
    """Return even edges; a single value gets a bin with room around it."""
    if not low <= high:
        return np.linspace(-1.0, 1.0, n_bins + 1)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    edges: NDArray[np.float64] = np.linspace(low, high, n_bins + 1)
    return edges


def bins_of(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each value; even edges make it one multiplication."""
    n_bins = edges.size - 1
    scaled = (values - edges[0]) * (n_bins / (edges[-1] - edges[0]))
    bins: NDArray[np.int64] = np.clip(scaled.astype(np.int64), 0, n_bins - 1)
    return bins


def _count(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.bincount(bins_of(values, edges), minlength=edges.size - 1)
