"""A small diffusion model of distorted digits, with Adam: a mean squared error, and no classes."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.digits import distorted, held_out_views, split_digits
from inshrink_lab.tasks.shipped import ShippedTask

_LEVELS_SEED: Final = 22
"""Seed of the noise and its levels for validation images."""

_N_FREQUENCIES: Final = 16
"""Number of sines and cosines that encode the noise level for the network."""


class LevelBlock(nn.Module):
    """Two 3×3 convolutions with group normalisation, moved by the level of noise, added to their input.

    Parameters
    ----------
    width
        Channels, a multiple of 8.
    level_width
        Channels of the level.
    """

    def __init__(self, width: int, level_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.level = nn.Linear(level_width, width)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Map (batch, width, …) to the same shape."""
        y = self.conv1(functional.silu(self.norm1(x))) + self.level(level)[:, :, None, None]
        out: Tensor = x + self.conv2(functional.silu(self.norm2(y)))
        return out


class Denoiser(nn.Module):
    """Predicts the noise of an image: a U of two sizes.

    Parameters
    ----------
    width
        Channels at full size; twice as many at half.
    level_width
        Channels of the level of noise.

    References
    ----------
    Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020.
    """

    def __init__(self, *, width: int, level_width: int) -> None:
        super().__init__()
        self.level1, self.level2 = (
            nn.Linear(2 * _N_FREQUENCIES, level_width),
            nn.Linear(level_width, level_width),
        )
        self.conv_in = nn.Conv2d(1, width, 3, padding=1)
        self.before, self.after = LevelBlock(width, level_width), LevelBlock(width, level_width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.middle = LevelBlock(2 * width, level_width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.norm, self.conv_out = nn.GroupNorm(8, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) and their levels (batch, 0 to 1) to the noise in them."""
        frequencies = torch.arange(1, _N_FREQUENCIES + 1, device=level.device) * math.pi
        angles = level[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        known = functional.silu(self.level2(functional.silu(self.level1(waves))))
        x = self.before(self.conv_in(images), known)
        x = x + self.up(self.middle(self.down(x), known))
        noise: Tensor = self.conv_out(functional.silu(self.norm(self.after(x, known))))
        return noise


class DenoiseTask(ShippedTask):
    """Find the noise in a digit, at every level of noise, with Adam."""

    name = "denoise"
    metric = "val_mse"
    n_steps = 600

    width, level_width = 24, 64
    batch_size = 128
    peak_learning_rate, warmup, floor = 2e-3, 50, 0.01

    def build(self) -> nn.Module:
        """Return the network."""
        return Denoiser(width=self.width, level_width=self.level_width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam, without weight decay."""
        return torch.optim.Adam(model.parameters(), lr=self.peak_learning_rate, betas=(0.9, 0.99))

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return noisy images, the level of each, and the noise."""
        images, _, _, _ = split_digits()
        index = torch.randint(len(images), (self.batch_size,), generator=generator)
        return _noisy(distorted(images[index], generator), generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the mean squared error of the noise."""
        images, level, noise = batch
        return functional.mse_loss(model(images, level), noise)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean squared error on validation images with fixed noise; predicting zero gives 1."""
        return float(self.judged(model)[self.metric])

    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Return the metric and its predictions."""
        views, _ = held_out_views()
        parts = _noisy(views, torch.Generator().manual_seed(_LEVELS_SEED))
        device = next(model.parameters()).device
        images, level, noise = (part.to(device) for part in parts)
        pieces = zip(torch.split(images, self.batch_size), torch.split(level, self.batch_size), strict=True)
        found = torch.cat([model(*piece) for piece in pieces])
        error = functional.mse_loss(found.double(), noise.double())
        return {self.metric: error, "predictions": found.flatten()}


def _noisy(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return images mixed with noise, the level of each, and the noise (cosine schedule)."""
    level = torch.rand(len(images), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    angle = (level * math.pi / 2)[:, None, None, None]
    return angle.cos() * (2 * images - 1) + angle.sin() * noise, level, noise
