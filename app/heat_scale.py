"""Values as positions on a colour scale, and the scale itself. No Streamlit here."""

from __future__ import annotations

import math

import numpy as np
from inshrink_app.formatting import html_text, power_text, value_text
from numpy.typing import NDArray

__all__ = ["colorbar", "linear_scale", "log_scale"]

_LONGEST_COLORBAR = 420
_CLIPPED = (1.0, 99.0)
"""Percentiles between which colours spread when outliers are clipped."""


def linear_scale(values: NDArray[np.float32], clip: bool) -> tuple[NDArray[np.float32], float, float]:
    """Return the values, and the ends of the colour scale."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size == 0:
        return values, 0.0, 1.0
    low, high = (float(end) for end in np.percentile(finite, _CLIPPED if clip else (0, 100)))
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-30):
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    return np.where(np.isfinite(values), values, np.float32("nan")), low, high


def log_scale(values: NDArray[np.float32], clip: bool) -> tuple[NDArray[np.float32], float, float]:
    """Return log10 of the values, NaN where there is none, and the ends of the colour scale.

    Zeros have no logarithm: they take the scale's lower end; the hover tells that they are zero.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size == 0:
        return np.where(np.isfinite(values), np.float32(0), np.float32("nan")), -1.0, 0.0
    logs_of_positive = np.log10(positive.astype(np.float64))
    ends = np.percentile(logs_of_positive, _CLIPPED if clip else (0, 100))
    low, high = float(ends[0]), float(ends[1])
    if high - low < 0.02:
        middle = (low + high) / 2
        low, high = middle - 0.5, middle + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values.astype(np.float64))
    logs = np.where(np.isneginf(logs), low, logs)
    return np.where(np.isfinite(values), logs, np.nan).astype(np.float32), low, high


def colorbar(symbol: str, low: float, high: float, room: int, scale: str = "log") -> dict[str, object]:
    """Label a scale: a logarithmic one with decades, or 1-2-5 where it spans few of them."""
    ticks = _log_ticks(low, high) if scale == "log" else _linear_ticks(low, high)
    return {
        "title": {"text": html_text(symbol), "side": "top"},
        "tickvals": [position for position, _ in ticks],
        "ticktext": [text for _, text in ticks],
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 8,
        "lenmode": "pixels",
        "len": min(_LONGEST_COLORBAR, room),
        "y": 1,
        "yanchor": "top",
        "ypad": 0,
    }


def _linear_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return about five round values between two."""
    rough = (high - low) / 5
    decade = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * decade for m in (1, 2, 5, 10) if m * decade >= rough)
    first, last = math.ceil(low / stride), math.floor(high / stride)
    return [(k * stride, value_text(k * stride)) for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return decades between two logarithms, or 1-2-5 where they are few."""
    first, last = math.ceil(low), math.floor(high)
    if last - first >= 2:
        stride = math.ceil((last - first + 1) / 8)
        ticks = [(float(e), power_text(e)) for e in range(first, last + 1, stride)]
    else:
        candidates = [
            (math.log10(m) + e, m * 10.0**e)
            for e in range(first - 2, last + 2)
            for m in ((1, 2, 5) if high - low > 0.6 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
        ]
        ticks = [(position, value_text(value)) for position, value in candidates if low <= position <= high]
    return ticks
