"""A small vision transformer on distorted digits, with AdamW."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.digits import DistortedDigitsTask
from inshrink_lab.tasks.transformer import TransformerBlock

_PATCH: Final = 2
"""Pixels of a patch's side: sixteen patches of an image."""

_POSITION_STD: Final = 0.02
"""Of the positions at the start (ViT's)."""


class DigitsViT(nn.Module):
    """Patches, learned positions, transformer blocks, and the mean over patches.

    Parameters
    ----------
    width, depth, heads
        Channels, blocks, attention heads.

    References
    ----------
    Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; the mean over patches in place of a
    class token: Zhai et al., "Scaling Vision Transformers", CVPR 2022.
    """

    def __init__(self, *, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(_PATCH * _PATCH, width)
        self.pos_embed = nn.Parameter(torch.randn((8 // _PATCH) ** 2, width) * _POSITION_STD)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, is_causal=False) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        patches = functional.unfold(images, _PATCH, stride=_PATCH).transpose(1, 2)
        x = self.patch_embed(patches) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x.mean(dim=1)))
        return logits


class DigitsViTTask(DistortedDigitsTask):
    """Three blocks at width 64, with AdamW."""

    name = "digits-vit"

    width, depth, heads = 64, 3, 4
    peak_learning_rate, warmup, floor = 2e-3, 100, 0.01

    def build(self) -> nn.Module:
        """Return the model."""
        return DigitsViT(width=self.width, depth=self.depth, heads=self.heads)
