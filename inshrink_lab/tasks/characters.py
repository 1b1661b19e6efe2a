"""Text of the Python documentation, which every installation has, and the base class of tasks on it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.shipped import ShippedTask, on_cpu


def corpus() -> str:
    """Return the documentation's text, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@functools.cache
@on_cpu()
def encode_corpus() -> tuple[Tensor, Tensor, int]:
    """Return (training tokens, validation tokens, alphabet size); the last tenth validates."""
    text = corpus()
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([index[character] for character in text])
    split = len(encoded) * 9 // 10
    return encoded[:split], encoded[split:], len(alphabet)


class CharacterTask(ShippedTask):
    """Predict the next character: the data, the loss and the metric of a task on this text.

    Attributes
    ----------
    context
        Characters of a window.
    batch_size
        Windows of a step.
    n_validation_windows
        Windows of the metric.
    """

    context: int
    batch_size = 16
    n_validation_windows = 256
    """16,384 predicted characters: the paired difference of two runs is far above their sampling noise."""

    def texts(self) -> tuple[Tensor, Tensor]:
        """Return training and validation tokens."""
        training, validation, _ = encode_corpus()
        return training, validation

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random windows of the training text."""
        training, _ = self.texts()
        starts = torch.randint(len(training) - self.context - 1, (self.batch_size,), generator=generator)
        windows = torch.stack([training[start : start + self.context + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy, nats a character."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of windows spread over the validation text, nats per character."""
        return float(self.judged(model)[self.metric])

    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Return the metric and its predictions."""
        _, validation = self.texts()
        device = next(model.parameters()).device
        starts = torch.linspace(0, len(validation) - self.context - 1, self.n_validation_windows).long()
        windows = validation[starts[:, None] + torch.arange(self.context + 1)].to(device)
        logits = [model(part[:, :-1]).flatten(0, 1) for part in torch.split(windows, 64)]
        labels = [part[:, 1:].flatten() for part in torch.split(windows, 64)]
        losses = [functional.cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]
        return {
            self.metric: torch.stack(losses).double().mean(),
            "log_probs": functional.log_softmax(torch.cat(logits), -1),
        }
