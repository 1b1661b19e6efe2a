"""Runs of which the training script knows whose every optimizer state is, and a count of what is attributed.

Each kind trains a small model on the CPU, saves nine checkpoints as the library or script named does, and
returns the names of the parameters by optimizer and number.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from inshrink_core.formats import open_run
from inshrink_core.formats.matching.registered import saved_names

N_SAVES: Final = 9
EVERY: Final = 20
_VOCABULARY, _LENGTH = 64, 16

Truth = list[list[str]]
"""Names of the parameters of each optimizer, by number."""


class Counted(NamedTuple):
    """Parameters with state, and how many of them are attributed right and wrong."""

    tensors: int
    right: int
    wrong: int


def names_of(optimizer, model):
    """Return the names of an optimizer's parameters by number."""
    saved = saved_names(model)
    called = {id(parameter): saved[name] for name, parameter in model.named_parameters()}
    return [called[id(one)] for group in optimizer.param_groups for one in group["params"]]


def tokens(n, seed):
    """Return sequences of a random walk over tokens, which can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (n, _LENGTH), generator=generator) * 5 + 1
    starts = torch.randint(0, _VOCABULARY, (n, 1), generator=generator)
    return (starts + steps.cumsum(1)) % _VOCABULARY


def _language(model_of, **options):
    """Return what trains a language model of transformers with its Trainer."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(512, 0)]
    return lambda folder: _trainer(folder, model_of, rows, **options)


def _trainer(folder, model_of, rows, **options):
    import transformers

    torch.manual_seed(0)
    model = model_of(transformers)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": N_SAVES * EVERY,
        "save_steps": EVERY,
        "per_device_train_batch_size": 16,
        "learning_rate": 2e-3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**settings | options), train_dataset=rows
    )
    trainer.train()
    return [[name.replace(".default.", ".") for name in names_of(trainer.optimizer, model)]]


def gpt2(layers=3, d=64, frozen=0):
    """Return what builds a GPT-2, whose head is tied to its embedding."""

    def build(library):
        config = library.GPT2Config(
            vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=d, n_layer=layers, n_head=2
        )
        model: nn.Module = library.GPT2LMHeadModel(config)
        for block in list(model.transformer.h)[:frozen]:  # type: ignore[union-attr, arg-type]
            block.requires_grad_(False)
        return model

    return build


def _llama(library):
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    config = library.LlamaConfig(
        vocab_size=_VOCABULARY,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **sizes,
    )
    model: nn.Module = library.LlamaForCausalLM(config)
    return model


def _lora(folder):
    import peft
    import transformers

    base = folder.parent / f"{folder.name}-base"
    torch.manual_seed(0)
    _llama(transformers).save_pretrained(base)

    def adapted(library):
        model = library.LlamaForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.0)
        found: nn.Module = peft.get_peft_model(model, config)
        return found

    return _language(adapted, learning_rate=1e-2)(folder)


def _lightning(folder):
    import lightning

    class Both(lightning.LightningModule):
        """A generator and a discriminator of equal shapes; the discriminator's optimizer is first."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = _mlp(3, 32), _mlp(3, 32)

        def configure_optimizers(self):
            return [
                torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
                torch.optim.Adam(self.generator.parameters(), lr=1e-3),
            ]

        def training_step(self, batch, _):
            second, first = self.optimizers()
            (x,) = batch
            for optimizer, net, goal in (
                (second, self.discriminator, x.tanh()),
                (first, self.generator, x.cos()),
            ):
                optimizer.zero_grad()
                self.manual_backward((net(x) - goal).square().mean())
                optimizer.step()

    torch.manual_seed(0)
    model = Both()
    data = torch.utils.data.TensorDataset(torch.randn(16 * EVERY * N_SAVES, 32))
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=2 * EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=2 * EVERY * N_SAVES, accelerator="cpu", logger=False, callbacks=[saving],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    return [names_of(one, model) for one in trainer.optimizers]


def _mlp(n, d):
    return nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(d, d), nn.Tanh())))


class Block(nn.Module):
    """A residual block with two norms, and buffers that nobody lists."""

    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("average", torch.zeros(d))

    def forward(self, x):
        """Add what the block computes."""
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)  # type: ignore[has-type]
        return x + self.down(torch.tanh(self.up(self.norm(x))))


Groups = Callable[[list[tuple[str, nn.Parameter]]], list[list[tuple[str, nn.Parameter]]]]
Save = Callable[[Path, int, nn.Module, Any], None]


def _plain(model_of, groups, save, optimizer=None):
    """Return what trains a network of the benchmark's own on a regression."""

    def make(folder):
        torch.manual_seed(0)
        random.seed(0)
        model = model_of()
        d = next(model.parameters()).shape[-1]
        rows = groups([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        kind = optimizer or (lambda held: torch.optim.AdamW(held, lr=2e-3))
        trained = kind([{"params": [p for _, p in row]} for row in rows])
        mixing = torch.randn(d, d) / d**0.5
        for step in range(1, N_SAVES * EVERY + 1):
            x = torch.randn(32, d)
            loss = (model(x) - torch.sin(2 * x @ mixing)).square().mean()
            trained.zero_grad()
            loss.backward()
            trained.step()
            if step % EVERY == 0:
                save(folder, step, model, trained)
        return [[name for row in rows for name, _ in row]]

    return make


def _as_torch(folder, step, model, optimizer, order=list):
    weights = dict(order(model.state_dict().items()))
    state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / f"step_{step}.pt")


def _as_safetensors(folder, step, model, optimizer):
    from safetensors.torch import save_file

    place = folder / f"checkpoint-{step}"
    place.mkdir()
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, place / "model.safetensors"
    )
    torch.save(optimizer.state_dict(), place / "optimizer.pt")


def _reversed(folder):
    """Train a GPT-2 whose optimizer was given its parameters from last to first, beside a true config."""
    import transformers

    torch.manual_seed(0)
    model: Any = gpt2()(transformers)
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=2e-3)
    for step in range(1, N_SAVES * EVERY + 1):
        batch = tokens(16, step)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            place = folder / f"checkpoint-{step}"
            model.save_pretrained(place)
            torch.save(optimizer.state_dict(), place / "optimizer.pt")
    return [names_of(optimizer, model)]


def _decayed(rows):
    return [[one for one in rows if one[1].ndim > 1], [one for one in rows if one[1].ndim < 2]]


def _shuffled(rows):
    random.shuffle(rows)
    return [rows[:5], rows[5:]]


def _by_depth(rows):
    """Return a group a layer, the last layer first, each with its own decay."""
    layers: dict[str, list[Any]] = {}
    for row in rows:
        layers.setdefault(row[0].split(".")[0], []).append(row)
    return [group for layer in reversed(list(layers.values())) for group in _decayed(layer)]


def _half_frozen():
    model = nn.Sequential(*(Block(32) for _ in range(6)))
    for one in list(model)[1::2]:
        one.requires_grad_(False)
    return model


def _blocks():
    return nn.Sequential(*(Block(48) for _ in range(4)))


def _sgd(held):
    return torch.optim.SGD(held, lr=0.05, momentum=0.9)


LIBRARIES: Final[Mapping[str, Callable[[Path], Truth]]] = {
    "gpt2": _language(gpt2()),
    "gpt2-frozen": _language(gpt2(4, 48, frozen=2)),
    "gpt2-reversed": _reversed,
    "lora": _lora,
    "two-optimizers": _lightning,
}
PLAIN: Final[Mapping[str, Callable[[Path], Truth]]] = {
    "sgd": _plain(_blocks, lambda rows: [rows], _as_torch, _sgd),
    "shuffled": _plain(lambda: _mlp(6, 32), _shuffled, _as_torch),
    "groups-by-depth": _plain(_blocks, _by_depth, _as_torch),
    "half-frozen": _plain(_half_frozen, lambda rows: [rows], _as_torch),
    "sorted-torch": _plain(_blocks, _decayed, partial(_as_torch, order=sorted)),
    "sorted-safetensors": _plain(_blocks, lambda rows: [rows], _as_safetensors),
}
"""What writes a run, and returns its truth: the libraries, and loops in PyTorch."""


def _counted(run, truth):
    last = next(p for p in reversed(run._parsed.values()) if p.slots)
    prefixes = ["optimizer.state", *(f"optimizer.{i}.state" for i in range(1, len(truth)))]
    wanted = {
        f"{prefix}.{number}": name
        for prefix, names in zip(prefixes, truth, strict=True)
        for number, name in enumerate(names)
    }
    held = [slot.key for slot in last.slots if slot.shape is not None]
    right = sum(last.owners.get(key) == wanted[key] for key in held)
    wrong = sum(key in last.owners and last.owners[key] != wanted[key] for key in held)
    return Counted(len(held), right, wrong)


def measure(name, parent):
    """Train one kind, and count what is attributed by headers, and by values, too."""
    folder = parent / name
    folder.mkdir()
    truth = (LIBRARIES | PLAIN)[name](folder)
    run = open_run(folder)
    return _counted(run, truth), _counted(run.matched(), truth)
