"""Shaped rounding beside plain: bits at equal restore cost, excess at equal bits, and time.

``results/shaping.csv`` has four kinds of rows:

- ``cost``: a run of each task, saved as the task says, is compressed with plain and with shaped rounding at
  several coarsenesses, optimizer state as by default. *bits* are real bytes of the blocks of matrices, the
  keyframe's included, over weights and frames; *cost* is what a restore costs, the divergence (mean squared
  difference for regression) over the loss, mean over every second frame.
- ``at``: bits at an equal cost of `COST`, on lines through the points nearest to it in logarithms, and
  plain's over shaped's.
- ``excess``: rehearsals of nine restores, optimizer state exact; mean and half width over seeds.
- ``time``: ns a weight of rounding, of rounding shaped, and of the two with matched gain, in one process,
  of the thread's own time, best of several in turn; and of sketches with their factors.

The constants of shaping were chosen on the tasks of `TUNED`; the others only judge. Runs and costs are kept
in ``data/shaping``, finished trainings of rehearsals in ``data/rehearsal``, and are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import inshrink_core
from benchmarks.rehearsal import FOLDER as REHEARSALS
from benchmarks.restore_cost import _expected_rise, _outputs
from benchmarks.results import DATA, kept, renew
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainWriter, FrameEncoder, archive_size
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import TensorRole
from inshrink_core.codecs.foretold import bits_of
from inshrink_core.codecs.shaping import Fed, grown, shaped_changes
from inshrink_core.execution import recycling
from inshrink_core.lab.failing import Schedule, Setup, isolated, train_restored
from inshrink_core.lab.tasks import find_task
from inshrink_core.ops.lattice import Gain, Lattice, gain_grades, round_to_lattice

FOLDER = DATA / "shaping"
TUNED: Final = ("char-rnn", "char-conv", "char-conv-adamw", "regression")
TASKS: Final = (*TUNED, "digits-vit")
COST: Final = 0.003
COARSENESSES: Final = (0.7, 1.0, 1.5, 2.5, 4.0)
EVERY: Final = 2


def exact_run(name: str) -> Path:
    """Return the archive of an uninterrupted training, stored bit for bit; trained once."""
    task, identity = find_task(name)
    path = FOLDER / f"{identity.replace('/', '-')}.inshrink"
    if not path.exists():
        schedule = Schedule.of(task, n_restores=0)
        chain = make_chain_config("", "lossless", {}, "exact", 32, "cpu", 1)
        made = FOLDER / "training.inshrink"
        with isolated(1):
            train_restored(Setup(task=task, schedule=schedule, device="cpu"), 0, made, chain)
        made.rename(path)
    return path


def measure_cost(name: str, settings: Mapping[str, Any], coarseness: float) -> list[dict[str, object]]:
    """Compress the run of a task once, and judge it."""
    source, made = exact_run(name), FOLDER / "compressed.inshrink"
    shutil.rmtree(made, ignore_errors=True)
    originals = Archive.open(source).sequential()
    config = make_chain_config("", "lattice", {**settings, "coarseness": coarseness}, None, 32, "cpu", 1)
    with isolated(1), ArchiveWriter(made, create=True) as writer:
        chain = ChainWriter(writer, config)
        chain.initial_memory = FrameEncoder(config).look_ahead(originals.steps, originals.__getitem__)
        begun = time.perf_counter()
        for step in originals.steps:
            chain.append(originals[step])
        seconds = time.perf_counter() - begun
    archive = Archive.open(made).sequential()
    size = archive_size(archive)
    matrices = [
        row
        for frame in size.frames
        for row in frame.tensors
        if row.spec.role is TensorRole.WEIGHT and len(row.spec.shape) >= 2
    ]
    task, _ = find_task(name)
    costs = []
    with isolated(1):
        for step in archive.steps[::EVERY]:
            model = task.build()
            pair = []
            for one in (originals, archive):
                model.load_state_dict(one[step].state_dict())
                pair.append(_outputs(task, model.eval()))
            costs.append(_expected_rise(*pair) / abs(pair[0][0]))
    return [
        {
            "kind": "cost",
            "task": name,
            "tuned_on": name in TUNED,
            "setting": setting_text(settings),
            "coarseness": coarseness,
            "bits": 8 * sum(row.nbytes for row in matrices) / sum(row.spec.numel for row in matrices),
            "cost": math.fsum(costs) / len(costs),
            "seconds": seconds,
        }
    ]


def setting_text(settings: Mapping[str, Any]) -> str:
    """Return how a setting is called."""
    return f"shaping={settings['shaping']}" if "shaping" in settings else "plain"


def bits_at(points: Sequence[tuple[float, float]], cost: float) -> float | None:
    """Return the bits at a cost, on the line through the two nearest points in logarithms.

    Examples
    --------
    >>> round(bits_at([(0.001, 4.0), (0.004, 2.0)], 0.002), 3)
    2.828
    """
    known = sorted((c, b) for c, b in points if c > 0)
    for (c0, b0), (c1, b1) in itertools.pairwise(known):
        if c0 <= cost <= c1:
            return b0 * (b1 / b0) ** (math.log(cost / c0) / math.log(c1 / c0))
    return None


def at_equal_cost(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return the bits of each setting of each task at the cost, and those of plain over them."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["task"] == task:
                points.setdefault(row["setting"], []).append((float(row["cost"]), float(row["bits"])))
        plain = bits_at(points.get("plain", []), COST)
        for setting, known in points.items():
            bits = bits_at(known, COST)
            gain = None if bits is None or plain is None else plain / bits
            found.append(
                {
                    "kind": "at",
                    "task": task,
                    "tuned_on": task in TUNED,
                    "setting": setting,
                    "coarseness": "",
                    "bits": bits,
                    "cost": COST,
                    "gain": gain,
                }
            )
    return found


def rehearse(task: str, settings: Mapping[str, Any], coarseness: float, seeds: int) -> dict[str, object]:
    """Run what is not kept of a rehearsal, and return its row."""
    found = inshrink_core.rehearse(
        task, REHEARSALS, config={**settings, "coarseness": coarseness}, optimizer="exact", seeds=seeds
    )
    sys.stderr.write(f"{task} {settings} {coarseness}: {found.ratio_weights} {found.excess}\n")
    return {
        "kind": "excess",
        "task": task,
        "tuned_on": task in TUNED,
        "setting": setting_text(settings),
        "coarseness": coarseness,
        "bits": 32 / found.ratio_weights if found.ratio_weights else None,
        "seeds": len(found.restored),
        "excess": found.excess,
        "excess_half_width": found.excess_half_width,
    }


def _best(calls: Mapping[str, Callable[[], object]], n: int = 7) -> dict[str, float]:
    """Return the least time of each of several calls, which take turns."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(n):
        for name, call in calls.items():
            begun = time.thread_time()  # whatever else the cores do
            call()
            best[name] = min(best[name], time.thread_time() - begun)
    return best


def times(rows: int = 1024, columns: int = 1024) -> list[dict[str, object]]:
    """Measure ns a weight, plain and shaped in turn."""
    torch.manual_seed(0)
    moment = torch.randn(rows, 12) @ torch.randn(12, columns) + 0.3 * torch.randn(rows, columns)
    known = grown(None, lambda: (moment, 0.0), "auto")
    both = None if known is None else known.fed()
    if known is None or both is None:
        raise RuntimeError("a moment tells something")
    one = Fed(both.columns, None)
    values = torch.randn(rows * columns)
    base = values + 0.02 * torch.randn(rows * columns)
    lattice = Lattice(2.0**-10, 256, float(np.float32(4.0)), (1 << 24) - 1)
    integers = round_to_lattice(base, torch.zeros(rows * columns, dtype=torch.int32), None, lattice).integers
    gain = Gain(base, gain_grades(values, base, integers, lattice, 1).abs())

    def found(how: str) -> object:
        one = grown(None, lambda: (moment, 0.0), how)
        sides = () if one is None else (one.columns, one.rows)
        return [side.factors for side in sides if side is not None]

    def shaped(gain: Gain | None, fed: Fed) -> object:
        changes = shaped_changes(values, integers, lattice, gain, fed)
        return round_to_lattice(values, integers, None, lattice, changes)

    measured: dict[str, Callable[[], object]] = {
        "round": lambda: round_to_lattice(values, integers, None, lattice),
        "round, shaped": lambda: shaped(None, one),
        "round, shaped both ways": lambda: shaped(None, both),
        "choose as auto does": lambda: (bits_of.cache_clear(), known.chosen(0.5)),
        "round, matched gain": lambda: (
            gain_grades(values, base, integers, lattice, 1),
            round_to_lattice(values, integers, None, lattice, gain),
        ),
        "round, matched gain, shaped": lambda: shaped(gain, one),
        "sketch and factors": lambda: found("on"),
        "sketches and factors, both ways": lambda: found("both"),
        "sketches and factors, auto": lambda: found("auto"),
    }
    with recycling():  # as a chain
        best = _best(measured)
    return [
        {
            "kind": "time",
            "task": f"{rows} x {columns}",
            "setting": name,
            "coarseness": "",
            "ns_per_weight": 1e9 * seconds / (rows * columns),
        }
        for name, seconds in best.items()
    ]


SETTINGS: Final[tuple[dict[str, Any], ...]] = ({}, *({"shaping": how} for how in ("on", "both", "auto")))
REHEARSED: Final[dict[str, tuple[tuple[dict[str, Any], float], ...]]] = {
    "regression": (
        *(({}, 2.5), ({"shaping": "on"}, 1.7), ({"shaping": "both"}, 1.6)),
        *(({}, 4.0), ({"shaping": "on"}, 2.7), ({"shaping": "both"}, 2.7)),
    ),
    "char-rnn": (({}, 5.0), ({"shaping": "on"}, 3.2)),
}
"""At about equal bits."""


def main(tasks: Sequence[str] = TASKS, rehearsed: Sequence[str] = tuple(REHEARSED), seeds: int = 3) -> Path:
    """Measure what is not kept, and write the table; rows of what was measured before stay."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    costs: list[dict[str, object]] = []
    for task, settings, coarseness in itertools.product(tasks, SETTINGS, COARSENESSES):
        key = {"task": find_task(task)[1], "coarseness": coarseness, "cost": "every second", **settings}
        costs += kept("shaping", task, key, functools.partial(measure_cost, task, settings, coarseness))
    rows = costs + at_equal_cost(costs)
    rows += [
        rehearse(task, settings, coarseness, seeds)
        for task in rehearsed
        for settings, coarseness in REHEARSED[task]
    ]
    return renew("shaping", rows + times(), ("kind", "task", "setting", "coarseness"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=TASKS, help="whose cost is measured")
    parser.add_argument("--rehearsed", nargs="*", default=tuple(REHEARSED), help="which are rehearsed")
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
