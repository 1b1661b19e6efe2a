"""How well a model's own samples tell what a restore costs: ``--evaluator auto`` beside held-out data.

Small models of `transformers` (extra ``hf``) are trained on the Python documentation's text, by characters,
or on scikit-learn's digits. Their checkpoints are compressed by the lattice at several coarsenesses, and each
restored step is judged twice: on held-out data, and on samples of the last checkpoint, as ``--evaluator
auto`` does. ``results/own_samples.csv`` has a row for each model, step and coarseness: both costs and their
ratio, 1 where the samples tell it exactly, more where a restore costs less than they tell. The evaluator's
corrections were chosen on the models that say ``tuned on``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import inshrink_core
from benchmarks.results import write
from inshrink_core.evaluate import Evaluation
from inshrink_core.evaluate.own_samples import evaluator_of, prepare
from inshrink_core.lab.tasks.characters import encode_corpus, sample_windows
from inshrink_core.lab.tasks.digits import split_digits
from inshrink_core.metrics import Direction

COARSENESSES = (0.25, 0.5, 1.0, 2.0, 4.0)
N_STEPS, N_SAVES = 400, 8
CONTEXT, BATCH = 64, 32


class Model(NamedTuple):
    """A model, how a batch of it is made, and whether the evaluator was tried on it while it was written."""

    build: Callable[[], Any]
    batch: Callable[[torch.Generator | None], dict[str, Tensor]]
    is_tuned: bool


def text(generator: torch.Generator | None) -> dict[str, Tensor]:
    """Return windows of the training text, or those of the held-out text, with the next characters."""
    training, validation, _ = encode_corpus()
    source, n = (training, BATCH) if generator is not None else (validation, 128)
    inputs, targets = sample_windows(source, n, CONTEXT, generator or torch.Generator().manual_seed(1))
    return {"input_ids": inputs, "labels": targets}


def masked(generator: torch.Generator | None) -> dict[str, Tensor]:
    """Return windows, of which a sixth of the characters is to be told."""
    batch = text(generator)
    hidden = (
        torch.rand(batch["input_ids"].shape, generator=generator or torch.Generator().manual_seed(2)) < 0.15
    )
    labels = torch.where(hidden, batch["input_ids"], -100)
    mask = encode_corpus()[2]
    return {"input_ids": batch["input_ids"].masked_fill(hidden, mask), "labels": labels}


def digits(generator: torch.Generator | None) -> dict[str, Tensor]:
    """Return images of 8 × 8 pixels and what they show."""
    images, labels, held_images, held_labels = split_digits()
    if generator is None:
        return {"pixel_values": held_images.reshape(-1, 1, 8, 8), "labels": held_labels}
    chosen = torch.randint(len(images), (BATCH,), generator=generator)
    return {"pixel_values": images[chosen].reshape(-1, 1, 8, 8), "labels": labels[chosen]}


def models() -> dict[str, Model]:
    """Return the models by name."""
    import transformers as t

    n = encode_corpus()[2]
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    patches = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    gpt2 = t.GPT2Config(vocab_size=n, n_positions=128, n_embd=128, n_layer=2, n_head=4)
    llama = t.LlamaConfig(vocab_size=n, max_position_embeddings=128, num_key_value_heads=2, **small)
    bert = t.BertConfig(vocab_size=n + 1, max_position_embeddings=128, **small)
    resnet = t.ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=10,
    )
    resnet.image_size = 8
    return {
        "gpt2": Model(lambda: t.GPT2LMHeadModel(gpt2), text, True),
        "vit": Model(lambda: t.ViTForImageClassification(t.ViTConfig(**small, **patches)), digits, False),
        "llama": Model(lambda: t.LlamaForCausalLM(llama), text, False),
        "bert": Model(lambda: t.BertForMaskedLM(bert), masked, False),
        "resnet": Model(lambda: t.ResNetForImageClassification(resnet), digits, True),
    }


def logits_and_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return predictions, a row each that has a label, and their mean cross-entropy."""
    labels = batch["labels"].flatten()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    rows = logits.flatten(0, -2)[labels >= 0]
    return rows, functional.cross_entropy(rows, labels[labels >= 0])


def train(one: Model, folder: Path, seed: int) -> Any:
    """Train a model and save its checkpoints as a Trainer does; return it."""
    torch.manual_seed(seed)
    model = one.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, N_STEPS + 1):
        logits_and_loss(model, one.batch(generator))[1].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % (N_STEPS // N_SAVES) == 0:
            model.save_pretrained(folder / f"checkpoint-{step}")
            torch.save(optimizer.state_dict(), folder / f"checkpoint-{step}" / "optimizer.pt")
    return model.eval()


@torch.no_grad()
def held_out(model: nn.Module, one: Model, state: dict[str, Tensor]) -> Evaluation:
    """Judge a state on held-out data."""
    model.load_state_dict(state, strict=False)
    model.tie_weights()  # type: ignore[operator]
    rows, loss = logits_and_loss(model, one.batch(None))
    return _evaluation(float(loss), torch.log_softmax(rows.float(), -1))


def _evaluation(loss: float, rows: Tensor, correction: float = 1.0) -> Evaluation:
    return Evaluation(
        metric="loss",
        direction=Direction.LOWER,
        value=loss,
        metrics={"loss": loss},
        log_probs=rows.numpy(),
        correction=correction,
    )


def measured(name: str, one: Model, seed: int) -> Iterator[dict[str, object]]:
    """Yield a row for each step and coarseness of one training."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        model = train(one, folder, seed)
        run = inshrink_core.open(folder)
        prepared = Path(scratch) / "prepared"
        prepared.mkdir()
        prepare(run).write(prepared)
        ask = evaluator_of(prepared)

        def own(state: dict[str, Tensor]) -> Evaluation:
            found = ask(state)
            return _evaluation(float(found["loss"]), found["log_probs"], found["correction"])

        truths = {
            step: (held_out(model, one, run[step].state_dict()), own(run[step].state_dict())) for step in run
        }
        for coarseness in COARSENESSES:
            archive = Path(scratch) / f"{coarseness}.inshrink"
            inshrink_core.compress(run, archive, config={"coarseness": coarseness})
            opened = inshrink_core.open(archive)
            for step, (true, auto) in truths.items():
                state = opened[step].state_dict()
                cost = true.restore_cost(held_out(model, one, state))
                told = auto.restore_cost(own(state))
                yield {
                    "model": name,
                    "chosen_on": "tuned on" if one.is_tuned else "judging",
                    "seed": seed,
                    "step": step,
                    "coarseness": coarseness,
                    "cost": cost,
                    "cost_by_samples": told,
                    "ratio": told / cost if told is not None and cost else math.nan,
                }


def main() -> None:
    """Measure every model that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    rows = []
    for name, one in models().items():
        if asked.models and name not in asked.models:
            continue
        for seed in range(asked.seeds):
            found = list(measured(name, one, seed))
            rows += found
            ratios = [row["ratio"] for row in found if isinstance(row["ratio"], float)]
            spread = statistics.quantiles(ratios, n=10)
            print(
                json.dumps({"model": name, "seed": seed, "median": statistics.median(ratios)}),
                spread,
                flush=True,
            )
    print(write("own_samples", rows))


if __name__ == "__main__":
    main()
