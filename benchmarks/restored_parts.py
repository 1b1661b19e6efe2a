"""What of a restored state makes a training end elsewhere: weights, first moments or second moments.

A task is trained uninterrupted and with restores from an archive of the defaults, where only some parts of
what is restored come out of the archive, and the others are put back exactly. With ``held`` the octaves of
second moments are held after restores, too, as all were once. The control, ``moved``, restores nothing: each
weight is moved by at most 2⁻⁹ of itself, which is less than a last bit of bfloat16. Last bits of float32,
the control of `rehearse`, take some 400 of these 1,000 steps to grow to the distance that two trainings keep:
they say nothing of a perturbation in the first steps, where these trainings are least stable.

All arms of a seed share its uninterrupted training, so what is lucky there moves them all.
``results/restored_parts.csv`` has a row an arm: excess of the metric, half-width of its 95 % interval, and
each seed's. Finished trainings are kept in ``--folder``; several processes may share one (``--seeds``).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from benchmarks import gpt_sizes
from benchmarks.results import DATA, renew
from inshrink_core.codecs.moments.codec import MomentsCodec
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated, open_saver
from inshrink_core.lab.rehearsal import Rehearse, half_width
from inshrink_core.lab.tasks import find_task

FOLDER = DATA / "restored_parts"
PARTS: Final = {"weights": "model", "first": "exp_avg", "second": "exp_avg_sq"}
ARMS: Final = (
    *("weights+first+second", "weights+first+second+held"),
    *("weights+first", "second", "second+held", "moved"),
)
_MOVED: Final = 2.0**-9
OTHER_SEED: Final = 12345
_SEED_STRIDE: Final = 1_000_003


def mixed(
    exact: Mapping[str, Any], decoded: Mapping[str, Any], parts: Sequence[str], seed: int, step: int
) -> dict[str, Any]:
    """Return an exact state with some parts of a decoded one."""
    state: dict[str, Any] = copy.deepcopy(dict(exact))
    if "weights" in parts:
        state["model"] = copy.deepcopy(decoded["model"])
    if "moved" in parts:
        generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + step)
        for weight in state["model"].values():
            if weight.is_floating_point():
                weight.mul_(1 + (2 * torch.rand(weight.shape, generator=generator) - 1) * _MOVED)
    for key, moments in state["optimizer"]["state"].items():
        found = decoded["optimizer"]["state"][key]
        for part in ("first", "second"):
            if part in parts:
                moments[PARTS[part]] = found[PARTS[part]].clone()
    return state


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold octaves after a restore."""
    plan = MomentsCodec.plan
    with mock.patch.object(MomentsCodec, "plan", lambda *given: plan(*given)._replace(after_restore=False)):
        yield


def train(setup: Setup, seed: int, arm: str | None, archive: Path) -> list[float]:
    """Return the metric at each save of a training; without an arm, of the uninterrupted one."""
    schedule, chain = setup.schedule, Rehearse(task="char-gpt").chain_config(device="cpu", threads=1)
    parts = () if arm is None else arm.split("+")
    saves = arm not in (None, "moved")
    shutil.rmtree(archive, ignore_errors=True)
    training, at, metrics = Training(setup, seed, seed), 0, []
    saver = open_saver(archive, training, chain) if saves else None
    for step in schedule.saved_at:
        training.advance(range(at + 1, step + 1), None if saver is None else saver.record, None)
        at = step
        metrics.append(setup.task.evaluate(training.model))
        if saver is not None:
            saver.save(step)
        if arm is None or step not in schedule.restored_at:
            continue
        exact = training.state()
        training = Training(setup, seed, OTHER_SEED)
        decoded: Mapping[str, Any] = exact
        if saver is not None:
            saver.close()
            saver = open_saver(archive, training, chain)
            saver.restore(step)
            decoded = training.state()
        training.set_state(mixed(exact, decoded, parts, seed, step))
    if saver is not None:
        saver.close()
    shutil.rmtree(archive, ignore_errors=True)
    return metrics


def kept(setup: Setup, seed: int, arm: str | None, folder: Path) -> list[float]:
    """Train what no process has trained yet."""
    restores = setup.schedule.n_restores
    name = f"{setup.task.name}-{seed}-" + ("uninterrupted" if arm is None else f"{arm}-{restores}")
    path = folder / f"{name}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with isolated(1), held() if arm is not None and "held" in arm else contextlib.nullcontext():
            metrics = train(setup, seed, arm, folder / f"{name}.inshrink")
        path.write_text(json.dumps(metrics))
        sys.stderr.write(f"{name}: {metrics[-1]:.4f}\n")
    found: list[float] = json.loads(path.read_text())
    return found


def main(
    task: str, seeds: Sequence[int], restores: int | None, arms: Sequence[str], folder: Path, **short: int
) -> Path:
    """Write ``results/restored_parts.csv``: the arms of a task that were asked for, beside what is there."""
    name = f"{gpt_sizes.__file__}:{task}" if hasattr(gpt_sizes, task) else task
    found, _ = find_task(name)
    schedule = Schedule.of(found, short.get("steps"), short.get("saves"), restores)
    setup = Setup(task=found, schedule=schedule, device="cpu")
    rows: list[dict[str, object]] = []
    for arm in arms:
        excesses = [
            kept(setup, seed, arm, folder)[-1] / kept(setup, seed, None, folder)[-1] - 1 for seed in seeds
        ]
        rows.append(
            {
                "task": found.name,
                "decoded": arm,
                "restores": schedule.n_restores,
                "seeds": len(seeds),
                "excess": statistics.fmean(excesses),
                "half_width": half_width(excesses),
                "excesses": [round(one, 5) for one in excesses],
            }
        )
    return renew("restored_parts_quick" if short else "restored_parts", rows, ("task", "decoded", "restores"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", default="GPT18", help="of benchmarks/gpt_sizes.py, or a shipped one")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--restores", type=int)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed")
    given = parser.parse_args()
    if given.quick:
        main("GPT05", [0], 1, given.arms, given.folder / "quick", steps=40, saves=4)
    else:
        main(given.task, given.seeds, given.restores, given.arms, given.folder)
