"""A character GPT, trained on the documentation, that is fine-tuned on source code with AdamW."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor, nn

from inshrink_core.errors import NotFoundError
from inshrink_lab.tasks.char_gpt import CharGPTTask
from inshrink_lab.tasks.characters import corpus
from inshrink_lab.tasks.shipped import on_cpu

_MODULES: Final = (
    *("_pydecimal", "argparse", "inspect", "pickle", "shutil"),
    *("subprocess", "tarfile", "threading", "typing"),
)
"""Modules of Python's library; every installation has their sources: 0.7 million characters."""

_PRETRAINING_SEED: Final = 23
"""The same model is fine-tuned with every seed."""


@functools.cache
@on_cpu()
def encode_sources() -> tuple[Tensor, Tensor]:
    """Return training and validation tokens, in the documentation's alphabet.

    The last tenth of each module validates. A character that the alphabet lacks becomes a question mark.

    Raises
    ------
    NotFoundError
        Python is installed without the sources of its library.
    """
    index = {character: i for i, character in enumerate(sorted(set(corpus())))}
    training, validation = [], []
    for name in _MODULES:
        tokens = [index.get(character, index["?"]) for character in _source(name)]
        split = len(tokens) * 9 // 10
        training += tokens[:split]
        validation += tokens[split:]
    return torch.tensor(training), torch.tensor(validation)


def _source(name: str) -> str:
    spec = find_spec(name)
    source = getattr(spec.loader, "get_source", lambda _: None)(name) if spec is not None else None
    if not isinstance(source, str):
        raise NotFoundError(
            f"the source of Python's own module '{name}' is not installed",
            remedy="use a Python that has the sources of its library, or another task",
        )
    return source


class PretrainingTask(CharGPTTask):
    """Pre-training task: a GPT on the documentation."""

    width, depth, heads, context = 96, 3, 3, 64
    peak_learning_rate, warmup, floor = 3e-3, 30, 0.1


def pretrained(n_steps: int) -> nn.Module:
    """Return a character GPT after some steps on the documentation.

    Parameters
    ----------
    n_steps
        Number of AdamW steps.

    Notes
    -----
    It is trained once per process, on one thread and with a separate random state. The call draws as many
    numbers from torch's global generator as building a model does, whether it trains or not.
    """
    model: nn.Module = PretrainingTask().build()
    model.load_state_dict(_pretrained_state(n_steps))
    return model


@functools.cache
@on_cpu()
def _pretrained_state(n_steps: int) -> dict[str, Tensor]:
    task, threads = PretrainingTask(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_PRETRAINING_SEED)
        torch.set_num_threads(1)  # their number changes the last bits
        try:
            return _trained(task, task.build(), n_steps).state_dict()
        finally:
            torch.set_num_threads(threads)


def _trained(task: PretrainingTask, model: nn.Module, n_steps: int) -> nn.Module:
    optimizer = task.optimizer(model)
    for step in range(1, n_steps + 1):
        factor = task.learning_rate_factor(step, n_steps)
        optimizer.param_groups[0]["lr"] = task.peak_learning_rate * factor
        generator = torch.Generator().manual_seed(_PRETRAINING_SEED + step)
        optimizer.zero_grad()
        task.loss(model, task.batch(step, generator)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


class CharFinetuneTask(CharGPTTask):
    """Fine-tunes all weights of one pre-trained model at a small learning rate, for every seed."""

    name = "char-finetune"
    n_steps = 500

    pretraining_steps = 250
    """After these steps the model spells correctly, and still has much to learn about code."""
    context = PretrainingTask.context
    peak_learning_rate, warmup, floor = 3e-4, 30, 0.1

    def build(self) -> nn.Module:
        """Return the pre-trained model."""
        return pretrained(self.pretraining_steps)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Return the sources."""
        return encode_sources()
