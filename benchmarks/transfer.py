"""Transfer learning: fine-tuning from an exported model, against fine-tuning from the original weights.

A small network learns the digits 0 to 4, and its checkpoints become a chain. The last step is exported
at several ratios, and each export is fine-tuned on the digits 5 to 9 with a new last layer, with the
same data and the same seed as the original weights.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import inshrink_core
from benchmarks.results import write
from inshrink_core.lab.rehearsal import half_width
from inshrink_core.lab.tasks.digits_cnn import DigitsCNN

SEEDS = 5
SAVES = 20
STEPS = 600
FINE_TUNING_STEPS = 25
FINE_TUNING_BATCH = 32
"""Few and small, so that what is transferred matters: see the row of a network that starts anew."""

CHAINS = (2.5, 8.0)
"""Coarseness of the lattice: a fine one, and one whose chains are beyond 30×."""

RATIOS: tuple[float | None, ...] = (None, 8.0, 12.0, 16.0)
"""Least ratio of each export; None keeps the bits of the archive."""


class Data(NamedTuple):
    """Images and labels from 0 on, for training and for validation."""

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor


class Outcome(NamedTuple):
    """What fine-tuning came to."""

    loss: float
    accuracy: float


class Start(NamedTuple):
    """Weights to fine-tune from, and what they took."""

    source: str
    chain_ratio: float | None
    ratio: float | None
    relative_error: float | None
    weights: dict[str, Tensor] | None


@cache
def digits(first: int) -> Data:
    """Return five digits from one on; three tenths validate."""
    found = load_digits()
    chosen = (found.target >= first) & (found.target < first + 5)
    images = torch.from_numpy(found.images[chosen]).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(found.target[chosen]).long() - first
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(20))
    held, kept = order[: len(images) * 3 // 10], order[len(images) * 3 // 10 :]
    return Data(images[kept], labels[kept], images[held], labels[held])


def network(seed: int) -> nn.Module:
    """Return a network for five classes."""
    torch.manual_seed(seed)
    made = DigitsCNN()
    made.fc2 = nn.Linear(128, 5)
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both trainings."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, n_steps: int, batch: int, seed: int
) -> Iterator[int]:
    """Train with a cosine schedule, yielding after each step."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, n_steps + 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / n_steps)))
        index = torch.randint(len(data.images), (batch,), generator=generator)
        loss = functional.cross_entropy(model(data.images[index]), data.labels[index], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


@torch.no_grad()
def judge(model: nn.Module, data: Data) -> Outcome:
    """Return loss and accuracy on the images held back."""
    model.eval()
    logits = model(data.held_images).double()
    loss = functional.cross_entropy(logits, data.held_labels)
    accuracy = (logits.argmax(dim=1) == data.held_labels).double().mean()
    return Outcome(float(loss), float(accuracy))


def pretrain(folder: Path, seed: int) -> None:
    """Learn the digits 0 to 4 and save as one would."""
    model = network(seed)
    optimizer = adamw(model)
    for step in train(model, optimizer, digits(0), STEPS, 128, seed):
        if step % (STEPS // SAVES) == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, folder / f"step_{step}.pt")


def fine_tune(weights: dict[str, Tensor] | None, seed: int) -> Outcome:
    """Learn the digits 5 to 9 from some weights and a new last layer; None starts anew."""
    model = network(1000 + seed)
    if weights is not None:
        kept = {name: value for name, value in weights.items() if not name.startswith("fc2")}
        model.load_state_dict(kept, strict=False)
    for _ in train(model, adamw(model), digits(5), FINE_TUNING_STEPS, FINE_TUNING_BATCH, 2000 + seed):
        pass
    return judge(model, digits(5))


def starts(folder: Path, chains: tuple[float, ...], ratios: tuple[float | None, ...]) -> Iterator[Start]:
    """Return everything to fine-tune from, the original weights first."""
    run = inshrink_core.open(folder)
    original = run[run.steps[-1]].state_dict()
    yield Start("original", None, 1.0, 0.0, original)
    yield Start("a new network", None, None, None, None)
    for coarseness in chains:
        target = folder / f"{coarseness}.inshrink"
        report = inshrink_core.compress(run, target, config={"coarseness": coarseness}, optimizer="exact")
        for ratio in ratios:
            exported = inshrink_core.verbs.export(
                target,
                folder / "model.inshrink",
                weights_only=True,
                exact=ratio is None,
                ratio=ratio or 1.0,
                force=True,
            )
            weights = inshrink_core.verbs.load_state_dict(folder / "model.inshrink")
            name = f"lattice {coarseness:g}, " + ("exact" if ratio is None else f"at least {ratio:g}")
            yield Start(
                name,
                report.size.ratio_weights,
                exported.ratio_float32,
                relative_error(original, weights),
                weights,
            )


def relative_error(original: dict[str, Tensor], weights: dict[str, Tensor]) -> float:
    """Return the error of all floating weights against the run's own."""
    names = [name for name, value in original.items() if value.is_floating_point()]
    error = sum(float((original[name] - weights[name]).double().square().sum()) for name in names)
    return math.sqrt(error / sum(float(original[name].double().square().sum()) for name in names))


def rows_of(found: list[list[tuple[Start, Outcome]]]) -> Iterator[dict[str, object]]:
    """Return a row a start: means over the seeds, and the paired difference to the original."""
    n = len(found)
    for place in range(len(found[0])):
        pairs = [seed[place] for seed in found]
        losses = [outcome.loss for _, outcome in pairs]
        accuracies = [outcome.accuracy for _, outcome in pairs]
        excess = [loss - seed[0][1].loss for loss, seed in zip(losses, found, strict=True)]
        first = pairs[0][0]
        yield {
            "from": first.source,
            "seeds": n,
            "chain_ratio_weights": mean([start.chain_ratio for start, _ in pairs]),
            "ratio_float32": mean([start.ratio for start, _ in pairs]),
            "relative_error": mean([start.relative_error for start, _ in pairs]),
            "val_loss": statistics.mean(losses),
            "val_loss_sd": statistics.stdev(losses),
            "accuracy": statistics.mean(accuracies),
            "accuracy_sd": statistics.stdev(accuracies),
            "loss_above_original": statistics.mean(excess),
            "loss_above_original_half_width": half_width(excess),
        }


def mean(values: list[float | None]) -> float | None:
    """Return the mean of what is known of every seed."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def main(quick: bool = False) -> Path:
    """Write ``results/transfer.csv``; quick: two seeds, one chain, one ratio."""
    torch.set_num_threads(1)
    n_seeds, chains = (2, CHAINS[-1:]) if quick else (SEEDS, CHAINS)
    ratios: tuple[float | None, ...] = (8.0,) if quick else RATIOS
    found = []
    for seed in range(n_seeds):
        with tempfile.TemporaryDirectory() as folder:
            pretrain(Path(folder), seed)
            outcomes = [
                (start._replace(weights=None), fine_tune(start.weights, seed))
                for start in starts(Path(folder), chains, ratios)
            ]
        found.append(outcomes)
        sys.stderr.write(f"seed {seed}: {[round(outcome.loss, 4) for _, outcome in outcomes]}\n")
    return write("transfer_quick" if quick else "transfer", list(rows_of(found)))


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
