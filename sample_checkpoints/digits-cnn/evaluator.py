"""The evaluator of this run: accuracy, loss and predictions on held-out digits.

Self-contained: it needs torch and numpy, and the validation images that lie beside it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class DigitsCNN(nn.Module):
    """Three convolutions and two linear layers on 8×8 grey images; 44,762 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 48, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(48)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(48 * 2 * 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (n, 10), of images of shape (n, 1, 8, 8) in [0, 1]."""
        hidden = functional.relu(self.bn1(self.conv1(images)))
        hidden = functional.max_pool2d(functional.relu(self.bn2(self.conv2(hidden))), 2)
        hidden = functional.max_pool2d(functional.relu(self.bn3(self.conv3(hidden))), 2)
        hidden = self.dropout(functional.relu(self.fc1(hidden.flatten(1))))
        return self.fc2(hidden)


@cache
def _validation() -> tuple[Tensor, Tensor]:
    """Read the validation images once for many evaluations."""
    with np.load(Path(__file__).with_name("digits-validation.npz")) as arrays:
        # Pixels of this dataset are counts from 0 to 16.
        images = torch.from_numpy(arrays["images"]).float().div(16).unsqueeze(1)
        return images, torch.from_numpy(arrays["labels"]).long()


def evaluate(state_dict: dict[str, Tensor]) -> dict[str, float | Tensor]:
    """Return ``accuracy`` in [0, 1], mean ``loss`` in nats, and ``log_probs`` (540 × 10)."""
    model = DigitsCNN()
    model.load_state_dict(state_dict)
    model.eval()
    images, labels = _validation()
    with torch.inference_mode():
        log_probs = functional.log_softmax(model(images), dim=1)
    return {
        "accuracy": (log_probs.argmax(1) == labels).double().mean().item(),
        "loss": functional.nll_loss(log_probs.double(), labels).item(),
        "log_probs": log_probs,
    }
