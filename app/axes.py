"""What the axes of all figures have in common: steps in full, and logarithmic ticks that are written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from inshrink_app.formatting import power_text

__all__ = ["log_ticks", "steps_axis", "tick_text", "title"]

_STANDOFF = 10
"""Pixels between the labels of an axis and its title."""

_FEW_DECADES = 2.5
_MOST_DECADES = 7
_SMALLEST_IN_FULL, _LARGEST_IN_FULL = 1e-3, 1e4


def title(text: str) -> dict[str, Any]:
    """Return the title of an axis, clear of its labels."""
    return {"text": text, "standoff": _STANDOFF}


def steps_axis(n_ticks: int) -> dict[str, Any]:
    """Return an axis of steps: whole numbers, thousands apart, never turned."""
    return {
        "title": title("Step"),
        "tickformat": ",d",
        "nticks": n_ticks,
        "tickangle": 0,
        "automargin": True,
    }


def tick_text(value: float) -> str:
    """Return a round positive value as the label of a tick.

    Examples
    --------
    >>> tick_text(0.003), tick_text(0.001), tick_text(2), tick_text(1e5)
    ('3·10⁻³', '10⁻³', '2', '10⁵')
    """
    if 1 <= value <= 10:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = f"{value / 10.0**exponent:.3g}"
    return power_text(exponent) if mantissa == "1" else f"{mantissa}·{power_text(exponent)}"


def log_ticks(values: Iterable[float], text: Callable[[float], str] | None = None) -> dict[str, list[object]]:
    """Return ticks of a logarithmic axis: within a few decades more than powers of ten, all written out.

    Parameters
    ----------
    values
        What is drawn; those that a logarithmic axis cannot show do not count.
    text
        How a tick is labelled; by default in full where that takes few zeros, else by powers of ten.

    Returns
    -------
    dict
        For `update_xaxes` or `update_yaxes`; empty where nothing can be drawn.
    """
    finite = [value for value in values if 0 < value < math.inf]
    if not finite:
        return {}
    first, last = math.floor(math.log10(min(finite))) - 1, math.ceil(math.log10(max(finite))) + 1
    decades = math.log10(max(finite) / min(finite))
    mantissas = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < _FEW_DECADES else (1,)
    stride = max(1, math.ceil(decades / _MOST_DECADES))
    exponents = range(first, last, stride)
    ticks = [round(m * 10.0**exponent, 12 - exponent) for exponent in exponents for m in mantissas]
    if text is None:
        in_full = min(finite) >= _SMALLEST_IN_FULL and max(finite) < _LARGEST_IN_FULL
        text = "{:g}".format if in_full else tick_text
    return {"tickvals": list(ticks), "ticktext": [text(tick) for tick in ticks]}
