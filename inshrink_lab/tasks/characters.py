"""The Python documentation's text, which every installation carries, and what tasks on it share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.task import on_cpu, warmup_cosine


def corpus() -> str:
    """Return the documentation's text, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@functools.cache
@on_cpu
def encode_corpus() -> tuple[Tensor, Tensor, int]:
    """Return (training tokens, validation tokens, alphabet size); the last tenth validates."""
    text = corpus()
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([index[character] for character in text])
    split = len(encoded) * 9 // 10
    return encoded[:split], encoded[split:], len(alphabet)


def sample_windows(
    tokens: Tensor, n_windows: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (n_windows, context), from random places of a text."""
    starts = torch.randint(len(tokens) - context - 1, (n_windows,), generator=generator)
    windows = torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


class CharacterTask:
    """Predict the next character: the data, the loss and the metric of a task on this text.

    Attributes
    ----------
    context
        Characters of a window.
    batch_size
        Windows of a step.
    n_validation_windows
        Windows of the metric.
    peak_learning_rate, betas, weight_decay
        Of AdamW.
    warmup, floor
        Steps of the warm-up, and the last learning rate as a share of the peak.
    """

    context: int
    batch_size: int
    n_validation_windows: int
    peak_learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: int
    floor: float

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.peak_learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
        )

    def learning_rate_factor(self, step: int, n_steps: int) -> float:
        """Return warm-up and cosine."""
        return warmup_cosine(step, n_steps, warmup=self.warmup, floor=self.floor)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Return training and validation tokens."""
        training, validation, _ = encode_corpus()
        return training, validation

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random windows of the training text."""
        training, _ = self.texts()
        return sample_windows(training, self.batch_size, self.context, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy, nats a character."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of windows spread over the held-out text, nats a character."""
        _, validation = self.texts()
        device = next(model.parameters()).device
        starts = torch.linspace(0, len(validation) - self.context - 1, self.n_validation_windows).long()
        windows = validation[starts[:, None] + torch.arange(self.context + 1)].to(device)
        losses = [
            functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            for part in torch.split(windows, 64)
        ]
        return float(torch.stack(losses).double().mean())
