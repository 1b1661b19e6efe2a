"""A small character GPT on the documentation's text."""

from __future__ import annotations

import math
from typing import Final

from torch import nn

from inshrink_lab.tasks.characters import CharacterTask, encode_corpus
from inshrink_lab.tasks.transformer import CharTransformer, TransformerBlock

_INITIAL_STD: Final = 0.02
"""GPT-2's; the projections back into the residual stream are scaled by 1/√(2·depth)."""


class CharGPT(CharTransformer):
    """A GPT over characters.

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
        super().__init__(n_characters, width, context, (TransformerBlock(width, heads) for _ in range(depth)))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "fc2.weight"))
                std = _INITIAL_STD / math.sqrt(2 * depth) if residual else _INITIAL_STD
                nn.init.normal_(parameter, std=std)


class CharGPTTask(CharacterTask):
    """The character GPT at 0.8 M parameters, with AdamW: a training of a few minutes on two cores."""

    name = "char-gpt"
    n_steps = 1600

    width, depth, heads, context = 128, 4, 4, 64
    peak_learning_rate, warmup, floor = 2e-3, 100, 0.1

    def build(self) -> nn.Module:
        """Return the model."""
        _, _, n_characters = encode_corpus()
        return CharGPT(
            n_characters, width=self.width, depth=self.depth, heads=self.heads, context=self.context
        )
