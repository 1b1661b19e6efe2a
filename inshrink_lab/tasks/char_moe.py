"""A small mixture of experts on the documentation's text, with AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_lab.tasks.characters import CharacterTask, encode_corpus
from inshrink_lab.tasks.transformer import AttentionBlock, CharTransformer


class MixtureBlock(AttentionBlock):
    """Attention, then for each place the two experts that a router prefers, weighted by its softmax.

    Parameters
    ----------
    width, heads
        As `AttentionBlock` has them.
    n_experts, n_chosen
        Experts, and how many of them a place is sent to.
    expert_width
        Channels within an expert.

    References
    ----------
    Jiang et al., "Mixtral of Experts", 2024; the balance: Fedus et al., "Switch Transformers", JMLR 2022.
    """

    def __init__(self, width: int, heads: int, *, n_experts: int, n_chosen: int, expert_width: int) -> None:
        super().__init__(width, heads)
        self.n_chosen = n_chosen
        self.router = nn.Linear(width, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, expert_width), nn.GELU(), nn.Linear(expert_width, width))
            for _ in range(n_experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, length, width) to the same shape, and a balance: 1 where experts share equally."""
        x = self.attended(x)
        places = self.ln2(x).flatten(0, 1)
        shares = functional.softmax(self.router(places), dim=-1)
        weights, chosen = shares.topk(self.n_chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(places)
        for number, expert in enumerate(self.experts):
            place, rank = torch.where(chosen == number)
            mixed = mixed.index_add(0, place, expert(places[place]) * weights[place, rank, None])
        n_experts = len(self.experts)
        sent = functional.one_hot(chosen, n_experts).float().mean(dim=(0, 1))
        return x + mixed.view_as(x), n_experts * (sent * shares.mean(dim=0)).sum()


class CharMoE(CharTransformer):
    """A GPT over characters whose blocks are mixtures of experts."""

    def __init__(self, n_characters: int, width: int, context: int, blocks: Iterable[MixtureBlock]) -> None:
        super().__init__(n_characters, width, context, blocks)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)  # GPT-2's

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, alphabet)."""
        logits, _ = self.logits_and_balance(tokens)
        return logits

    def logits_and_balance(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and the mean balance of the blocks."""
        x = self.embedded(tokens)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.ln(x)), torch.stack(balances).mean()


class CharMoETask(CharacterTask):
    """Two of eight experts for each place, with AdamW."""

    name = "char-moe"
    n_steps = 1000

    width, depth, heads, context = 64, 2, 2, 64
    n_experts, n_chosen, expert_width = 8, 2, 128
    balance_weight = 0.01
    peak_learning_rate, warmup, floor = 4e-3, 50, 0.05

    def build(self) -> nn.Module:
        """Return the model."""
        _, _, n_characters = encode_corpus()
        sizes = {"n_experts": self.n_experts, "n_chosen": self.n_chosen, "expert_width": self.expert_width}
        blocks = (MixtureBlock(self.width, self.heads, **sizes) for _ in range(self.depth))
        return CharMoE(n_characters, self.width, self.context, blocks)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy, plus a little of the balance."""
        inputs, targets = batch
        logits, balance = cast("CharMoE", model).logits_and_balance(inputs)
        return (
            functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.balance_weight * balance
        )
