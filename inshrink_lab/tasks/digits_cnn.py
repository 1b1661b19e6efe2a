"""A small convolutional network on scikit-learn's handwritten digits, with AdamW or with SGD."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.digits import split_digits
from inshrink_lab.tasks.task import warmup_cosine


class DigitsCNN(nn.Module):
    """Two convolutions with batch normalisation, two linear layers: 72 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.fc1, self.fc2 = nn.Linear(32 * 16, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = functional.relu(self.bn1(self.conv1(images)))
        x = functional.max_pool2d(functional.relu(self.bn2(self.conv2(x))), 2)
        logits: Tensor = self.fc2(functional.relu(self.fc1(x.flatten(1))))
        return logits


class DigitsCNNTask:
    """The digits, with AdamW. The metric is the validation loss: accuracy has steps of 0.19 %."""

    name: ClassVar[str] = "digits-cnn"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "val_loss"
    direction: ClassVar[str] = "lower"
    n_steps: ClassVar[int] = 1200
    n_saves: ClassVar[int] = 20
    n_restores: ClassVar[int] = 9
    max_gradient_norm: ClassVar[float | None] = None

    batch_size = 128
    peak_learning_rate, warmup, floor = 1e-3, 100, 0.01
    label_smoothing = 0.05

    def build(self) -> nn.Module:
        """Return the network."""
        return DigitsCNN()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(
            model.parameters(), lr=self.peak_learning_rate, betas=(0.9, 0.99), weight_decay=0.05
        )

    def learning_rate_factor(self, step: int, n_steps: int) -> float:
        """Return warm-up and cosine."""
        return warmup_cosine(step, n_steps, warmup=self.warmup, floor=self.floor)

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random images, each moved by up to one pixel either way."""
        images, labels, _, _ = split_digits()
        index = torch.randint(len(images), (self.batch_size,), generator=generator)
        # Every 8×8 window of the padded image, (n, 3 × 3 shifts, 8, 8), and one of them for each image.
        windows = functional.pad(images[index, 0], (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1)
        shift = torch.randint(9, (len(index),), generator=generator)
        return windows.flatten(1, 2)[torch.arange(len(index)), shift].unsqueeze(1), labels[index]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy with label smoothing."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of the validation images, nats."""
        _, _, images, labels = split_digits()
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        loss = functional.cross_entropy(model(images.to(device)).double(), labels.to(device))
        model.train(was_training)
        return float(loss)


class DigitsCNNWithSGDTask(DigitsCNNTask):
    """The digits, with SGD and momentum: what a codec does without second moments."""

    name: ClassVar[str] = "digits-cnn-sgd"
    peak_learning_rate = 0.05

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with Nesterov's momentum."""
        return torch.optim.SGD(
            model.parameters(), lr=self.peak_learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
