"""A multilayer perceptron on a smooth function of eight numbers, with Adam."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.shipped import ShippedTask, on_cpu

_N_INPUTS: Final = 8
_N_WAVES: Final = 16
_FREQUENCY: Final = 0.5
"""Standard deviation of a wave's components: about 1.4 radians for an input of one standard deviation."""

_FUNCTION_SEED, _HELD_OUT_SEED, _N_HELD_OUT = 24, 25, 4096


@functools.cache
@on_cpu()
def _function() -> tuple[Tensor, Tensor]:
    """Return the frequencies (inputs × waves) and the phases of the waves."""
    generator = torch.Generator().manual_seed(_FUNCTION_SEED)
    frequencies = torch.randn(_N_INPUTS, _N_WAVES, generator=generator) * _FREQUENCY
    return frequencies, torch.rand(_N_WAVES, generator=generator) * 2 * torch.pi


def waves(inputs: Tensor) -> Tensor:
    """Return a sum of sixteen sines of inputs (n, 8), as (n, 1); its variance is about one."""
    frequencies, phases = _function()
    total = torch.sin(inputs @ frequencies + phases).sum(dim=1, keepdim=True)
    scaled: Tensor = total * (2 / _N_WAVES) ** 0.5
    return scaled


class RegressionTask(ShippedTask):
    """Learn the sum of sines from noisy values, with Huber's loss and Adam."""

    name = "regression"
    metric = "val_mse"
    n_steps = 2000
    max_gradient_norm = None

    width = 128
    batch_size = 128
    noise = 0.3
    """Standard deviation of the noise on the values. The metric has it too, and so ends above its square."""
    peak_learning_rate, warmup, floor = 3e-3, 50, 0.01

    def build(self) -> nn.Module:
        """Return the perceptron: three hidden layers."""
        width = self.width
        return nn.Sequential(
            *(nn.Linear(_N_INPUTS, width), nn.SiLU()),
            *(nn.Linear(width, width), nn.SiLU()),
            *(nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, 1),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam, without weight decay."""
        return torch.optim.Adam(model.parameters(), lr=self.peak_learning_rate)

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return new inputs and their noisy values."""
        return self._sampled(self.batch_size, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return Huber's loss."""
        inputs, values = batch
        return functional.huber_loss(model(inputs), values)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean squared error on fixed inputs and values."""
        return float(self.judged(model)[self.metric])

    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Return the metric and the predictions of it."""
        inputs, values = self._sampled(_N_HELD_OUT, torch.Generator().manual_seed(_HELD_OUT_SEED))
        device = next(model.parameters()).device
        found = model(inputs.to(device))
        error = functional.mse_loss(found.double(), values.to(device).double())
        return {self.metric: error, "predictions": found.flatten()}

    def _sampled(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(n, _N_INPUTS, generator=generator)
        return inputs, waves(inputs) + self.noise * torch.randn(n, 1, generator=generator)
