"""Low-rank adapters on a frozen character GPT, fine-tuned on source code with AdamW."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.char_finetune import CharFinetuneTask


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus a product of two thin matrices, which starts at zero.

    Parameters
    ----------
    linear
        The layer. Its weight and bias become buffers that are not saved.
    rank
        Of the product.
    scale
        Of the product.

    References
    ----------
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        _freeze(linear)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        added = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        out: Tensor = self.linear(x) + self.scale * added
        return out


def _freeze(module: nn.Module) -> None:
    """Turn a module's own parameters into buffers that move with it but are not saved."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        module.register_buffer(name, parameter.detach(), persistent=False)


class CharLoRATask(CharFinetuneTask):
    """Adapters on every linear layer of the blocks. Only they are trained, and only they are saved.

    Notes
    -----
    As with PEFT's adapters, the frozen weights are no part of a checkpoint: they never change, and in the
    ratio they would count at every save for what deltas of zeros take. A restore finds them in `build`.
    """

    name = "char-lora"

    rank, scale = 16, 2.0
    peak_learning_rate, weight_decay = 2e-3, 0.01

    def build(self) -> nn.Module:
        """Return the pre-trained model, frozen, with adapters."""
        model = super().build()
        linears = [
            (module, name, child)
            for prefix, module in model.named_modules()
            if prefix.startswith("blocks.")
            for name, child in module.named_children()
            if isinstance(child, nn.Linear)
        ]
        for module in model.modules():
            _freeze(module)
        for module, name, linear in linears:
            setattr(module, name, AdaptedLinear(linear, self.rank, self.scale))
        return model
