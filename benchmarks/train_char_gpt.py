"""Train the larger benchmark run: a character GPT of 5 M parameters, AdamW, 16 checkpoints.

The text is the Python documentation that every installation carries (``pydoc_data.topics``). The run
is written to ``benchmarks/data/char-gpt`` and not committed: training it takes about 15 minutes on two
cores. A run that stands there already is kept.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, DEPTH, HEADS, CONTEXT = 272, 6, 4, 96
BATCH, STEPS, SAVE_EVERY = 12, 800, 50
PEAK_LR, WARMUP = 1e-3, 60
SEED = 7
VALIDATION_BATCHES = 6


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn_qkv, self.attn_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.attn_qkv(self.ln1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


class CharGPT(nn.Module):
    """A GPT over characters with learned positions; the head is not tied."""

    def __init__(self, n_characters: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(n_characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, n_characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * DEPTH) if name.endswith(("proj.weight", "fc2.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def text() -> str:
    """Return the corpus, in a fixed order."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def tokens() -> tuple[Tensor, Tensor, int]:
    """Return (training tokens, validation tokens, alphabet size); the last tenth validates."""
    corpus = text()
    alphabet = sorted(set(corpus))
    index = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([index[character] for character in corpus])
    split = len(encoded) * 9 // 10
    return encoded[:split], encoded[split:], len(alphabet)


def validation_batches(validation: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the fixed batches that every checkpoint is judged on."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [_batch(validation, generator) for _ in range(VALIDATION_BATCHES)]


def _batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    window = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int) -> float:
    """Warm up linearly, then decay along a cosine to a tenth."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK_LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validation_loss(model: CharGPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean cross-entropy in nats."""
    losses = [functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches]
    return float(torch.stack(losses).mean())


def train(directory: Path, steps: int = STEPS) -> Path:
    """Train and save the run, unless it stands there already."""
    if (directory / "metrics.jsonl").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    training, validation, n_characters = tokens()
    model = CharGPT(n_characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(SEED)
    batches, log = validation_batches(validation), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        x, y = _batch(training, generator)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            row = {"step": step, "train_loss": loss.item(), "val_loss": validation_loss(model, batches)}
            log.append(row)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, directory / f"step_{step:06d}.pt")
            sys.stderr.write(f"{row}\n")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return directory


def evaluate(state: dict[str, Tensor]) -> dict[str, object]:
    """Evaluate a state dict: the evaluator that the benchmarks pass to ``--evaluator``."""
    _, validation, n_characters = tokens()
    model = CharGPT(n_characters)
    model.load_state_dict(state)
    with torch.no_grad():
        predictions = [
            (functional.log_softmax(model(x).flatten(0, 1), dim=-1), y.flatten())
            for x, y in validation_batches(validation)
        ]
    log_probs = torch.cat([log_prob for log_prob, _ in predictions])
    targets = torch.cat([target for _, target in predictions])
    return {"loss": float(functional.nll_loss(log_probs, targets)), "log_probs": log_probs}


if __name__ == "__main__":
    train(Path(__file__).parent / "data" / "char-gpt")
