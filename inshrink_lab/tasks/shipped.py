"""What the shipped tasks share: an optimizer, a schedule, and the defaults of a rehearsal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make tensors on the CPU, whichever device is the default: as a decorator, those that outlive a call."""
    with torch.device("cpu"):
        yield


class ShippedTask:
    """The attributes and methods of a `Task` that most shipped tasks have in common.

    Attributes
    ----------
    peak_learning_rate, betas, weight_decay
        Of AdamW.
    warmup, floor
        Steps of the warm-up, and the last learning rate as a share of the peak.
    """

    name: str
    version: int = 1
    metric: str = "val_loss"
    direction: str = "lower"
    n_steps: int
    n_saves: int = 20
    n_restores: int = 9
    max_gradient_norm: float | None = 1.0

    batch_size: int
    peak_learning_rate: float
    betas = (0.9, 0.99)
    weight_decay: float = 0.1
    warmup: int
    floor: float

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(
            model.parameters(), lr=self.peak_learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )

    def learning_rate_factor(self, step: int, n_steps: int) -> float:
        """Return warm-up and cosine."""
        return warmup_cosine(step, n_steps, warmup=self.warmup, floor=self.floor)


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
