"""What a second look at a restore tells: how long the damage of plain and of shaped rounding lasts.

Each task is trained once, uninterrupted. At some of its saves the matrices are rounded, plainly and shaped
(``auto``, or ``both`` where that says off). What that costs is measured in four ways, each over the loss:

- ``cost``: the restore cost as it is promised, E: the divergence of the predictions on the task's held-out
  data, or the mean squared difference where the loss is one;
- ``after K``: E between two trainings of K steps on the same batches, from the rounded and from the exact
  weights; ``gap K`` is the difference of their losses, which has more noise;
- ``later``: E of the same error added to the weights of the next save, which a saver could measure there;
- ``lasting``: E of the error without its part in the 16 sharpest directions of each matrix's inputs, which a
  saver could measure at once.

``results/second_look.csv`` has the mean of each over frames, and what is left of ``cost`` in the others.
Beside them stands what ``auto`` goes by: the share of plain rounding's cost that remains at a damping of .1.
Trained states are kept in ``--folder``, and not trained again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.restore_cost import _expected_rise, _outputs
from benchmarks.results import DATA, renew
from benchmarks.shaping import TUNED
from inshrink_core.codecs.lattice.spacing import geometric_mean, lattice_of, new_spacing
from inshrink_core.codecs.shaping import BARE, Shaping, grown, shaped_changes
from inshrink_core.lab.failing import Schedule, Setup, Training, isolated
from inshrink_core.lab.tasks import Task, find_task
from inshrink_core.ops.lattice import round_to_lattice

FOLDER = DATA / "second_look"
STEPS: Final = (5, 20)
FRAMES: Final = (5, 9, 14)
ARMS: Final[dict[str, tuple[tuple[str, float], ...]]] = {
    "regression": (("plain", 1.0), ("auto", 1.0), ("plain", 2.0), ("auto", 2.0)),
    "char-conv": (("plain", 2.0), ("both", 2.3)),
    "char-rnn": (("plain", 2.0), ("auto", 2.0)),
    "denoise": (("plain", 1.0), ("auto", 1.0)),
}
"""Settings and coarsenesses."""

States = Mapping[int, Mapping[str, Any]]


def states_of(name: str, setup: Setup, folder: Path) -> States:
    """Return the states of an uninterrupted training at its saves; trained once."""
    path = folder / f"{name}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        training, at, found = Training(setup, 0, 0), 0, {}
        for step in setup.schedule.saved_at:
            training.advance(range(at + 1, step + 1), None, None)
            at, found[step] = step, copy.deepcopy(training.state())
        torch.save(found, path)
    states: States = torch.load(path, weights_only=True)
    return states


class Rounding:
    """Rounds the matrices of a state as a chain with a constant spacing does."""

    def __init__(self, task: Task, states: States, step: int) -> None:
        named = list(task.build().named_parameters())
        self._states, self._step = states, step
        self._places = {name: i for i, (name, one) in enumerate(named) if one.dim() >= 2}
        steps = list(states)
        moved = {
            name: [
                float((states[b]["model"][name] - states[a]["model"][name]).square().mean())
                for a, b in itertools.pairwise(steps)
            ]
            for name in self._places
        }
        numels = {name: states[step]["model"][name].numel() for name in self._places}
        total = sum(numels[name] * statistics.fmean(moved[name]) for name in moved)
        self.movement = math.sqrt(total / sum(numels.values()))
        squares = {name: self._moment(step, name, squared=True) for name in self._places}
        means = {name: float(one.mean()) for name, one in squares.items()}
        middle = geometric_mean(list(means.values()))
        self._factor = {name: (middle / one) ** 0.33 if one > 0 else 1.0 for name, one in means.items()}
        self.known: dict[str, Shaping | None] = {}
        for name in self._places:
            known = None
            for before in steps[: steps.index(step)]:
                moment = self._moment(before, name)
                if 8 <= moment[0].numel() <= 1 << 14:
                    known = grown(known, lambda moment=moment: (moment, 0.0), "auto")
            self.known[name] = known

    def _moment(self, step: int, name: str, *, squared: bool = False) -> Tensor:
        state = self._states[step]["optimizer"]["state"][self._places[name]]
        first: Tensor = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
        if not squared:
            return first
        return state["exp_avg_sq"] if "exp_avg_sq" in state else first.square()

    def rounded(self, setting: str, coarseness: float) -> dict[str, Tensor]:
        """Return the state with its matrices on lattices."""
        found = {name: one.clone() for name, one in self._states[self._step]["model"].items()}
        for name, known in self.known.items():
            values, width = found[name].flatten(), coarseness * self.movement * self._factor[name]
            fed = None
            if known is not None and setting != "plain":
                fed = known.fed() if setting == "both" else known.chosen(self.movement / width)
            rms = float(values.square().mean().sqrt())
            spacing = new_spacing(width * (1.0 if fed is None else fed.coarser), rms)
            if spacing is None:
                continue
            lattice, zeros = lattice_of(spacing, "float32"), torch.zeros(values.numel(), dtype=torch.int32)
            changes = None if fed is None else shaped_changes(values, zeros, lattice, None, fed)
            integers = round_to_lattice(values, zeros, None, lattice, changes).integers
            found[name] = (integers.float() * lattice.unit).view(found[name].shape)
        return found

    def bare(self) -> dict[str, float]:
        """Return the share of the cost that remains at the least damping, by side, a mean over weights."""
        found: dict[str, float] = {}
        for side in ("columns", "rows"):
            known = {name: getattr(one, side) for name, one in self.known.items() if one is not None}
            shares = {name: one.factors[BARE].share for name, one in known.items() if one is not None}
            numels = {name: self._states[self._step]["model"][name].numel() for name in shares}
            total = math.fsum(numels[name] * share for name, share in shares.items())
            found[f"share of {side}"] = total / max(1, sum(numels.values()))
        return found

    def lasting(self, rounded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a rounded state without the errors in the sharpest directions of inputs."""
        found = dict(rounded)
        for name, known in self.known.items():
            if known is None:
                continue
            (factors, *_) = known.columns.factors.values()
            directions = torch.from_numpy(factors.directions).double()
            basis = torch.linalg.qr(directions[:, directions.norm(dim=0) > 0])[0].float()
            exact = self._states[self._step]["model"][name]
            error = (rounded[name] - exact).flatten(1)
            found[name] = exact + (error - error @ basis @ basis.T).view(exact.shape)
        return found


def looked_at(
    setup: Setup, states: States, step: int, arms: Sequence[tuple[str, float]]
) -> list[dict[str, Any]]:
    """Measure the arms at one save."""
    task, steps = setup.task, list(states)
    following = states[steps[steps.index(step) + 1]]["model"]
    rounding, exact = Rounding(task, states, step), states[step]["model"]

    def outputs(weights: Mapping[str, Tensor]) -> tuple[float, Tensor, bool]:
        model = task.build()
        model.load_state_dict(weights)
        return _outputs(task, model.eval())

    def trained(weights: Mapping[str, Tensor]) -> dict[int, tuple[float, Tensor, bool]]:
        training, at, found = Training(setup, 0, 0), 0, {}
        training.set_state({**copy.deepcopy(dict(states[step])), "model": weights})
        for more in STEPS:
            training.advance(range(step + at + 1, step + more + 1), None, None)
            at, found[more] = more, outputs(copy.deepcopy(training.model.state_dict()))
        return found

    now, then, onward = outputs(exact), outputs(following), trained(exact)
    rows = []
    for setting, coarseness in arms:
        rounded = rounding.rounded(setting, coarseness)
        moved = {name: one + (rounded[name] - exact[name]) for name, one in following.items()}
        after = trained(rounded)
        row: dict[str, Any] = {"setting": setting, "coarseness": coarseness, **rounding.bare()}
        row["cost"] = _expected_rise(now, outputs(rounded)) / abs(now[0])
        for more in STEPS:
            row[f"after {more}"] = _expected_rise(onward[more], after[more]) / abs(onward[more][0])
            row[f"gap {more}"] = (after[more][0] - onward[more][0]) / abs(onward[more][0])
        row["later"] = _expected_rise(then, outputs(moved)) / abs(then[0])
        row["lasting"] = _expected_rise(now, outputs(rounding.lasting(rounded))) / abs(now[0])
        rows.append(row)
    return rows


def measure(name: str, folder: Path, frames: Sequence[int]) -> list[dict[str, object]]:
    """Return the rows of a task: means over saves."""
    task, _ = find_task(name)
    setup = Setup(task=task, schedule=Schedule.of(task), device="cpu")
    with isolated(1):
        states = states_of(name, setup, folder)
        found = [looked_at(setup, states, list(states)[i], ARMS[name]) for i in frames]
    rows: list[dict[str, object]] = []
    for same in zip(*found, strict=True):
        row = {"task": name, "tuned_on": name in TUNED, **same[0], "frames": len(frames)}
        figures = [key for key in same[0] if key not in ("setting", "coarseness")]
        row |= {key: statistics.fmean(one[key] for one in same) for key in figures}
        after = figures[figures.index("cost") + 1 :]
        row |= {f"{key} over cost": row[key] / row["cost"] for key in after}
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    return rows


def main(tasks: Sequence[str] = tuple(ARMS), folder: Path = FOLDER, frames: Sequence[int] = FRAMES) -> Path:
    """Measure task by task, and write the table after each."""
    path = Path()
    for name in tasks:
        path = renew("second_look", measure(name, folder, frames), ("task", "setting", "coarseness"))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=tuple(ARMS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where trained states are kept")
    parser.add_argument("--frames", type=int, nargs="*", default=FRAMES, help="numbers of the saves")
    main(**vars(parser.parse_args()))
