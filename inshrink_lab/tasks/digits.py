"""scikit-learn's handwritten digits, and the base classes of tasks on them."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_core.errors import MissingExtraError
from inshrink_lab.tasks.shipped import ShippedTask, on_cpu

_SPLIT_SEED: Final = 20
"""Seed of the split into training and validation."""

_VIEWS_SEED: Final = 21
"""Seed of the distortions of validation images."""

_N_VIEWS: Final = 4
"""Number of views per validation image, so that 539 images give 2,156 samples of the metric."""

_MAX_ANGLE, _MAX_STRETCH, _MAX_SHIFT = math.radians(15), 0.15, 1 / 8
"""Limits of a distortion: rotation, relative change of each side, and shift as a share of the half-width."""


@functools.cache
@on_cpu()
def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n×1×8×8, 0 to 1) and labels, for training and for validation.

    Raises
    ------
    MissingExtraError
        scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("sklearn", "dev") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    n_validation = len(images) * 3 // 10
    present, kept = order[:n_validation], order[n_validation:]
    return images[kept], labels[kept], images[present], labels[present]


def distorted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (n, 1, 8, 8), each slightly rotated, stretched and shifted."""
    angle, wide, high, right, down = (torch.rand(5, len(images), generator=generator) * 2 - 1).unbind()
    cosine, sine = torch.cos(angle * _MAX_ANGLE), torch.sin(angle * _MAX_ANGLE)
    wide, high = 1 + wide * _MAX_STRETCH, 1 + high * _MAX_STRETCH
    rows = [cosine * wide, -sine * high, right * _MAX_SHIFT, sine * wide, cosine * high, down * _MAX_SHIFT]
    grid = functional.affine_grid(
        torch.stack(rows, dim=1).view(-1, 2, 3), list(images.shape), align_corners=False
    )
    return functional.grid_sample(images, grid, align_corners=False)


@functools.cache
@on_cpu()
def held_out_views() -> tuple[Tensor, Tensor]:
    """Return the fixed distorted validation images, (n, 1, 8, 8), and their labels."""
    _, _, images, labels = split_digits()
    images, labels = images.repeat(_N_VIEWS, 1, 1, 1), labels.repeat(_N_VIEWS)
    return distorted(images, torch.Generator().manual_seed(_VIEWS_SEED)), labels


class DigitsTask(ShippedTask):
    """Digit classification: loss and metric.

    Attributes
    ----------
    batch_size
        Number of images per step.
    n_at_once
        Number of images per forward pass of the metric.
    label_smoothing
        Label smoothing of the loss.
    """

    batch_size = 128
    n_at_once = 128
    label_smoothing = 0.0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the fixed validation images and their labels."""
        _, _, images, labels = split_digits()
        return images, labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of the validation images, nats."""
        return float(self.judged(model)[self.metric])

    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Return the metric and its predictions."""
        images, labels = self.held_out()
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        logits = torch.cat([model(part.to(device)) for part in torch.split(images, self.n_at_once)])
        model.train(was_training)
        return {
            self.metric: functional.cross_entropy(logits.double(), labels.to(device)),
            "log_probs": functional.log_softmax(logits, -1),
        }


class DistortedDigitsTask(DigitsTask):
    """Tell distorted and noisy digits apart.

    Attributes
    ----------
    noise
        Standard deviation of the noise on every pixel (0 to 1). It keeps the metric away from zero,
        where the seeds of a clean set differ by tenths of it.
    """

    n_steps = 600
    noise = 0.3

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random training images, distorted and noisy."""
        images, labels, _, _ = split_digits()
        index = torch.randint(len(images), (self.batch_size,), generator=generator)
        return self._noisy(distorted(images[index], generator), generator), labels[index]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return validation images with fixed distortions."""
        views, labels = held_out_views()
        return self._noisy(views, torch.Generator().manual_seed(_VIEWS_SEED)), labels

    def _noisy(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return images + self.noise * torch.randn(images.shape, generator=generator)
