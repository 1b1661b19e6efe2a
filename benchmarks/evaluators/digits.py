"""The evaluator of the CNN runs: accuracy, loss and predictions on held-out, distorted digits.

Needs torch and scikit-learn, whose handwritten digits (8×8, 1,797 images) are doubled in size here.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

SPLIT_SEED, DISTORTION_SEED = 20, 21
N_HELD = 540
"""Held-out images, 30 %."""

DISTORTIONS = 1
"""Fixed distortions of each held-out image."""

LARGEST_TURN, LARGEST_SHIFT, LARGEST_GROWTH, NOISE = math.radians(15), 0.12, 0.15, 0.05


class DigitsNet(nn.Module):
    """Three convolutions with batch normalisation, two linear layers: 360 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128)
        self.fc1, self.fc2 = nn.Linear(128 * 2 * 2, 512), nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (n, 10), of images (n, 1, 16, 16) in [0, 1]."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 2)
        x = functional.max_pool2d(functional.relu(self.bn2(self.conv2(x))), 2)
        x = functional.max_pool2d(functional.relu(self.bn3(self.conv3(x))), 2)
        logits: Tensor = self.fc2(functional.relu(self.fc1(x.flatten(1))))
        return logits


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n, 1, 16, 16) in [0, 1] and labels, for training and held out."""
    loaded = load_digits()
    # Pixels of this dataset are counts from 0 to 16.
    small = torch.from_numpy(loaded.images).float().div(16).unsqueeze(1)
    images = functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
    labels = torch.from_numpy(loaded.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held, kept = order[:N_HELD], order[N_HELD:]
    return images[kept], labels[kept], images[held], labels[held]


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, shift, scale and blur with noise, each image by amounts of its own."""
    n = len(images)
    turn, growth = (2 * torch.rand(2, n, generator=generator) - 1).unbind()
    turn, scale = turn * LARGEST_TURN, 1 + growth * LARGEST_GROWTH
    shift = (2 * torch.rand(n, 2, 1, generator=generator) - 1) * LARGEST_SHIFT
    rows = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(n, 2, 2)
    grid = functional.affine_grid(
        torch.cat([rows * scale.view(n, 1, 1), shift], 2), list(images.shape), align_corners=False
    )
    moved = functional.grid_sample(images, grid, align_corners=False)
    return moved + NOISE * torch.randn(moved.shape, generator=generator)


@cache
def _held_out() -> tuple[Tensor, Tensor]:
    """Distort the held-out images once for many evaluations."""
    _, _, images, labels = digits()
    generator = torch.Generator().manual_seed(DISTORTION_SEED)
    return torch.cat([distort(images, generator) for _ in range(DISTORTIONS)]), labels.repeat(DISTORTIONS)


def evaluate(state_dict: dict[str, Tensor]) -> dict[str, float | Tensor]:
    """Return ``loss`` in nats, ``accuracy`` in [0, 1], and ``log_probs`` (540 × 10)."""
    model = DigitsNet()
    model.load_state_dict(state_dict)
    model.eval()
    images, labels = _held_out()
    with torch.inference_mode():
        log_probs = functional.log_softmax(model(images).double(), dim=1)
    return {
        "loss": functional.nll_loss(log_probs, labels).item(),
        "accuracy": (log_probs.argmax(1) == labels).double().mean().item(),
        "log_probs": log_probs.float(),
    }
