"""What predicts the excess: candidates for a restore's cost, measured at every restore of a rehearsal.

Each training is restored nine times from its archive, optimizer state exact, with lattice at several
coarsenesses and Inshrinkerator at a number of bins. At every restore the state that training goes on from
is judged against the state that was saved. Candidates, summed over the restores of a training:

- ``divergence``: expected rise of the loss, E: mean KL of the predictions, nats, or the mean squared
  difference where the loss is one;
- ``relative``: E over the loss;
- ``movement``: E over the same figure between this save and the one before (the previous checkpoint);
- ``to_go``: E over what the uninterrupted training still gains from here to its end;
- ``slope``: E over what it gained a step since the save before: steps lost;
- ``rise``, ``rise_to_go``: the measured rise of the loss in the place of E, over the loss and over what is
  to be gained;
- ``gap``: difference of the loss after `GAP_STEPS` more steps of both, on the same batches, over the loss;
- ``fisher``: half the squared error weighted with Adam's second moments, over the loss;
- ``noise``: squared error of the weights over their squared movement since the save before.

``results/restore_cost.csv`` has a row a training. ``results/restore_cost_rank.csv`` has a row a candidate,
over the trainings of lattice and over all: the rank correlation (Spearman) of its sums with the excess, over
the tasks that the default was chosen on and over the others, and the largest ratio, between tasks, of what it
sums to at an excess of one percent. Finished trainings are kept in ``data/restore_cost``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.results import DATA, write
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.lab import failing
from inshrink_core.lab.failing import Schedule, Setup, isolated, train_restored, train_uninterrupted
from inshrink_core.lab.tasks import Task, find_task

FOLDER = DATA / "restore_cost"
TASKS = (
    *("char-conv", "char-conv-adamw", "char-rnn", "digits-cnn", "digits-resnet", "digits-vit", "denoise"),
    "char-gpt",
)
TUNED = ("char-gpt", "char-conv", "digits-cnn")
"""Tasks that defaults were chosen on; the others only judge."""
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lattice", {"coarseness": 1.5}),
    ("lattice", {"coarseness": 4}),
    ("lattice", {"coarseness": 9}),
    ("inshrinkerator", {"bins": 10}),
)
GAP_STEPS: Final = 20


class _Seen(TorchFunctionMode):
    """Notes what losses are taken of while a task evaluates its model."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.is_classes = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the arguments of the losses; within this, the mode is off."""
        if func is functional.cross_entropy:
            rows = args[0].movedim(1, -1).flatten(0, -2) if args[0].dim() > 1 else args[0][None]
            self.rows.append(functional.log_softmax(rows.double(), dim=1))
        elif func is functional.mse_loss:
            self.is_classes = False
            self.rows.append(args[0].double().flatten())
        return func(*args, **(kwargs or {}))


def _outputs(task: Task, model: torch.nn.Module) -> tuple[float, Tensor, bool]:
    """Return the metric of a model, what it predicts, and whether that is classes."""
    with torch.no_grad(), _Seen() as seen:
        value = float(task.evaluate(model))
    return value, torch.cat(seen.rows), seen.is_classes


def _expected_rise(first: tuple[float, Tensor, bool], second: tuple[float, Tensor, bool]) -> float:
    """Return by how much the loss of the second is expected to be above that of the first."""
    if first[2]:
        return float((first[1].exp() * (first[1] - second[1])).sum(1).mean())
    return float((first[1] - second[1]).square().mean())


def _after(training: Any, step: int, n_steps: int) -> float:
    """Return the metric of a copy of a training after some more steps; draws from torch are undone."""
    with torch.random.fork_rng():
        copied = copy.deepcopy(training)
        copied.advance(range(step + 1, step + 1 + n_steps), None, None)
        return float(copied.task.evaluate(copied.model))


def _weighted(training: Any, restored: Any) -> float | None:
    """Return half the squared error of the weights weighted with Adam's second moments; None without."""
    total, seen = 0.0, False
    for before, after in zip(training.model.parameters(), restored.model.parameters(), strict=True):
        moment = training.optimizer.state.get(before, {}).get("exp_avg_sq")
        if moment is not None:
            seen = True
            total += 0.5 * float(
                (moment.double() * (after.detach() - before.detach()).double().square()).sum()
            )
    return total if seen else None


class _Watched(failing._Failing):  # type: ignore[misc]
    """Judges every restored state against the one that was saved."""

    found: list[dict[str, Any]]

    def save(self, training: Any, step: int) -> Any:
        """Save, and measure where training is restored."""
        task = training.task
        now = _outputs(task, training.model)
        before = getattr(self, "_before", None)
        weights = torch.cat([p.detach().flatten().double() for p in training.model.parameters()])
        returned = super().save(training, step)
        if step in self._setup.schedule.restored_at:
            after = _outputs(task, returned.model)
            error = torch.cat([p.detach().flatten().double() for p in returned.model.parameters()]) - weights
            room = min(GAP_STEPS, self._setup.schedule.n_steps - step)
            self.found.append(
                {
                    "step": step,
                    "metric": now[0],
                    "expected_rise": _expected_rise(now, after),
                    "stale": None if before is None else _expected_rise(now, before[1]),
                    "stale_steps": None if before is None else step - before[0],
                    "rise": after[0] - now[0],
                    "gap": _after(returned, step, room) - _after(training, step, room),
                    "fisher": _weighted(training, returned),
                    "error": float(error.square().sum()),
                    "movement": None if before is None else float((weights - before[2]).square().sum()),
                }
            )
        self._before = step, now, weights
        return returned


def measure(name: str, codec: str, config: Mapping[str, Any], seed: int, optimizer: str) -> None:
    """Run one restored training and its uninterrupted twin, unless they are kept."""
    task, identity = find_task(name)
    setup = Setup(
        task=task,
        schedule=Schedule.of(task),
        device="cpu",
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    with isolated(1):
        path = FOLDER / f"{identity.replace('/', '-')}-uninterrupted-{seed}.json"
        if not path.exists():
            result = train_uninterrupted(setup, seed)
            path.write_text(json.dumps({"steps": result.steps, "metrics": result.metrics}))
        text = "-".join(f"{key}{value}" for key, value in config.items()) or "default"
        path = FOLDER / f"{identity.replace('/', '-')}-{codec}-{text}-{optimizer}-{seed}.json"
        if not path.exists():
            chain = make_chain_config("", codec, dict(config), optimizer, 32, "cpu", 1)
            found: list[dict[str, Any]] = []
            kind = type("_Recorded", (_Watched,), {"found": found})
            original, failing._Failing = failing._Failing, kind  # type: ignore[misc]
            try:
                result = train_restored(setup, seed, FOLDER / "archives" / path.stem, chain)
            finally:
                failing._Failing = original  # type: ignore[misc]
            path.write_text(
                json.dumps(
                    {
                        "identity": identity.replace("/", "-"),
                        **{"task": name, "codec": codec, "config": dict(config), "seed": seed},
                        "metrics": result.metrics,
                        "ratio_weights": result.raw_weights / result.weights_nbytes,
                        "ratio_total": result.raw_total / result.nbytes,
                        "restores": found,
                    }
                )
            )
    sys.stderr.write(f"{path.stem}\n")


def candidates(kept: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what each candidate sums to over the restores of a training; None where it is not told."""
    end = kept["plain"]["metrics"][-1]

    def total(term: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        terms = [term(one) for one in kept["restores"]]
        return math.fsum(t for t in terms if t is not None) if None not in terms else None

    def over(value: str, scale: str) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda one: None if one[value] is None or not one[scale] else one[value] / one[scale]

    gained = {"to_go": lambda one: max(one["metric"] - end, 1e-9)}
    before = dict(zip(kept["plain"]["steps"][1:], kept["plain"]["metrics"], strict=False))

    def steps_lost(one: Mapping[str, Any]) -> float | None:
        slope = (before[one["step"]] - one["metric"]) / one["stale_steps"] if one["stale_steps"] else 0.0
        return one["expected_rise"] / slope if slope > 0 else None

    return {
        "divergence": total(lambda one: one["expected_rise"]),
        "relative": total(over("expected_rise", "metric")),
        "movement": total(over("expected_rise", "stale")),
        "to_go": total(lambda one: one["expected_rise"] / gained["to_go"](one)),
        "slope": total(steps_lost),
        "rise": total(over("rise", "metric")),
        "rise_to_go": total(lambda one: one["rise"] / gained["to_go"](one)),
        "gap": total(over("gap", "metric")),
        "fisher": total(over("fisher", "metric")) or None,
        "noise": total(over("error", "movement")),
    }


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the rank correlation of pairs; None below four."""
    if len(pairs) < 4:
        return None
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for rank, at in enumerate(order):
        ranks[at] = float(rank)
    return ranks


def _at_excess(points: Sequence[tuple[float, float]], excess: float) -> float | None:
    """Return the sum at an excess, on a line through the points nearest to it in logarithms."""
    usable = sorted((e, c) for c, e in points if e > 0 and c > 0)
    for low, high in itertools.pairwise(usable):
        if low[0] <= excess <= high[0] and high[0] > low[0]:
            share = math.log(excess / low[0]) / math.log(high[0] / low[0])
            return math.exp(math.log(low[1]) + share * math.log(high[1] / low[1]))
    return None


def tables(trainings: Sequence[Mapping[str, Any]]) -> Path:
    """Write both tables."""
    rows = []
    for kept in trainings:
        sums = candidates(kept)
        rows.append(
            {
                "task": kept["task"],
                "tuned_on": kept["task"] in TUNED,
                "codec": kept["codec"],
                "setting": ", ".join(f"{name}={value}" for name, value in kept["config"].items()),
                "seed": kept["seed"],
                "ratio_weights": kept["ratio_weights"],
                "excess": kept["metrics"][-1] / kept["plain"]["metrics"][-1] - 1,
                **sums,
            }
        )
    everything = [(name, of) for of in ("lattice", "all codecs") for name in candidates(trainings[0])]
    ranks = [_rank(name, of, rows) for name, of in everything]
    write("restore_cost_rank", ranks)
    return write("restore_cost", rows)


def _rank(name: str, of: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a candidate, over the trainings of one codec or of all."""
    known = [one for one in rows if one[name] is not None and of in (one["codec"], "all codecs")]
    row: dict[str, Any] = {"of": of, "candidate": name}
    for label, tuned in (("tuned", True), ("judging", False)):
        pairs = [(one[name], one["excess"]) for one in known if one["tuned_on"] is tuned]
        row |= {f"n_{label}": len(pairs), f"rank_correlation_{label}": spearman(pairs)}
    by_task: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in known:
        by_task[one["task"]].append((one[name], one["excess"]))
    at = [at for points in by_task.values() if (at := _at_excess(points, 0.01)) is not None]
    return row | {"n_tasks_at_1_percent": len(at), "spread_at_1_percent": max(at) / min(at) if at else None}


def kept_trainings() -> list[dict[str, Any]]:
    """Return every kept training with its uninterrupted twin."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        if "uninterrupted" not in path.stem:
            kept = json.loads(path.read_text())
            plain = FOLDER / f"{kept['identity']}-uninterrupted-{kept['seed']}.json"
            found.append(kept | {"plain": json.loads(plain.read_text())})
    return found


def main(
    quick: bool = False, tasks: Sequence[str] = TASKS, seeds: Sequence[int] = (0, 1), optimizer: str = "exact"
) -> Path:
    """Train what is not kept, and write the tables of all that is; quick: one small task, two settings."""
    for seed in (0,) if quick else seeds:
        for name in ("regression",) if quick else tasks:
            for codec, config in SETTINGS[:2] if quick else SETTINGS:
                measure(name, codec, config, seed, optimizer)
    return tables(kept_trainings())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--optimizer", default="exact")
    parser.add_argument("--kept", action="store_true", help="write what is kept, train nothing")
    arguments = vars(parser.parse_args())
    if arguments.pop("kept"):
        arguments["tasks"] = ()
    main(**arguments)
