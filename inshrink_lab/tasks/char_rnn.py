"""A small recurrent language model on the documentation's text, with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from inshrink_lab.tasks.characters import CharacterTask, encode_corpus


class CharRNN(nn.Module):
    """A GRU over characters; each window begins with a state of zeros.

    Parameters
    ----------
    n_characters
        Size of the alphabet.
    width
        Of the state.
    embedding
        Channels of a character.
    depth
        Layers.
    """

    def __init__(self, n_characters: int, *, width: int, embedding: int, depth: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(n_characters, embedding)
        self.rnn = nn.GRU(embedding, width, num_layers=depth, batch_first=True)
        self.head = nn.Linear(width, n_characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, alphabet)."""
        states, _ = self.rnn(self.wte(tokens))
        logits: Tensor = self.head(states)
        return logits


class CharRNNTask(CharacterTask):
    """A GRU of one layer, with AdamW."""

    name: ClassVar[str] = "char-rnn"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "val_loss"
    direction: ClassVar[str] = "lower"
    n_steps: ClassVar[int] = 600
    n_saves: ClassVar[int] = 20
    n_restores: ClassVar[int] = 9
    max_gradient_norm: ClassVar[float | None] = 1.0

    width, embedding, depth, context = 256, 64, 1, 64
    batch_size = 16
    peak_learning_rate, warmup, floor = 4e-3, 80, 0.05
    betas, weight_decay = (0.9, 0.99), 0.1
    n_validation_windows = 360
    """23,040 predicted characters."""

    large: ClassVar[Mapping[str, Any]] = {
        "width": 1024,
        "embedding": 256,
        "depth": 2,
        "peak_learning_rate": 1e-3,
    }

    def build(self) -> nn.Module:
        """Return the model."""
        _, _, n_characters = encode_corpus()
        return CharRNN(n_characters, width=self.width, embedding=self.embedding, depth=self.depth)
