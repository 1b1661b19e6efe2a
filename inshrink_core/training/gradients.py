"""The moving average of gradients before a save, from which sensitivities are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

NEW_SHARE: Final = 0.9
"""Weight of the newest gradient (Inshrinkerator, SoCC 2024, section "Quantization": β = 0.9)."""

_N_RECORDED: Final = 50
"""Batches before a save whose gradients are recorded (ibid.). The next save is predicted from the distance of
the last two; before the second save, every batch is recorded."""


class GradientAverage:
    """The published average of gradients, ``EMA = 0.9 g + 0.1 EMA``, over the batches before a save.

    Parameters
    ----------
    parameters
        By name. Their ``grad`` are read.

    Notes
    -----
    One float32 copy of the gradients on their device, and one pass over them for each batch recorded.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._average: dict[str, Tensor] = {}
        self._n_since_save = 0
        self._interval: int | None = None

    def record(self) -> None:
        """Add the current gradients of the parameters."""
        self._n_since_save += 1
        if self._interval is not None and self._n_since_save <= self._interval - _N_RECORDED:
            return
        gradients: dict[str, Tensor] = {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and parameter.grad.layout == torch.strided
        }
        old, new = [], []
        for name, gradient in gradients.items():
            wide = gradient.detach().float()
            average = self._average.get(name)
            if average is None or average.device != wide.device:
                self._average[name] = wide.clone()
            else:
                old.append(average)
                new.append(wide)
        if old:
            torch._foreach_lerp_(old, new, NEW_SHARE)

    def take(self) -> dict[str, Tensor]:
        """Return the average by parameter name, and reset; empty if nothing was recorded."""
        taken, self._average = self._average, {}
        self._interval, self._n_since_save = self._n_since_save or None, 0
        return taken

    def forget(self) -> None:
        """Reset without a save, as after a restore."""
        self._average = {}
        self._n_since_save = 0


def finite(averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages that have no NaN or infinity."""
    return {name: tensor for name, tensor in averages.items() if torch.isfinite(tensor).all()}
