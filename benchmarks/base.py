"""Fine-tunes with and without the model they began from: ``python -m benchmarks.base [NAME ...]``.

========= ============================================================ ========== ===========
name      training                                                     parameters checkpoints
========= ============================================================ ========== ===========
cnn-tune  the CNN of `benchmarks.runs`, from its last step, lr 5e-5    0.36 M     10
fine-tune the GPT of `benchmarks.runs`, from its last step, lr 5e-5    5.3 M      10
========= ============================================================ ========== ===========

Weights and buffers alone. A base model changes the first frame and no restored bit, which is checked, so
that both archives of a setting have one divergence. The last column of ``results/base.csv`` interpolates the
ratio at a mean divergence of .003 nats.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import inshrink_core
from benchmarks import runs, train_char_gpt
from benchmarks.evaluators import digits
from benchmarks.interpolation import ratio_at
from benchmarks.results import DATA, write
from benchmarks.training import train
from inshrink_core.chain import Archive

SETTINGS = (
    ("lattice", {}),
    ("lattice", {"gamma": 0.0}),
    ("lattice", {"gamma": 0.0, "coarseness": 10.0}),
    ("lattice", {"gamma": 0.0, "coarseness": 60.0}),
    ("lattice", {"gamma": 0.0, "coarseness": 150.0}),
    ("lattice", {"gamma": 0.0, "coarseness": 400.0}),
    ("lossless", {}),
)
TARGET = 0.003


class Tuned(NamedTuple):
    """A fine-tune, and the checkpoint it began from."""

    run: Path
    base: Path


def cnn_tune() -> Tuned:
    """Return the fine-tune of the CNN; trains the CNN first where it is not there."""
    base = runs.cnn_adamw() / f"step_{runs.CNN_SAVED_AT[-1]:06d}.pt"

    def build() -> torch.nn.Module:
        model = digits.DigitsNet()
        model.load_state_dict(torch.load(base, weights_only=True)["model"])
        return model

    recipe = replace(
        runs.cnn_recipe(
            lambda model: torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.99), weight_decay=0.05)
        ),
        seed=13,
        build=build,
        saved_at=runs.FINE_TUNE_SAVED_AT,
        warmup=20,
        floor=0.1,
    )
    return Tuned(train(recipe, DATA / "cnn-tune"), base)


def fine_tune() -> Tuned:
    """Return the fine-tune of the GPT."""
    base = runs.char_gpt() / f"step_{train_char_gpt.STEPS:06d}.pt"
    return Tuned(runs.fine_tune(), base)


TUNED = {"cnn-tune": cnn_tune, "fine-tune": fine_tune}


def measured(name: str, tuned: Tuned) -> Iterator[dict[str, object]]:
    """Yield a row for each setting, without and with the base."""
    run = inshrink_core.open(tuned.run)
    rows: list[dict[str, object]] = []
    for codec, settings in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            archives: dict[bool, Archive] = {}
            figures: dict[bool, dict[str, object]] = {}
            for based in (False, True):
                target = Path(folder) / f"{based}.inshrink"
                report = inshrink_core.compress(
                    run,
                    target,
                    codec=codec,
                    config=settings,
                    optimizer="drop",
                    base=tuned.base if based else None,
                )
                archives[based] = Archive.open(target)
                figures[based] = {
                    "ratio_weights": report.size.ratio_weights,
                    "bytes": report.size.nbytes,
                    "first_frame_bytes": report.size.frames[0].info.nbytes,
                    "base": report.size.base.name if report.size.base else "",
                }
            _require_same(archives[False], archives[True])
            compared = inshrink_core.compare(archives[True], run, trust_run=True)
        rows += [
            {
                "run": name,
                "codec": codec,
                "settings": " ".join(f"{key}={value:g}" for key, value in settings.items()),
                **figures[based],
                "mean_divergence": compared.mean_divergence,
                "max_divergence": compared.max_divergence,
            }
            for based in (False, True)
        ]
    for row in rows:
        alike = [
            (other["mean_divergence"], other["ratio_weights"])
            for other in rows
            if other["codec"] == "lattice" and other["base"] == row["base"] and "gamma" in other["settings"]
        ]
        yield row | {"ratio_at_target": ratio_at(alike, TARGET) if row["codec"] == "lattice" else None}


def _require_same(plain: Archive, based: Archive) -> None:
    """Refuse to go on where a base model changed a restored bit."""
    views = plain.sequential(), based.sequential()
    for step in plain.steps:
        one, other = (view[step].state_dict() for view in views)
        if not all(torch.equal(tensor, other[name]) for name, tensor in one.items()):
            raise RuntimeError(f"step {step} differs with its base")


def main() -> None:
    """Measure the fine-tunes named, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TUNED))
    names = parser.parse_args().names or list(TUNED)
    print(write("base", [row for name in names for row in measured(name, TUNED[name]())]))


if __name__ == "__main__":
    main()
