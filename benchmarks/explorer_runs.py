"""Five small trainings that the explorer was not made on, as their frameworks write them.

``python -m benchmarks.explorer_runs FOLDER`` trains a GPT with a tied head by the Trainer of transformers, an
LSTM by SGD with momentum, a network under Lightning, one that is saved by torch.distributed.checkpoint, and
one whose evaluator imports a package that is not there. The Trainer and Lightning are asked for only where
their runs are written; each run takes some seconds. `benchmarks.explorer_tasks` does its five tasks on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

DIGITS = """
from pathlib import Path

import numpy as np
import torch
from torch import nn
{imported}

def network():
    return nn.Sequential(
        nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10)
    )


def evaluate(state_dict):
    model = network()
    model.load_state_dict({{name.removeprefix("net."): value for name, value in state_dict.items()}})
    with np.load(Path(__file__).with_name("evaluation.npz")) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    with torch.inference_mode():
        log_probs = torch.log_softmax(model.eval()(images), -1)
    return {{
        "accuracy": (log_probs.argmax(-1) == labels).float().mean(),
        "loss": nn.functional.nll_loss(log_probs, labels),
        "log_probs": log_probs,
    }}
"""

TEXT = """
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 48)
        self.lstm = nn.LSTM(48, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 96)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


def evaluate(state_dict):
    model = Net()
    model.load_state_dict(state_dict)
    with np.load(Path(__file__).with_name("evaluation.npz")) as arrays:
        ids = torch.from_numpy(arrays["ids"])
    with torch.inference_mode():
        log_probs = torch.log_softmax(model.eval()(ids[:, :-1]), -1).flatten(0, -2)
    return {"loss": nn.functional.nll_loss(log_probs, ids[:, 1:].flatten()), "log_probs": log_probs}
"""


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels to train on, and those of the sample run that are held out."""
    import inshrink_core

    with np.load(inshrink_core.sample("digits-cnn") / "digits-validation.npz") as arrays:
        images = torch.from_numpy(arrays["images"]).float().div(16).flatten(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    return images[:400], labels[:400], images[400:], labels[400:]


def text() -> Tensor:
    """Return printable characters of documentation that comes with Python, as lines of 65 numbers."""
    import pydoc_data.topics

    told = "".join(pydoc_data.topics.topics.values())[:260_000]
    ids = torch.tensor([min(max(ord(one) - 31, 0), 95) for one in told])
    return ids[: len(ids) // 65 * 65].view(-1, 65)


def network(source: str, name: str) -> nn.Module:
    """Return the model that an evaluator's source defines."""
    names: dict[str, Any] = {"__file__": "", "__name__": "run"}
    exec(compile(source, "evaluator", "exec"), names)
    model: nn.Module = names[name]()
    return model


def judged_on_digits(run: Path, imported: str = "") -> None:
    """Write the evaluator of a run, and what it is judged on."""
    _, _, images, labels = digits()
    (run / "evaluator.py").write_text(DIGITS.format(imported=imported).lstrip())
    np.savez(run / "evaluation.npz", images=images.numpy(), labels=labels.numpy())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, save: Callable[[int], None]) -> None:
    """Train on digits for 240 steps; save after each 20."""
    images, labels, *_ = digits()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 241):
        chosen = torch.randint(len(labels), (64,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if step % 20 == 0:
            save(step)


def trainer_gpt(run: Path) -> None:
    """A Trainer's GPT-2 whose head is its embedding: `checkpoint-N/`, no evaluator beside it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=96, n_layer=3, n_head=4)
    lines = [{"input_ids": one[:64], "labels": one[:64]} for one in text()[:2000]]
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=80,
        save_steps=10,
        logging_steps=5,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=lines).train()


def sgd_lstm(run: Path) -> None:
    """An LSTM by SGD with momentum: plain files of `torch.save`."""
    model = network(TEXT, "Net")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    lines = text()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 201):
        ids = lines[torch.randint(2000, (16,), generator=generator)]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 20 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, run / f"model_{step:04}.pt")
    (run / "evaluator.py").write_text(TEXT.lstrip())
    np.savez(run / "evaluation.npz", ids=lines[2000:2064].numpy())


def lightning_run(run: Path) -> None:
    """A network under Lightning: `epoch=E-step=S.ckpt`."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(DIGITS.format(imported=""), "network")

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    images, labels, *_ = digits()
    trainer = lightning.Trainer(
        max_epochs=10,
        callbacks=[ModelCheckpoint(dirpath=run, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))
    judged_on_digits(run)


def dcp_run(run: Path) -> None:
    """A network saved by torch.distributed.checkpoint: `step-N/`."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = network(DIGITS.format(imported=""), "network")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def save(step: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=run / f"step-{step}")

    trained(model, optimizer, save)
    judged_on_digits(run)


def missing_package(run: Path) -> None:
    """A network whose evaluator imports what is not installed."""
    model = network(DIGITS.format(imported=""), "network")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, run / f"step_{step}.pt")

    trained(model, optimizer, save)
    judged_on_digits(run, "from metrics_of_our_lab import accuracy\n")


RUNS: dict[str, Callable[[Path], None]] = {
    "trainer-gpt": trainer_gpt,
    "sgd-lstm": sgd_lstm,
    "lightning": lightning_run,
    "dcp": dcp_run,
    "missing-package": missing_package,
}


def main(folder: Path) -> None:
    """Write every run into a folder of its name."""
    for name, make in RUNS.items():
        torch.manual_seed(0)
        (folder / name).mkdir(parents=True)
        make(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
