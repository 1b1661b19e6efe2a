"""Trajectory of one tensor through a run: its size and its movement at each step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inshrink_core.analysis.movement import movement
from inshrink_core.chain import Archive
from inshrink_core.chain.archive import open_any
from inshrink_core.errors import NotFoundError
from inshrink_core.formats import Run
from inshrink_core.formats.source import peek
from inshrink_core.report import Report

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Trajectory", "trajectory"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(Report):
    """One tensor over steps. All arrays are float64 with one element per step, NaN for missing values.

    Parameters
    ----------
    tensor
        Its key.
    steps
        Ascending.
    rms
        Root mean square of its finite values.
    movement
        Root mean square of the change since the previous step in `steps`.
    relative_movement
        `movement` over the `rms` of the previous step.
    """

    tensor: str
    steps: tuple[int, ...]
    rms: NDArray[np.float64]
    movement: NDArray[np.float64]
    relative_movement: NDArray[np.float64]


def trajectory(
    source: Run | Archive | str | os.PathLike[str],
    tensor: str,
    *,
    steps: Iterable[int] | None = None,
) -> Trajectory:
    """Follow one tensor through a run or an archive; read only this tensor of every step.

    Parameters
    ----------
    source
        A run, an archive, or the path of one.
    tensor
        Its key.
    steps
        Restrict the result to these steps; by default all.

    Raises
    ------
    NotFoundError
        No step has the tensor, or a step does not exist.

    Notes
    -----
    O(values read) time; memory of two copies of the tensor.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> found = inshrink_core.analysis.trajectory(run, "fc1.weight", steps=run.steps[:3])
    >>> found.rms.shape, bool(found.movement[1] > 0)
    ((3,), True)
    """
    opened = source if isinstance(source, Run | Archive) else open_any(source)
    series = opened.sequential() if isinstance(opened, Archive) else opened
    chosen = tuple(opened.steps) if steps is None else tuple(sorted(set(steps)))
    columns = np.full((3, len(chosen)), np.nan)
    previous: Tensor | None = None
    found = False
    for place, step in enumerate(chosen):
        checkpoint = series[step]
        spec = checkpoint.spec(tensor) if tensor in checkpoint else None
        values = None if spec is None else peek(checkpoint.source, spec)
        if values is not None:
            found = True
            columns[:, place] = _measure(values, previous)
        previous = values
    if not found:
        raise NotFoundError(
            f"no step has a tensor '{tensor}'",
            where=str(opened.path),
            remedy="`inshrink inspect --tensors` lists them",
        )
    return Trajectory(
        tensor=tensor,
        steps=chosen,
        rms=columns[0],
        movement=columns[1],
        relative_movement=columns[2],
    )


def _measure(values: Tensor, previous: Tensor | None) -> tuple[float, float, float]:
    """Return rms, movement and relative movement; NaN movement after a change of shape or dtype."""
    itself = movement(values, values)
    rms = _root(itself.squared_after, itself.n_finite)
    if previous is None or (previous.shape, previous.dtype) != (values.shape, values.dtype):
        return rms, math.nan, math.nan
    moved = movement(previous, values)
    return rms, _root(moved.squared, moved.n_finite), _root(moved.squared, moved.squared_before)


def _root(total: float, n: float) -> float:
    return math.sqrt(total / n) if n else math.nan
