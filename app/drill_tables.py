"""What one tensor looks like inside, as the plain values that views and figures share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Course", "DrillDown", "Moved", "MovedRow", "PartRow", "ScoreMap"]


class PartRow(NamedTuple):
    """The values that were pruned, quantized or protected: how many, and the range of their magnitudes."""

    name: str
    n: int
    share: float
    smallest: float | None
    largest: float | None


class ScoreMap(NamedTuple):
    """Sensitivity against magnitude: edges in decimal logarithms, and counts magnitude by sensitivity."""

    metric: str
    source: str | None
    log_magnitude: NDArray[np.float64]
    log_sensitivity: NDArray[np.float64]
    counts: NDArray[np.int64]
    n_zero: int
    correlation: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrillDown:
    """One tensor of one step.

    Parameters
    ----------
    name, step, dtype, shape, numel
        Which tensor. Its name is untrusted text.
    codec, config
        What it was stored with, or would be.
    estimated
        Whether the codec was only tried on this tensor alone.
    restored
        Whether the values are those an archive restores.
    kind
        ``keyframe`` or ``delta``.
    edges, counts, parts
        Histogram of the values, by what became of them.
    n_nonfinite, rms
        Values that are NaN or infinite; root mean square of the others.
    level_kind, points, spacing
        The levels: what kind, those that occur where they are few, and their distance where it is even.
    entropy, bits_per_weight, nbytes, keyframe_nbytes
        What it costs.
    sensitivity
        None where the checkpoint does not tell one.
    document
        All of it as JSON values.
    """

    name: str
    step: int
    dtype: str
    shape: tuple[int, ...]
    numel: int
    codec: str
    config: Mapping[str, Any]
    estimated: bool
    restored: bool
    kind: str
    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    parts: tuple[PartRow, ...]
    n_nonfinite: int
    rms: float
    level_kind: str
    points: NDArray[np.float64]
    spacing: float | None
    entropy: float | None
    bits_per_weight: float | None
    nbytes: int
    keyframe_nbytes: int | None
    sensitivity: ScoreMap | None
    document: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Course:
    """One tensor over steps; float64 ``[steps]``, NaN where there is no value.

    `n_left_out` steps are not among them, to read less.
    """

    steps: tuple[int, ...]
    rms: NDArray[np.float64]
    movement: NDArray[np.float64]
    relative_movement: NDArray[np.float64]
    bits_per_weight: NDArray[np.float64]
    n_left_out: int = 0


class MovedRow(NamedTuple):
    """How far one tensor moved from one step to another."""

    name: str
    layer: str
    shape: tuple[int, ...]
    relative: float | None
    rms: float
    max_abs: float
    cosine: float | None
    changed: float


class Moved(NamedTuple):
    """What moved between two steps, the most first, and what only one of them has."""

    rows: tuple[MovedRow, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
