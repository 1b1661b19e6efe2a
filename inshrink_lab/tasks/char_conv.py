"""A small gated convolutional language model on the documentation's text, with SGD or with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.characters import CharacterTask, encode_corpus

_EMBEDDING_STD: Final = 0.5
"""Large beside the first block's output: SGD moves an embedding slowly, as each row is seen seldom."""


class GatedBlock(nn.Module):
    """Pre-norm causal convolution with a gated linear unit, added to its input.

    Parameters
    ----------
    width
        Channels.
    kernel, dilation
        Places that one output sees, and the distance from one to the next.

    Notes
    -----
    The kernel is that of `torch.nn.Conv1d`, (2·width, width, kernel). It is applied as one matrix
    product of the shifted inputs, which is faster on a CPU.

    References
    ----------
    Dauphin et al., "Language Modeling with Gated Convolutional Networks", ICML 2017.
    """

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.kernel, self.dilation = kernel, dilation
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 2 * width, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        length, past = x.shape[1], (self.kernel - 1) * self.dilation
        padded = functional.pad(self.norm(x), (0, 0, past, 0))
        shifted = [padded[:, i * self.dilation : i * self.dilation + length] for i in range(self.kernel)]
        matrix = self.conv.weight.permute(0, 2, 1).flatten(1)
        mixed = functional.linear(torch.cat(shifted, dim=-1), matrix, self.conv.bias)
        out: Tensor = x + functional.glu(mixed, dim=-1)
        return out


class CharConv(nn.Module):
    """Gated convolutions over characters; each sees a bounded past.

    Parameters
    ----------
    n_characters
        Size of the alphabet.
    width, kernel
        Channels, and places that a convolution sees.
    dilations
        One block for each.
    """

    def __init__(self, n_characters: int, *, width: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.wte = nn.Embedding(n_characters, width)
        self.blocks = nn.ModuleList(GatedBlock(width, kernel, dilation) for dilation in dilations)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_characters)
        nn.init.normal_(self.wte.weight, std=_EMBEDDING_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, alphabet)."""
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class CharConvTask(CharacterTask):
    """Gated convolutions at 0.35 M parameters, with SGD: a training of a minute on one core."""

    name: ClassVar[str] = "char-conv"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "val_loss"
    direction: ClassVar[str] = "lower"
    n_steps: ClassVar[int] = 800
    n_saves: ClassVar[int] = 20
    n_restores: ClassVar[int] = 9
    max_gradient_norm: ClassVar[float | None] = 1.0

    width, kernel, dilations, context = 96, 3, (1, 2, 4, 8, 1, 2), 128
    batch_size = 8
    peak_learning_rate, warmup, floor = 1.0, 80, 0.1
    momentum, weight_decay = 0.9, 1e-5
    n_validation_windows = 360
    """46,080 predicted characters, nearly every one of the held-out text."""

    large: ClassVar[Mapping[str, Any]] = {"width": 768, "peak_learning_rate": 0.5}

    def build(self) -> nn.Module:
        """Return the model."""
        _, _, n_characters = encode_corpus()
        return CharConv(n_characters, width=self.width, kernel=self.kernel, dilations=self.dilations)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with Nesterov's momentum."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.peak_learning_rate,
            momentum=self.momentum,
            nesterov=True,
            weight_decay=self.weight_decay,
        )


class CharConvWithAdamWTask(CharConvTask):
    """The same model and text with AdamW: what of a result is the optimizer's, and what the model's."""

    name: ClassVar[str] = "char-conv-adamw"
    version: ClassVar[int] = 1

    peak_learning_rate, betas, weight_decay = 8e-3, (0.9, 0.99), 0.1
    large: ClassVar[Mapping[str, Any]] = {**CharConvTask.large, "peak_learning_rate": 1e-3}

    optimizer = CharacterTask.optimizer
