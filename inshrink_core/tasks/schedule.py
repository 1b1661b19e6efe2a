"""The learning-rate schedule that the shipped tasks share."""

from __future__ import annotations

import math

__all__ = ["warmup_cosine"]


def warmup_cosine(step: int, n_steps: int, *, warmup: int, floor: float) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine down to `floor`.

    Parameters
    ----------
    step
        From 1 to `n_steps`.
    n_steps
        Length of the training.
    warmup
        Steps of the warm-up; a training shorter than ten times that warms up for a tenth.
    floor
        Share at the end.

    Examples
    --------
    >>> [round(warmup_cosine(step, 1000, warmup=100, floor=0.1), 3) for step in (1, 100, 550, 1000)]
    [0.01, 1.0, 0.55, 0.1]
    """
    warmup = max(1, min(warmup, n_steps // 10))
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, n_steps - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
