"""Train the larger benchmark run: a character GPT of 5 M parameters, AdamW, 16 checkpoints.

The text is the Python documentation that every installation carries (``pydoc_data.topics``). The run
is written to ``benchmarks/data/char-gpt`` and not committed: training it takes about 15 minutes on two
cores. A run that stands there already is kept.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from inshrink_core.lab.tasks.char_gpt import CharGPT
from inshrink_core.lab.tasks.characters import encode_corpus, sample_windows

WIDTH, DEPTH, HEADS, CONTEXT = 272, 6, 4, 96
BATCH, STEPS, SAVE_EVERY = 12, 800, 50
PEAK_LR, WARMUP = 1e-3, 60
SEED = 7
VALIDATION_BATCHES = 6


def model(n_characters: int) -> CharGPT:
    """Return the network, freshly initialised."""
    return CharGPT(n_characters, width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT)


def validation_batches(validation: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the fixed batches that every checkpoint is judged on."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [_batch(validation, generator) for _ in range(VALIDATION_BATCHES)]


def _batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return sample_windows(data, BATCH, CONTEXT, generator)


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
    training, validation, n_characters = encode_corpus()
    network = model(n_characters)
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(SEED)
    batches, log = validation_batches(validation), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        x, y = _batch(training, generator)
        loss = functional.cross_entropy(network(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            row = {"step": step, "train_loss": loss.item(), "val_loss": validation_loss(network, batches)}
            log.append(row)
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, directory / f"step_{step:06d}.pt")
            sys.stderr.write(f"{row}\n")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return directory


def evaluate(state: dict[str, Tensor]) -> dict[str, object]:
    """Evaluate a state dict: the evaluator that the benchmarks pass to ``--evaluator``."""
    *_, whole = evaluate_streamed(state)
    return whole


def evaluate_streamed(state: dict[str, Tensor]) -> Iterator[dict[str, object]]:
    """Evaluate a state dict, and tell batch by batch what is known so far."""
    _, validation, n_characters = encode_corpus()
    network = model(n_characters)
    network.load_state_dict(state)
    batches = list(validation_batches(validation))
    n_samples = sum(targets.numel() for _, targets in batches)
    predictions, losses = [], []
    for inputs, targets in batches:
        with torch.no_grad():
            rows = functional.log_softmax(network(inputs).flatten(0, 1), dim=-1)
        predictions.append(rows)
        losses.append(functional.nll_loss(rows, targets.flatten(), reduction="none"))
        seen = torch.cat(losses)
        so_far = {"loss": float(seen.mean()), "n": seen.numel(), "of": n_samples}
        yield so_far | {"range": {"loss": (0, None)}, "log_probs": rows}
    yield {"loss": float(torch.cat(losses).mean()), "log_probs": torch.cat(predictions)}


if __name__ == "__main__":
    train(Path(__file__).parent / "data" / "char-gpt")
