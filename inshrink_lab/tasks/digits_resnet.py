"""A small residual network with batch normalisation on distorted digits, with SGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.digits import DistortedDigitsTask


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch normalisation, added to their input.

    Parameters
    ----------
    n_in, n_out
        Channels. Where they differ, the block halves each side, and a 1×1 convolution maps its input.

    References
    ----------
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        stride = 1 if n_in == n_out else 2
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if n_in != n_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, n_in, height, width) to (batch, n_out, …)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class DigitsResNet(nn.Module):
    """A convolution, residual blocks, and the mean over places.

    Parameters
    ----------
    widths
        Channels of each block; where they change, the image halves.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths[:-1]), widths, strict=True)
        self.blocks = nn.ModuleList(ResidualBlock(n_in, n_out) for n_in, n_out in pairs)
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = functional.relu(self.bn(self.conv(images)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class DigitsResNetTask(DistortedDigitsTask):
    """Six residual blocks, with SGD and momentum."""

    name = "digits-resnet"
    max_gradient_norm = None

    widths = (16, 16, 32, 32, 64, 64)
    peak_learning_rate, warmup, floor = 0.1, 50, 0.01
    momentum, weight_decay = 0.9, 5e-4

    def build(self) -> nn.Module:
        """Return the network."""
        return DigitsResNet(self.widths)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with Nesterov's momentum."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.peak_learning_rate,
            momentum=self.momentum,
            nesterov=True,
            weight_decay=self.weight_decay,
        )
