"""Generated weights and gradients in the shapes of real models, for benchmarks that need no training."""

from __future__ import annotations

import torch

Model = dict[str, torch.Tensor]

Sides = tuple[torch.Tensor, torch.Tensor]
"""Directions of a matrix in which gradients lie: of its columns, and of its rows."""


def directions(shape: torch.Size, generator: torch.Generator) -> Sides:
    """Return a dozen directions of both sides of a matrix."""
    rows, columns = (torch.randn(n, 12, generator=generator) for n in shape)
    return rows, columns


def gradient(noise: torch.Tensor, generator: torch.Generator, lasting: Sides | None = None) -> torch.Tensor:
    """Return a gradient as layers have them, most of it in a dozen directions of a matrix, about as large.

    As those of a training, gradients lie in `lasting` directions where they are given; else in new ones.
    """
    if noise.dim() < 2:
        return noise
    rows, columns = lasting or directions(noise.shape, generator)
    if lasting is not None:
        rows = rows @ torch.randn(12, 12, generator=generator) / 12**0.5
    return 0.27 * rows @ columns.T + 0.3 * noise


def gpt(width: int = 384, n_layers: int = 6, n_tokens: int = 8000) -> Model:
    """Return weights with the shapes of a small GPT."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (n_tokens, width), "wpe.weight": (256, width)}
    for i in range(n_layers):
        shapes |= {
            f"h.{i}.{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")
        }
        shapes |= {f"h.{i}.attn.qkv.weight": (3 * width, width), f"h.{i}.attn.proj.weight": (width, width)}
        shapes |= {f"h.{i}.mlp.fc.weight": (4 * width, width), f"h.{i}.mlp.proj.weight": (width, 4 * width)}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
