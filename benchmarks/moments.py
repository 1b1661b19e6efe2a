"""Rules for moments: what the choices inside the moments codec cost, on the states of one training.

The run is that of ``benchmarks.optimizer``, seed 0; matrices alone. Bits are entropies of the integers of
delta frames, in mean over the frames, without the exponents of rows and columns; ``coded`` is the block.
*Error* of second moments is the standard deviation of log2(decoded / true), *lag* its mean; *projection* of
first moments is the sum of decoded times true values over the sum of the true ones' squares, both in units of
rows and columns, and *error* the sum of squared errors over the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.optimizer import FULL
from benchmarks.results import DATA, write
from benchmarks.resumed import one_thread, train
from inshrink_core.codecs.moments.block import Form, MomentsReference, pack
from inshrink_core.execution.kept import key_digest
from inshrink_core.ops.flat import sides
from inshrink_core.ops.moments import Codes, round_first, round_second, round_vector

UNITS = (2.0, 3.0, 4.0, 4.65)
"""Of first moments, in root mean squares; the last is the root of a typical second moment."""


def entropy(values: NDArray[Any], contexts: NDArray[Any] | None = None) -> float:
    """Return the empirical entropy in bits of all values together, given contexts or without."""
    if contexts is not None:
        return math.fsum(entropy(values[contexts == one]) for one in np.unique(contexts))
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def states(folder: Path) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return first and second moments of every matrix, save after save."""
    for path in sorted((folder / "run").glob("*.pt")):
        held = torch.load(path, weights_only=True)["optimizer"]["state"].values()
        yield [(one["exp_avg"], one["exp_avg_sq"]) for one in held if one["exp_avg"].dim() > 1]


class Tally:
    """Sums over tensors and frames."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.n = 0

    def add(self, n: int, **values: float) -> None:
        """Add one tensor of one frame."""
        self.n += n
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def row(self, what: str, rule: str) -> dict[str, object]:
        """Return means a parameter."""
        return {"moment": what, "rule": rule, **{k: v / self.n for k, v in self.sums.items()}}


def second(
    frames: list[list[tuple[torch.Tensor, torch.Tensor]]], rule: str, held: float
) -> dict[str, object]:
    """Measure one rule for second moments over the chain."""
    tally, before = Tally(), dict[int, MomentsReference]()
    for number, frame in enumerate(frames):
        for place, (_, squares) in enumerate(frame):
            values, old = squares.reshape(-1), before.get(place)
            known = None if old is None else old.codes
            if rule == "octaves":
                codes, form = round_vector(values, None if known is None else known.base), Form.OCTAVES
            else:
                codes, form = round_second(values, sides(tuple(squares.shape))[0], known, held), Form.FACTORED
            state = _state(squares, form, codes)
            if number and known is not None:
                change = (state.codes.elements - known.elements).numpy()
                off = (state.decoded().double() / squares).log2()[squares > 0].numpy()
                whole = 8 * len(pack(state, old))
                bits = entropy(change, None if rule == "octaves" else known.elements.numpy())
                n = squares.numel()
                tally.add(n, bits=bits, coded=whole, lag=n * off.mean(), error=n * off.std())
            before[place] = state
    return tally.row("second", f"{rule}, held to {held}" if rule != "octaves" else "octaves, not held")


def first(
    frames: list[list[tuple[torch.Tensor, torch.Tensor]]], unit: float, *, plain: bool
) -> dict[str, object]:
    """Measure one unit for first moments, rounded plainly or with the projection kept."""
    tally = Tally()
    for frame in frames[1:]:
        for values, squares in frame:
            exact = squares.double() + 1e-60
            scale = (exact.mean(1, keepdim=True) * exact.mean(0) / exact.mean()).sqrt()
            true = values / scale
            width, norm, n = unit * true.square().mean().sqrt(), float(true.square().sum()), values.numel()
            if plain:
                integers = (true / width).round()
                kept, coded = integers * width, integers.numpy()
            else:
                codes = round_first(
                    values.reshape(-1), squares.reshape(-1), sides(tuple(values.shape))[0], unit, None
                )
                state = _state(values, Form.SCALED, codes)
                kept, coded = state.decoded() / scale, state.codes.elements.numpy()
            tally.add(
                n,
                bits=entropy(coded),
                projection=n * float((kept * true).sum()) / norm,
                error=n * float((kept - true).square().sum()) / norm,
            )
    return tally.row("first", f"{unit:g} root mean squares, {'plain' if plain else 'projection kept'}")


def _state(tensor: torch.Tensor, form: Form, codes: Codes | None) -> MomentsReference:
    if codes is None:
        raise ValueError("a moment is not finite")
    return MomentsReference("float32", sides(tuple(tensor.shape)), form, codes)


def main(quick: bool = False) -> Path:
    """Write ``results/moments.csv``; there is no shorter form."""
    with one_thread(), np.errstate(divide="ignore", invalid="ignore"):
        folder = DATA / "optimizer" / key_digest(FULL[0].key(0))
        train(FULL[0], 0, folder)
        frames = list(states(folder))
        rows = [second(frames, "octaves", 0.5)]
        rows += [second(frames, "factored", held) for held in (0.5, 0.75, 1.0)]
        rows += [first(frames, unit, plain=plain) for plain in (True, False) for unit in UNITS]
    return write("moments_quick" if quick else "moments", rows)


if __name__ == "__main__":
    main()
