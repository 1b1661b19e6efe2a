"""The runs that the benchmarks measure, each trained on first use: ``python -m benchmarks.runs [NAME ...]``.

========== ================================================================ ========== ===========
name       training                                                         parameters checkpoints
========== ================================================================ ========== ===========
digits-cnn the bundled sample: a CNN on scikit-learn's digits, AdamW        45 k       24
cnn-adamw  a larger CNN on larger, distorted digits, AdamW, 1,500 steps     0.36 M     20
cnn-sgd    the same with SGD, Nesterov momentum .9                          0.36 M     20
char-gpt   GPT on Python's documentation, AdamW, 800 steps                  5.3 M      16
fine-tune  that GPT, from its last step, on source text of Python, lr 5e-5  5.3 M      10
========== ================================================================ ========== ===========
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import inshrink_core
from benchmarks import train_char_gpt
from benchmarks.evaluators import digits, source_text
from benchmarks.results import DATA
from benchmarks.training import Recipe, train
from inshrink_core.lab.tasks.characters import corpus, sample_windows

CNN_BATCH = 64
CNN_SAVED_AT = tuple(range(75, 1501, 75))
FINE_TUNE_SAVED_AT = tuple(range(20, 201, 20))
SOURCE_CHARACTERS = 1_500_000
"""The first of the standard library's modules, by name, as far as this."""


def _digits_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw distorted training digits."""
    images, labels, _, _ = digits.digits()
    index = torch.randint(len(images), (CNN_BATCH,), generator=generator)
    return digits.distort(images[index], generator), labels[index]


def cnn_recipe(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Recipe:
    """Return the CNN's training under one optimizer."""
    return Recipe(
        seed=11,
        build=digits.DigitsNet,
        optimizer=optimizer,
        batch=_digits_batch,
        loss=functional.cross_entropy,
        saved_at=CNN_SAVED_AT,
        warmup=75,
        floor=0.01,
        evaluator=Path(digits.__file__),
        metric="accuracy",
        direction="higher",
    )


def cnn_adamw() -> Path:
    """Return the folder of the CNN trained with AdamW."""
    recipe = cnn_recipe(
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05)
    )
    return train(recipe, DATA / "cnn-adamw")


def cnn_sgd() -> Path:
    """Return the folder of the CNN trained with SGD."""
    recipe = cnn_recipe(
        lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
    )
    return train(recipe, DATA / "cnn-sgd")


def char_gpt() -> Path:
    """Return the folder of the GPT trained from scratch."""
    return train_char_gpt.train(DATA / "char-gpt")


def _source_tokens() -> tuple[Tensor, Tensor, int]:
    """Return training and held-out tokens of source text, in the alphabet of the GPT, and its size."""
    alphabet = sorted(set(corpus()))
    index = {character: i for i, character in enumerate(alphabet)}
    text = ""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= SOURCE_CHARACTERS:
            break
    tokens = torch.tensor([index[character] for character in text if character in index])
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:], len(alphabet)


def fine_tune() -> Path:
    """Return the folder of the fine-tune; trains the GPT first where it is not there."""
    base = char_gpt() / f"step_{train_char_gpt.STEPS:06d}.pt"
    training, held, n_characters = _source_tokens()

    def build() -> nn.Module:
        model = train_char_gpt.model(n_characters)
        model.load_state_dict(torch.load(base, weights_only=True)["model"])
        return model

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return sample_windows(training, train_char_gpt.BATCH, train_char_gpt.CONTEXT, generator)

    recipe = Recipe(
        seed=12,
        build=build,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=5e-5, betas=(0.9, 0.99), weight_decay=0.1
        ),
        batch=batch,
        loss=lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        saved_at=FINE_TUNE_SAVED_AT,
        warmup=20,
        floor=0.1,
        evaluator=Path(source_text.__file__),
        metric="loss",
        direction="lower",
        files={
            "text.npz": {
                "held": held.to(torch.uint8).numpy()
                if n_characters <= 256
                else held.numpy().astype(np.int32),
                "n_characters": n_characters,
                "width": train_char_gpt.WIDTH,
                "depth": train_char_gpt.DEPTH,
                "heads": train_char_gpt.HEADS,
                "context": train_char_gpt.CONTEXT,
            }
        },
    )
    return train(recipe, DATA / "fine-tune")


def sample() -> Path:
    """Return the run that comes with Inshrink."""
    return Path(inshrink_core.sample("digits-cnn"))


RUNS: dict[str, Callable[[], Path]] = {
    "digits-cnn": sample,
    "cnn-adamw": cnn_adamw,
    "cnn-sgd": cnn_sgd,
    "char-gpt": char_gpt,
    "fine-tune": fine_tune,
}


def evaluator_of(name: str) -> str | None:
    """Return the evaluator to pass on; None where the run's settings name it."""
    return f"{train_char_gpt.__file__}:evaluate" if name == "char-gpt" else None


def open_run(name: str) -> inshrink_core.Run:
    """Train a run if need be, and open it."""
    return inshrink_core.open(RUNS[name]())


def main() -> None:
    """Train what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], help="by default all")
    for name in parser.parse_args().names or RUNS:
        sys.stderr.write(f"{RUNS[name]()}\n")


if __name__ == "__main__":
    main()
