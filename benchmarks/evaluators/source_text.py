"""The evaluator of the fine-tune: loss and predictions on held-out source text of the standard library.

Needs torch and Inshrink, whose character GPT it is. Text and sizes are read from ``text.npz`` beside it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inshrink_core.lab.tasks.char_gpt import CharGPT

N_WINDOWS, SLICE = 36, 12
"""36 windows of 96 characters: 3,456 predictions."""


@cache
def _windows() -> tuple[Tensor, dict[str, int]]:
    """Read windows spread evenly over the held-out text, (36, context + 1), and the model's sizes."""
    with np.load(Path(__file__).with_name("text.npz")) as arrays:
        held = torch.from_numpy(arrays["held"].astype(np.int64))
        sizes = {name: int(arrays[name]) for name in ("n_characters", "width", "depth", "heads", "context")}
    starts = torch.linspace(0, len(held) - sizes["context"] - 1, N_WINDOWS).long()
    return held[starts[:, None] + torch.arange(sizes["context"] + 1)], sizes


def evaluate(state_dict: dict[str, Tensor]) -> dict[str, float | Tensor]:
    """Return ``loss`` in nats a character, and ``log_probs`` (3,456 × characters)."""
    windows, sizes = _windows()
    model = CharGPT(**sizes)
    model.load_state_dict(state_dict)
    model.eval()
    with torch.inference_mode():
        parts = [
            functional.log_softmax(model(part[:, :-1]).flatten(0, 1), dim=-1) for part in windows.split(SLICE)
        ]
    log_probs = torch.cat(parts)
    targets = windows[:, 1:].flatten()
    return {"loss": functional.nll_loss(log_probs.double(), targets).item(), "log_probs": log_probs}
