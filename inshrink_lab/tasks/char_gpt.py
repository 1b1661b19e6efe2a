"""A small character GPT on the documentation's text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from inshrink_lab.tasks.characters import CharacterTask, encode_corpus
from inshrink_lab.tasks.transformer import TransformerBlock

_INITIAL_STD: Final = 0.02
"""GPT-2's; the projections back into the residual stream are scaled by 1/√(2·depth)."""


class CharGPT(nn.Module):
    """A GPT over characters with learned positions; the head is not tied.

    Parameters
    ----------
    n_characters
        Size of the alphabet.
    width, depth, heads
        Channels, blocks, attention heads.
    context
        Longest sequence.
    """

    def __init__(self, n_characters: int, *, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(n_characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "fc2.weight"))
                std = _INITIAL_STD / math.sqrt(2 * depth) if residual else _INITIAL_STD
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, alphabet)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x))
        return logits


class CharGPTTask(CharacterTask):
    """The character GPT at 0.8 M parameters, with AdamW: a training of a few minutes on two cores."""

    name: ClassVar[str] = "char-gpt"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "val_loss"
    direction: ClassVar[str] = "lower"
    n_steps: ClassVar[int] = 1600
    n_saves: ClassVar[int] = 20
    n_restores: ClassVar[int] = 9
    max_gradient_norm: ClassVar[float | None] = 1.0

    width, depth, heads, context = 128, 4, 4, 64
    batch_size = 16
    peak_learning_rate, warmup, floor = 2e-3, 100, 0.1
    betas, weight_decay = (0.9, 0.99), 0.1
    n_validation_windows = 256
    """16,384 predicted characters: the paired difference of two runs is far above their sampling noise."""

    medium: ClassVar[Mapping[str, Any]] = {
        **{"width": 512, "depth": 8, "heads": 8, "context": 128, "batch_size": 4, "n_steps": 1000},
        **{"peak_learning_rate": 6e-4, "n_validation_windows": 64},
    }
    """25 M parameters: a training of a quarter of an hour on one core."""

    large: ClassVar[Mapping[str, Any]] = {
        **{"width": 768, "depth": 16, "heads": 12, "context": 256, "peak_learning_rate": 3e-4},
        **{"n_steps": 400, "warmup": 40},
    }
    """114 M parameters. It sees the text four times, for so large a model overfits."""

    def build(self) -> nn.Module:
        """Return the model."""
        _, _, n_characters = encode_corpus()
        return CharGPT(
            n_characters, width=self.width, depth=self.depth, heads=self.heads, context=self.context
        )
