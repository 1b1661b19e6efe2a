"""Optimizer state: what each way of storing it costs in bytes, and in loss after a restore.

One restore in the middle of a training, from the archive of the checkpoints so far, into a new model and a
new optimizer; then the training goes on with the batches that the uninterrupted one gets. *Rise* is the
loss after the restore less that of the uninterrupted training with the same seed: in mean over the batches
of the first 25 steps, and on validation data after 25 and 200 steps. The uninterrupted losses stand beside,
with their standard deviation over the seeds. ``strays_after_25`` is how far the weights are from the
uninterrupted ones after 25 steps, in units of the way that these went; noise in them counts whatever it does
to the loss. Other optimizers than Adam and SGD train the recurrent network.

Sizes are of the delta frames, every byte of a frame included, in bits a parameter of the model;
``ratio_chain`` has the keyframe too. What is finished is kept in ``data/optimizer`` and not run again.
``--tables`` prints what ``docs/optimizer.md`` shows.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import DATA, RESULTS, write
from benchmarks.resumed import FIRST, LATER, Experiment, Setting, measure, one_thread, train
from inshrink_core.execution.kept import key_digest
from inshrink_core.lab.tasks.char_gpt import CharGPTTask
from inshrink_core.lab.tasks.char_rnn import CharRNNTask
from inshrink_core.lab.tasks.denoise import DenoiseTask
from inshrink_core.lab.tasks.digits_cnn import DigitsCNNTask, DigitsCNNWithSGDTask


class SmallCharGPTTask(CharGPTTask):
    """The character GPT at 0.36 M parameters: a dozen resumed trainings in a few minutes."""

    name = "char-gpt-small"
    width, depth, heads, context = 96, 3, 4, 48
    batch_size = 24
    peak_learning_rate = 1e-3
    n_validation_windows = 128


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., NeurIPS 2023, algorithm 2): a momentum, and the sign of what it is mixed with."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter by the learning rate."""
        for group in self.param_groups:
            mixed, kept = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter -= group["lr"] * torch.sign(torch.lerp(parameter.grad, momentum, mixed))
                momentum.lerp_(parameter.grad, 1 - kept)


@dataclass(frozen=True)
class Other:
    """An optimizer and its peak learning rate."""

    make: Callable[..., torch.optim.Optimizer]
    peak: float
    matrices_alone: bool = False


OTHERS = {
    "Lion": Other(Lion, 4e-4),
    "Muon": Other(torch.optim.Muon, 2e-2, matrices_alone=True),
    "Adafactor": Other(torch.optim.Adafactor, 1e-2),
    "RMSprop": Other(torch.optim.RMSprop, 1e-3),
    "Adagrad": Other(torch.optim.Adagrad, 2e-2),
}


class OtherwiseTrained(CharRNNTask):
    """The recurrent network under another optimizer; vectors rest where that is for matrices alone."""

    def __init__(self, name: str) -> None:
        self.name = f"char-rnn, {name}"  # type: ignore[misc]
        self.trained_by = OTHERS[name]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        other = self.trained_by
        return other.make(
            [p for p in model.parameters() if p.ndim == 2 or not other.matrices_alone], lr=other.peak
        )


_CAP = {"alpha": 1.0}
"""Every residual threshold at ExCP's cap of 2.5 medians: its highest ratio."""

_PLAIN: Mapping[str, Any] = {"shaping": "off"}
"""How all rows round weights, so that they differ in optimizer state alone."""

_COARSE = ("lattice, plain, coarseness 4", "lattice", {**_PLAIN, "coarseness": 4.0})

_ADAM: tuple[Setting, ...] = (
    Setting("exact", "lossless", {}, "compressed", far=False),
    Setting("exact", "lossless", {}, "shaped", far=False),
    Setting("exact", "lossless", {}, "compact"),
    Setting("exact", "lossless", {}, "drop", far=False),
    Setting("lattice, plain", "lattice", _PLAIN, "compressed"),
    Setting("lattice, plain", "lattice", _PLAIN, "shaped"),
    Setting("lattice, plain, coarseness 2", "lattice", {**_PLAIN, "coarseness": 2.0}, "compressed"),
    Setting("lattice, plain, coarseness 2", "lattice", {**_PLAIN, "coarseness": 2.0}, "shaped"),
    Setting(*_COARSE, "exact", far=False),
    Setting(*_COARSE, "compressed"),
    Setting(*_COARSE, "compact"),
    Setting(*_COARSE, "drop", far=False),
    Setting("excp, published", "excp", {}, "exact"),
    Setting("excp, published, rANS", "excp", {"coder": "rans"}, "exact"),
    Setting("excp at its cap", "excp", _CAP, "exact"),
    Setting("excp at its cap, rANS", "excp", {**_CAP, "coder": "rans"}, "exact"),
)

_AGAINST_EXCP = tuple(
    setting._replace(far=False)
    for setting in _ADAM
    if setting.label in ("lattice, plain", "lattice, plain, coarseness 2", "excp, published")
    or setting == Setting(*_COARSE, "compressed")
)

_OTHER = tuple(
    Setting(label, codec, config, optimizer, far=False)
    for label, codec, config, optimizer, _ in _ADAM
    if (label, optimizer) in {("exact", "compressed"), ("exact", "compact"), ("lattice, plain", "compressed")}
)

_SGD = tuple(setting for setting in _ADAM if setting.codec != "excp")
"""ExCP has no rule for a momentum buffer."""


FULL = (
    Experiment(task=SmallCharGPTTask(), n_steps=1000, save_every=50, restored_at=500, settings=_ADAM),
    Experiment(task=CharRNNTask(), n_steps=600, save_every=30, restored_at=300, settings=_AGAINST_EXCP),
    Experiment(task=DenoiseTask(), n_steps=600, save_every=30, restored_at=300, settings=_AGAINST_EXCP),
    Experiment(task=DigitsCNNWithSGDTask(), n_steps=1200, save_every=60, restored_at=600, settings=_SGD),
    *(
        Experiment(task=OtherwiseTrained(name), n_steps=600, save_every=30, restored_at=300, settings=_OTHER)
        for name in OTHERS
    ),
)
QUICK = (
    Experiment(
        task=DigitsCNNTask(), n_steps=120, save_every=20, restored_at=60, settings=_ADAM, seeds=1, later=30
    ),
    Experiment(
        task=DigitsCNNWithSGDTask(),
        n_steps=120,
        save_every=20,
        restored_at=60,
        settings=_SGD,
        seeds=1,
        later=30,
    ),
)


def compare(experiment: Experiment) -> Iterator[dict[str, object]]:
    """Return one row a setting: sizes, rises over the seeds, and the noise of the seeds."""
    seeds = range(experiment.seeds)
    folders = [DATA / "optimizer" / f"{key_digest(experiment.key(seed))}" for seed in seeds]
    plain = [train(experiment, seed, folder) for seed, folder in zip(seeds, folders, strict=True)]
    for setting in experiment.settings:
        tried = [
            measure(experiment, setting, seed, folder) for seed, folder in zip(seeds, folders, strict=True)
        ]
        early = [_mean_rise(one, other) for one, other in zip(tried, plain, strict=True)]
        row: dict[str, object] = {
            "task": experiment.task.name,
            "weights": setting.label,
            "optimizer": "quantized" if setting.codec == "excp" else setting.optimizer,
        }
        row |= {name: statistics.fmean(one[name] for one in tried) for name in SIZES}
        row |= _spread("rise_first_25", early)
        row["strays_after_25"] = statistics.fmean(one["strays"] for one in tried)
        for name in ("first", "later") if all("later" in one for one in tried) else ("first",):
            rises = [one[name] - other[name] for one, other in zip(tried, plain, strict=True)]
            row |= _spread(f"rise_at_{FIRST if name == 'first' else experiment.later}", rises)
        row |= _noise(experiment, plain)
        sys.stderr.write(f"{row}\n")
        yield row


SIZES = ("bits_total", "bits_optimizer", "ratio_delta", "ratio_chain")


def _mean_rise(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean of the difference over the batches of the first steps; both saw the same ones."""
    pairs = zip(one["losses"][:FIRST], other["losses"][:FIRST], strict=True)
    return statistics.fmean(a - b for a, b in pairs)


def _spread(name: str, values: Sequence[float]) -> dict[str, object]:
    sd = statistics.stdev(values) if len(values) > 1 else ""
    return {name: statistics.fmean(values), f"{name}_sd": sd}


def _noise(experiment: Experiment, plain: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Return the losses without a failure: mean and standard deviation over the seeds."""
    early = [statistics.fmean(one["losses"][:FIRST]) for one in plain]
    return {
        **_spread("loss_first_25", early),
        **_spread(f"loss_at_{FIRST}", [one["first"] for one in plain]),
        **_spread(f"loss_at_{experiment.later}", [one["later"] for one in plain]),
        "seeds": experiment.seeds,
    }


def tables(path: Path) -> str:
    """Return the tables of ``docs/optimizer.md``, one for each training of a CSV file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        chosen = [row for row in rows if row["task"] == task]
        noise = " and ".join(chosen[0][f"loss_at_{at}_sd"] for at in (FIRST, LATER))
        parts.append(
            f"**{task}**, {chosen[0]['seeds']} seeds. Validation loss of the uninterrupted training after 25 "
            f"and {LATER} steps: {chosen[0][f'loss_at_{FIRST}']} and {chosen[0][f'loss_at_{LATER}']}; "
            f"standard deviation over the seeds {noise}.\n\n" + "\n".join([*_HEAD, *map(_line, chosen)])
        )
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "| weights | optimizer | bits | of them optimizer | ratio | rise over 25 steps | after 25 | after 200 |",
    "|---|---|---|---|---|---|---|---|",
)


def _line(row: Mapping[str, str]) -> str:
    """One line: sizes, then rises with their standard deviation over the seeds."""
    rises = [
        f"{float(row[name]):+.4f} ± {float(row[f'{name}_sd']):.4f}" if row[name] else "–"
        for name in ("rise_first_25", f"rise_at_{FIRST}", f"rise_at_{LATER}")
    ]
    sizes = [f"{float(row[name]):.2f}" for name in ("bits_total", "bits_optimizer")]
    cells = [row["weights"], row["optimizer"], *sizes, f"{float(row['ratio_delta']):.1f}", *rises]
    return f"| {' | '.join(cells)} |"


def main(quick: bool = False) -> Path:
    """Write ``results/optimizer.csv``; quick: one seed of the digits, half a minute."""
    with one_thread():
        rows = [row for experiment in (QUICK if quick else FULL) for row in compare(experiment)]
    return write("optimizer_quick" if quick else "optimizer", rows)


if __name__ == "__main__":
    if "--tables" in sys.argv[1:]:
        sys.stdout.write(tables(RESULTS / "optimizer.csv"))
    else:
        main(quick="--quick" in sys.argv[1:])
